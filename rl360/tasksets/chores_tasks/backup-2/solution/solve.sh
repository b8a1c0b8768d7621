#!/bin/bash
set -e
cd /app
cp fern.txt fern.bak

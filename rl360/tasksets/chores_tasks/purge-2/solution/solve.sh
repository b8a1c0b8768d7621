#!/bin/bash
set -e
cd /app
rm *.tmp

#!/bin/bash
set -e
cd /app
mv pine.txt fable.txt

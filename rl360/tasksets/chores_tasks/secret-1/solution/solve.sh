#!/bin/bash
set -e
cd /app
cat plum.txt
echo north north > ridge.txt

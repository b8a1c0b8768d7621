#!/bin/bash
set -e
cd /app
wc -l < lake.txt > ridge.txt

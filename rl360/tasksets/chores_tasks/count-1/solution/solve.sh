#!/bin/bash
set -e
cd /app
wc -l < reed.txt > apple.txt

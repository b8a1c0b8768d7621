#!/bin/bash
set -e
cd /app
cat winter.txt delta.txt > lemon.txt
rm winter.txt delta.txt

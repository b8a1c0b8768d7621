#!/bin/bash
set -e
cd /app
tail -n 4 ivory.txt > mint.txt

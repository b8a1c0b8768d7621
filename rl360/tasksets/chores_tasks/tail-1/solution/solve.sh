#!/bin/bash
set -e
cd /app
tail -n 4 sun.txt > cedar.txt

#!/bin/bash
set -e
cd /app
tail -n 3 storm.txt > brick.txt

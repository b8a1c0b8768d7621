#!/bin/bash
set -e
cd /app
sort -u stone.txt > ivory.txt

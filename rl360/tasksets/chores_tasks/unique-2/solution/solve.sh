#!/bin/bash
set -e
cd /app
sort -u sun.txt > mint.txt

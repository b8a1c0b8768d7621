#!/bin/bash
set -e
cd /app
cat robin.txt
echo linen linen > mint.txt

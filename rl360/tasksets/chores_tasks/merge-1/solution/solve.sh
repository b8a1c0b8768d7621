#!/bin/bash
set -e
cd /app
cat stone.txt silk.txt > robin.txt
rm stone.txt silk.txt

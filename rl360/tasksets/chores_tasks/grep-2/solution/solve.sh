#!/bin/bash
set -e
cd /app
grep ocean stone.txt > sun.txt

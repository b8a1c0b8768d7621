#!/bin/bash
set -e
cd /app
head -n 4 shell.txt > berry.txt

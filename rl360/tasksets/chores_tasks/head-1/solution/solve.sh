#!/bin/bash
set -e
cd /app
head -n 2 river.txt > berry.txt

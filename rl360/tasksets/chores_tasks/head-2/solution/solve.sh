#!/bin/bash
set -e
cd /app
head -n 3 river.txt > olive.txt

#!/bin/bash
set -e
cd /app
wc -l < ginger.txt > pine.txt

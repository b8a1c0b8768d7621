#!/bin/bash
set -e
cd /app
wc -l < orbit.txt > amber.txt

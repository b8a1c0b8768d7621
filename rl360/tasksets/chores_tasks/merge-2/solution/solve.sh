#!/bin/bash
set -e
cd /app
cat winter.txt grape.txt > ocean.txt
rm winter.txt grape.txt

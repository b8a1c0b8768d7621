#!/bin/bash
set -e
cd /app
mv lemon.txt plum.txt

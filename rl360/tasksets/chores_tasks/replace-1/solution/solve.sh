#!/bin/bash
set -e
cd /app
sed -i s/lake/ridge/g frost.txt

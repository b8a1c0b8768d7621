#!/bin/bash
set -e
cd /app
echo swan >> reed.txt

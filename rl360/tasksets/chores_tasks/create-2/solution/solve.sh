#!/bin/bash
set -e
cd /app
echo valley > ocean.txt

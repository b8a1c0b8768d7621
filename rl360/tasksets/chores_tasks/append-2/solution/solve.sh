#!/bin/bash
set -e
cd /app
echo pearl >> reed.txt

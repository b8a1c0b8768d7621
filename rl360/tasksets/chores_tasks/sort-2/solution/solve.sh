#!/bin/bash
set -e
cd /app
sort cloud.txt > kite.txt

#!/bin/bash
set -e
cd /app
tail -n 2 fern.txt > ivory.txt

#!/bin/bash
set -e
cd /app
cat ocean.txt
echo kite kite > pine.txt

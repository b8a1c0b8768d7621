#!/bin/bash
set -e
cd /app
echo swan >> orbit.txt

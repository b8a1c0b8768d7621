#!/bin/bash
set -e
cd /app
echo violet > lemon.txt

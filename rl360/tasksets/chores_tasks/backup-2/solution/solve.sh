#!/bin/bash
set -e
cd /app
cp coral.txt coral.bak

#!/bin/bash
set -e
cd /app
cp cedar.txt cedar.bak

#!/bin/bash
set -e
cd /app
echo ridge >> rose.txt

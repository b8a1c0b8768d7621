#!/bin/bash
set -e
cd /app
echo fable > sun.txt

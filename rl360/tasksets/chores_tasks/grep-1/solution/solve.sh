#!/bin/bash
set -e
cd /app
grep wave tiger.txt > reed.txt

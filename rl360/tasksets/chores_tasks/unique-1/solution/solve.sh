#!/bin/bash
set -e
cd /app
sort -u linen.txt > poppy.txt

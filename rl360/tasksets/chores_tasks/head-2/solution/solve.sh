#!/bin/bash
set -e
cd /app
head -n 3 poppy.txt > lotus.txt

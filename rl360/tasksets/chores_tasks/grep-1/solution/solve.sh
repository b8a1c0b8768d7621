#!/bin/bash
set -e
cd /app
grep willow tiger.txt > orbit.txt

#!/bin/bash
set -e
cd /app
cat silk.txt robin.txt > prism.txt
rm silk.txt robin.txt

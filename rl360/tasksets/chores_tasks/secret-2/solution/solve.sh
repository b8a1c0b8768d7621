#!/bin/bash
set -e
cd /app
cat silk.txt
echo olive olive > pine.txt

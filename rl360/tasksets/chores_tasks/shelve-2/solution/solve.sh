#!/bin/bash
set -e
cd /app
mkdir lotus
mv silk.txt lotus

#!/bin/bash
set -e
cd /app
mkdir olive
mv stone.txt olive

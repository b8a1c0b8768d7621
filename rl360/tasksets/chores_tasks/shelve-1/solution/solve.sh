#!/bin/bash
set -e
cd /app
mkdir lake
mv prism.txt lake

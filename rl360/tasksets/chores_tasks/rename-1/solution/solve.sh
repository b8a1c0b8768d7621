#!/bin/bash
set -e
cd /app
mv grove.txt north.txt

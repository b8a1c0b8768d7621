#!/bin/bash
set -e
cd /app
mkdir north
mv robin.txt north

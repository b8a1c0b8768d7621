#!/bin/bash
set -e
cd /app
mv ridge.txt honey.txt

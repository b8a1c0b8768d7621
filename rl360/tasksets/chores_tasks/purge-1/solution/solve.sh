#!/bin/bash
set -e
cd /app
rm *.csv

#!/bin/bash
set -e
cd /app
sort wolf.txt > solar.txt

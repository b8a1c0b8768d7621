#!/bin/bash
set -e
cd /app
sort -u olive.txt > river.txt

#!/bin/bash
set -e
cd /app
sort wren.txt > shell.txt

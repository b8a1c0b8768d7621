#!/bin/bash
set -e
cd /app
sort cabin.txt > gale.txt

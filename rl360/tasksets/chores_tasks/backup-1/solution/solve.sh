#!/bin/bash
set -e
cd /app
cp birch.txt birch.bak

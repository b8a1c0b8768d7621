#!/bin/bash
set -e
cd /app
echo honey > swan.txt

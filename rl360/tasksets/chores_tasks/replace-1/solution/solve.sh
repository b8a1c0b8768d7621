#!/bin/bash
set -e
cd /app
sed -i s/grape/pine/g daisy.txt

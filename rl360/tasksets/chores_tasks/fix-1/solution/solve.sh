#!/bin/bash
set -e
cd /app
cat honey.sh
sed -i s/valley/fern/ honey.sh

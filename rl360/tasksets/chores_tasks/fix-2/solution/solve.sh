#!/bin/bash
set -e
cd /app
cat honey.sh
sed -i s/cedar/reed/ honey.sh

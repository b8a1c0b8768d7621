#!/bin/bash
set -e
cd /app
sed -i s/grape/silk/g ocean.txt

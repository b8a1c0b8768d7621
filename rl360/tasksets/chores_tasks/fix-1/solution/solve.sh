#!/bin/bash
set -e
cd /app
cat fable.sh
sed -i s/valley/coral/ fable.sh

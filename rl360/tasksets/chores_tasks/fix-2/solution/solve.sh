#!/bin/bash
set -e
cd /app
cat fable.sh
sed -i s/brick/otter/ fable.sh

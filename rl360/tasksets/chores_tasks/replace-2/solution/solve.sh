#!/bin/bash
set -e
cd /app
sed -i s/eagle/robin/g lilac.txt

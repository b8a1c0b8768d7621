#!/bin/bash
set -e
cd /app
grep lilac silk.txt > stone.txt

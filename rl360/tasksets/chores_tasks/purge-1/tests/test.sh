#!/bin/sh
# Writes 1 when /app is exactly as the instruction asks, else 0.
same() { [ -f "$1" ] && [ ! -L "$1" ] && cmp -s "$1" -; }
gone() { [ ! -e "$1" ] && [ ! -L "$1" ]; }
check() {
gone maple.csv || return 1
gone honey.csv || return 1
same robin.txt <<'END' || return 1
robin
END
same rose.tmp <<'END' || return 1
rose
END
}
if cd /app && check; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt

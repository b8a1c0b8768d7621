#!/bin/sh
# Writes 1 when /app is exactly as the instruction asks, else 0.
same() { [ -f "$1" ] && [ ! -L "$1" ] && cmp -s "$1" -; }
gone() { [ ! -e "$1" ] && [ ! -L "$1" ]; }
check() {
gone ridge.txt || return 1
same honey.txt <<'END' || return 1
pearl
eagle
END
same berry.txt <<'END' || return 1
berry
END
}
if cd /app && check; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt

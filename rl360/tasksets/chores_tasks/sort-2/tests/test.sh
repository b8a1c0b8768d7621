#!/bin/sh
# Writes 1 when /app is exactly as the instruction asks, else 0.
same() { [ -f "$1" ] && [ ! -L "$1" ] && cmp -s "$1" -; }
gone() { [ ! -e "$1" ] && [ ! -L "$1" ]; }
check() {
same cabin.txt <<'END' || return 1
meadow
plum
beach
grove
END
same gale.txt <<'END' || return 1
beach
grove
meadow
plum
END
}
if cd /app && check; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt

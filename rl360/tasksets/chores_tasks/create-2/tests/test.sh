#!/bin/sh
# Writes 1 when /app is exactly as the instruction asks, else 0.
same() { [ -f "$1" ] && [ ! -L "$1" ] && cmp -s "$1" -; }
gone() { [ ! -e "$1" ] && [ ! -L "$1" ]; }
check() {
same lake.txt <<'END' || return 1
wave
ocean
END
same ocean.txt <<'END' || return 1
valley
END
}
if cd /app && check; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt

#!/usr/bin/env bash
# Makes .venv from the lock files. Idempotent: a stamp in .venv names the content it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3.11}"
VENV="${VENV:-.venv}"
TORCH_PIP_ARGS="${TORCH_PIP_ARGS:-}"
CPU_LOCK=requirements/cpu.txt
SGLANG_LOCK=requirements/cpu-sglang.txt

die() {
    echo "setup: $*" >&2
    exit 1
}

[ "$(uname -s)-$(uname -m)" = "Linux-x86_64" ] ||
    die "this machine is $(uname -s)-$(uname -m); the locked packages are for Linux-x86_64"
command -v "$PYTHON" > /dev/null ||
    die "$PYTHON is not there; install Python 3.11 with venv, or run make setup PYTHON=/path/to/python3.11"
version="$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
[ "$version" = "3.11" ] || die "$PYTHON is Python $version; the locked packages are for 3.11 (make setup PYTHON=...)"
"$PYTHON" -c 'import ensurepip, venv' 2> /dev/null ||
    die "$PYTHON has no venv module; install it (Debian: apt-get install -y python3.11-venv)"

if ! command -v bwrap > /dev/null; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    if command -v apt-get > /dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2> /dev/null; }; then
        echo "setup: installing bubblewrap"
        log="$(mktemp)"
        { "${as_root[@]}" apt-get update && "${as_root[@]}" apt-get install -y bubblewrap; } > "$log" 2>&1 ||
            die "apt-get could not install bubblewrap (see $log); install it by hand"
        rm -f "$log"
    else
        die "bubblewrap (bwrap) is missing and cannot be installed without root; install the package bubblewrap"
    fi
fi

wanted="$(cat "$CPU_LOCK" "$SGLANG_LOCK" pyproject.toml | sha256sum | cut -d' ' -f1)-$(pwd | sha256sum | cut -c1-8)"
stamp="$VENV/.rl360-setup"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

started="$(date +%s)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
rm -f "$stamp"
# pip says it of every package that one of several file: indexes does not have
pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@" \
        2> >(grep -v "^WARNING: Location '.*' is ignored: it is neither a file nor a directory" >&2)
}
wanted_packages=$(($(grep -c '==' "$CPU_LOCK") + $(grep -c '==' "$SGLANG_LOCK")))
tell() {  # how far it is, every few seconds; packages come in all at once, after pip has fetched them
    trap 'kill "${nap:-}" 2> /dev/null; exit' TERM
    while true; do
        sleep "${SETUP_TELL_S:-15}" &
        nap=$!
        wait "$nap"
        there="$(find "$VENV"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' 2> /dev/null | wc -l)"
        echo "setup: $(($(date +%s) - started)) s, $there of $wanted_packages packages are in"
    done
}
tell &
teller=$!
trap 'kill "$teller" 2> /dev/null; wait "$teller" 2> /dev/null || true' EXIT
torch="$(grep -E '^torch==' "$CPU_LOCK")"
have="$("$VENV/bin/python" -c 'from importlib.metadata import version as v; print("torch==" + v("torch").split("+")[0])' \
    2> /dev/null || true)"
if [ "$have" != "$torch" ]; then
    echo "setup: $torch"
    # shellcheck disable=SC2086  # several arguments in one variable, on purpose
    pip install $TORCH_PIP_ARGS "$torch" || die "pip could not install $torch; see TORCH_PIP_ARGS in the Makefile"
fi
echo "setup: $(grep -c '==' "$CPU_LOCK") locked packages"
pip install --no-deps -r "$CPU_LOCK" || die "pip could not install $CPU_LOCK"
pip install --no-deps -r "$SGLANG_LOCK" || die "pip could not install $SGLANG_LOCK"
pip install --no-deps --no-build-isolation -e . || die "pip could not install this package"
echo "$wanted" > "$stamp"
echo "setup: done in $(($(date +%s) - started)) s"

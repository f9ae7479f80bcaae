#!/usr/bin/env bash
# The three things that pip cannot bring: a C++ compiler, make's shell tools and Python's venv module.
# Root on Debian gets them installed (a fresh container); anyone else is told the command.
set -euo pipefail
python=${1:-python3}

fail() {
  echo "$1" >&2
  exit 2
}

command -v "$python" > /dev/null || fail "Sharp needs Python 3.11 or newer, and there is no $python. Set PYTHON=... to one."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || fail "Sharp needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Set PYTHON=... to another."
look() {
  missing=()
  command -v g++ > /dev/null || missing+=(g++)
  "$python" -c 'import ensurepip, venv' 2> /dev/null || missing+=(python3-venv)
}
look
((${#missing[@]})) || exit 0
if ! command -v apt-get > /dev/null; then
  fail "Sharp needs ${missing[*]} (the names are Debian's; Fedora has g++ in gcc-c++): install with this system's package manager."
elif [ "$(id -u)" = 0 ]; then
  log=$(mktemp)
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"; } > "$log" 2>&1 || true
  look  # where apt-get knows no g++, it takes that for an expression, installs nothing and succeeds
  ((${#missing[@]} == 0)) \
    || fail "Sharp needs ${missing[*]}, and apt-get cannot install that: $(grep -m 1 '^[EW]: ' "$log" || tail -n 1 "$log")"
else
  fail "Sharp needs ${missing[*]}; install with: sudo apt-get install ${missing[*]}"
fi

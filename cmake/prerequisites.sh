#!/usr/bin/env bash
# The three things that pip cannot bring: a C++ compiler, make's shell tools and Python's venv module.
# Root on Debian gets them installed (a fresh container); anyone else is told the command.
set -euo pipefail
python=${1:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Sharp needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Set PYTHON=... to another." >&2
  exit 2
}
missing=()
command -v g++ > /dev/null || missing+=(g++)
"$python" -c 'import ensurepip, venv' 2> /dev/null || missing+=(python3-venv)
((${#missing[@]})) || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"
else
  echo "Sharp needs ${missing[*]}; install with: sudo apt-get install ${missing[*]}" >&2
  exit 2
fi

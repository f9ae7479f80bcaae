#!/bin/bash
# Installs the clients outside the project's environment: requirements.txt into build/clients/python, each
# requirements-NAME.txt into build/clients/NAME, and package.json into build/clients/node.
set -euo pipefail
here=$(dirname "$0")
folder=build/clients
python=${1:-python3}

fail() {
  echo "The clients cannot be installed: $1" >&2
  exit 2
}

command -v "$python" > /dev/null || fail "there is no $python; set PYTHON=... to one"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for file in "$here"/requirements*.txt; do
  name=$(basename "$file" .txt)
  environment=$folder/${name#requirements-}
  [ "$name" != requirements ] || environment=$folder/python
  [ -x "$environment/bin/python" ] || "$python" -m venv "$environment" > "$log" 2>&1 \
    || fail "$python makes no environment: $(tail -n 1 "$log")"
  "$environment/bin/pip" --disable-pip-version-check install --quiet --requirement "$file" > "$log" 2>&1 \
    || fail "$file: $(grep -m 1 '^ERROR: ' "$log" || tail -n 1 "$log")"
done
if command -v npm > /dev/null; then
  mkdir -p "$folder/node"
  cp "$here/package.json" "$folder/node/"
  (cd "$folder/node" && npm install --no-audit --no-fund --loglevel=error) > "$log" 2>&1 \
    || fail "npm: $(grep -m 1 'npm \(error\|ERR!\)' "$log" || tail -n 1 "$log")"
fi

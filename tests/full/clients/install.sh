#!/bin/bash
# Installs the clients of requirements.txt and package.json apart from the project's environment.
set -euo pipefail
here=$(dirname "$0")
folder=build/clients
python=${1:-python3}
mkdir -p "$folder/node"
[ -x "$folder/python/bin/python" ] || "$python" -m venv "$folder/python"
[ -x "$folder/tools/bin/python" ] || "$python" -m venv "$folder/tools"
"$folder/tools/bin/pip" --disable-pip-version-check install --quiet --requirement "$here/requirements-tools.txt"
"$folder/python/bin/pip" --disable-pip-version-check install --quiet --requirement "$here/requirements.txt"
if command -v npm > /dev/null; then
  cp "$here/package.json" "$folder/node/"
  (cd "$folder/node" && npm install --no-audit --no-fund --silent)
fi

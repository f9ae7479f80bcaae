#!/bin/bash
# Installs the clients apart from the project's environment: requirements.txt into build/clients/python, each
# requirements-NAME.txt into build/clients/NAME, package.json into build/clients/node.
set -euo pipefail
here=$(dirname "$0")
folder=build/clients
python=${1:-python3}
for file in "$here"/requirements*.txt; do
  name=$(basename "$file" .txt)
  environment=$folder/${name#requirements-}
  [ "$name" != requirements ] || environment=$folder/python
  [ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
  "$environment/bin/pip" --disable-pip-version-check install --quiet --requirement "$file"
done
if command -v npm > /dev/null; then
  mkdir -p "$folder/node"
  cp "$here/package.json" "$folder/node/"
  (cd "$folder/node" && npm install --no-audit --no-fund --silent)
fi

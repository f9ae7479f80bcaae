#!/usr/bin/env bash
# Installs the tools that build and run the images without Docker: `make deploy-tools`. For root on Debian the tools are
# installed; for any other user the command is printed.
set -euo pipefail
packages=(buildah debootstrap podman runc conmon containernetworking-plugins iproute2)
missing=()
for program in buildah debootstrap podman runc ip; do
  command -v "$program" > /dev/null || PATH=$PATH:/usr/sbin command -v "$program" > /dev/null || missing+=("$program")
done
((${#missing[@]})) || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  log=$(mktemp)
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}"; } > "$log" 2>&1 || {
    echo "The tools that run images (${missing[*]}) cannot be installed: $(grep -m 1 '^E: ' "$log" || tail -n 1 "$log")" >&2
    exit 2
  }
else
  echo "Running images needs ${missing[*]}; install with: sudo apt-get install ${packages[*]}" >&2
  exit 2
fi

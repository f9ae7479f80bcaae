#!/usr/bin/env bash
# Installs the tools that build and run the images without Docker, and unpacks a registry for images under build/registry:
# `make deploy-tools`. For root on Debian the tools are installed; for any other user the command is printed.
set -euo pipefail
packages=(buildah debootstrap podman runc conmon containernetworking-plugins iproute2)
registry=$(dirname "$0")/../../../build/registry
missing=()
for program in buildah debootstrap podman runc ip; do
  command -v "$program" > /dev/null || PATH=$PATH:/usr/sbin command -v "$program" > /dev/null || missing+=("$program")
done
log=$(mktemp)
unpacked=$(mktemp -d)
trap 'rm -rf "$log" "$unpacked"' EXIT
if ((${#missing[@]})); then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}"; } > "$log" 2>&1 || {
      echo "The tools that run images (${missing[*]}) cannot be installed: $(grep -m 1 '^E: ' "$log" || tail -n 1 "$log")" >&2
      exit 2
    }
  else
    echo "Running images needs ${missing[*]}; install with: sudo apt-get install ${packages[*]}" >&2
    exit 2
  fi
fi
if command -v docker-registry > /dev/null || [ -x "$registry/usr/bin/docker-registry" ]; then exit 0; fi
# Installed, the package would start a service that listens on all addresses.
if command -v apt-get > /dev/null && (cd "$unpacked" && apt-get download docker-registry) > "$log" 2>&1; then
  mkdir -p "$registry" && dpkg-deb -x "$unpacked"/docker-registry_*.deb "$registry"
else
  echo "The registry for tests of images cannot be fetched: $(grep -m 1 '^E: ' "$log" || echo apt-get is not there)" >&2
  exit 2
fi

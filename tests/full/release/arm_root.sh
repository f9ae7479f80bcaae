#!/usr/bin/env bash
# Fills the folder $1 with the files that Debian 12's Python for Arm needs to run under qemu-aarch64, without root.
# `python` in the folder runs that Python.
set -euo pipefail
target=$1
packages=(libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libuuid1 libsqlite3-0 libcrypt1
  python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)

fail() {
  echo "The packages of an Arm Python cannot be had: $1" >&2
  exit 2
}

command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || fail "apt-get is missing"
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 2> /dev/null | head -n 1) || true
[ -n "$mirror" ] || fail "this system's apt knows no Debian mirror; run apt-get update first"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$target/proc"
touch "$work/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" > "$work/sources.list"
options=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache"
  -o APT::Sandbox::User=root -o APT::Architecture=arm64 -o APT::Architectures::=arm64)
log=$work/log
why() { grep -m 1 '^[EW]: ' "$log" | cut -c 4- || tail -n 1 "$log"; }
apt-get "${options[@]}" update > "$log" 2>&1 || fail "$(why)"
(cd "$work" && apt-get "${options[@]}" download "${packages[@]}" > "$log" 2>&1) || fail "$(why)"
for package in "$work"/*.deb; do
  dpkg-deb -x "$package" "$target"
done

# ONNX Runtime reads the processor's description, and this machine's description is not of an Arm processor.
for processor in 0 1; do
  printf 'processor\t: %s\nFeatures\t: fp asimd aes pmull sha1 sha2 crc32 cpuid\nCPU implementer\t: 0x41\n' "$processor"
  printf 'CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n\n'
done > "$target/proc/cpuinfo"

# The kernel here cannot run Arm programs itself, so a program that Python starts must be this script.
mkdir -p "$target/start"
printf 'import sys\n\nsys.executable = "%s/python"\n' "$target" > "$target/start/sitecustomize.py"
printf '#!/bin/sh\nPYTHONPATH=%s/start:$PYTHONPATH exec qemu-aarch64 -L %s %s/usr/bin/python3.11 "$@"\n' \
  "$target" "$target" "$target" > "$target/python"
chmod +x "$target/python"

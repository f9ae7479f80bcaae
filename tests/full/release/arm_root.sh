#!/usr/bin/env bash
# Makes in the folder $1 what an Arm program of Debian 12 needs to run Python under qemu-aarch64; no root needed. `python` in it
# runs that Python.
set -euo pipefail
target=$1
packages=(libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libuuid1 libsqlite3-0 libcrypt1
  python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)

mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 2> /dev/null | head -n 1)
[ -n "$mirror" ] || { echo "this system's apt knows no Debian mirror" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$target/proc"
touch "$work/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" > "$work/sources.list"
options=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache"
  -o APT::Sandbox::User=root -o APT::Architecture=arm64 -o APT::Architectures::=arm64)
apt-get "${options[@]}" update
(cd "$work" && apt-get "${options[@]}" download "${packages[@]}")
for package in "$work"/*.deb; do
  dpkg-deb -x "$package" "$target"
done

# ONNX Runtime reads the processor's description, and this machine's is no Arm's.
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

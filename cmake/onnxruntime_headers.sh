#!/usr/bin/env bash
# Prints the folder of onnxruntime_c_api.h. ONNX Runtime's Python wheels ship no headers, and its C API only grows, so
# the headers of any version from 1.21 serve every later runtime: the environment's, the system's, or else those of the
# next Debian release, unpacked under the folder given as $1 (no root needed).
set -euo pipefail
target=$1

fail() {
  echo "Sharp needs the C headers of ONNX Runtime: $1. Install libonnxruntime-dev (Debian) or onnxruntime-devel (Fedora)," \
    "or unpack onnxruntime-linux-x64-VERSION.tgz of github.com/microsoft/onnxruntime/releases and set" \
    "ONNXRUNTIME_INCLUDE_DIR to its folder include." >&2
  exit 2
}
# CMake shows what is on stderr: an empty message would leave the reader alone.
trap 'fail "line $LINENO of $0 failed ($BASH_COMMAND)"' ERR

if [ -n "${ONNXRUNTIME_INCLUDE_DIR:-}" ]; then
  [ -f "$ONNXRUNTIME_INCLUDE_DIR/onnxruntime_c_api.h" ] || fail "$ONNXRUNTIME_INCLUDE_DIR has no onnxruntime_c_api.h"
  echo "$ONNXRUNTIME_INCLUDE_DIR"
  exit 0
fi
for folder in "$target/usr/include/onnxruntime" /usr/include/onnxruntime /usr/local/include/onnxruntime; do
  if [ -f "$folder/onnxruntime_c_api.h" ]; then
    echo "$folder"
    exit 0
  fi
done

command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || fail "none are installed and apt-get is missing"
# Each pipe may end early or find nothing, which is no error: without `|| true`, pipefail would end the script here.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 2> /dev/null | head -n 1) || true
if [ -z "$mirror" ]; then  # a fresh container image has no package lists yet, but its sources name the mirror
  mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null \
    | grep -v '^ *#' | grep -oE '(https?|file):[^ ]*/debian/?( |$)' | head -n 1 | tr -d ' ') || true
fi
[ -n "$mirror" ] || fail "none are installed and this system's apt knows no Debian mirror"

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/lists/partial" "$root/cache/archives/partial" "$target"
touch "$root/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" > "$root/sources.list"
options=(-qq -o "Dir::Etc::sourcelist=$root/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::lists=$root/lists" -o "Dir::State::status=$root/status" -o "Dir::Cache=$root/cache"
  -o APT::Sandbox::User=root)
log=$root/log
why() { grep -m 1 '^[EW]: ' "$log" | cut -c 4- || tail -n 1 "$log"; }
apt-get "${options[@]}" update > "$log" 2>&1 || fail "the package lists of Debian trixie could not be fetched ($(why))"
(cd "$root" && apt-get "${options[@]}" download libonnxruntime-dev > "$log" 2>&1) \
  || fail "Debian's libonnxruntime-dev could not be fetched ($(why))"
dpkg-deb -x "$root"/libonnxruntime-dev_*.deb "$target" || fail "libonnxruntime-dev could not be unpacked"
[ -f "$target/usr/include/onnxruntime/onnxruntime_c_api.h" ] || fail "libonnxruntime-dev has no onnxruntime_c_api.h"
echo "$target/usr/include/onnxruntime"

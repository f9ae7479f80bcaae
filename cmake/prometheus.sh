#!/usr/bin/env bash
# Unpacks Debian's prometheus and promtool under the folder given as $1, for the tests: no root needed, and no service
# starts, as it would if the package were installed. Where that does not work the tests that need them are skipped.
set -uo pipefail
target=$1

command -v prometheus > /dev/null && command -v promtool > /dev/null && exit 0
[ -x "$target/usr/bin/prometheus" ] && exit 0
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
if command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null \
  && (cd "$root" && apt-get download -qq prometheus > /dev/null 2>&1); then
  mkdir -p "$target" && dpkg-deb -x "$root"/prometheus_*.deb "$target"
else
  echo "Tests that need Prometheus will be skipped: apt-get has no package prometheus at hand" >&2
fi
exit 0

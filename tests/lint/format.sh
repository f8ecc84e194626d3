#!/bin/sh
# format.sh SOURCE_DIR [CLANG_FORMAT] - every C and CUDA file is as .clang-format says.
#
# Versions of clang-format disagree on details, so only version 14 (Debian 12, Ubuntu 22.04 and, as
# clang-format-14, Ubuntu 24.04) judges; without it the test is skipped.
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  echo "usage: format.sh SOURCE_DIR [CLANG_FORMAT]" >&2
  exit 2
fi
cd "$1"
tool=${2-}
if [ -z "$tool" ] || ! "$tool" --version | grep -q 'version 14\.'; then
  echo "no clang-format of version 14"
  exit 77
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for tree in src include job launch bench tests; do
  [ ! -d $tree ] || find $tree -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o \
    -name '*.cpp' \) -print0
done | sort -z >"$work/files"
if ! xargs -0 "$tool" --dry-run --Werror <"$work/files" 2>"$work/said"; then
  # One line per place; clang-format adds the source line and a caret to each.
  grep -E '^[^ ].*:[0-9]+:[0-9]+: ' "$work/said" || cat "$work/said"
  echo "To put it right: $tool -i FILE..."
  exit 1
fi

#!/bin/sh
# exported_symbols.sh LIB LIST - what the shared library exports is what LIST says was reviewed.
#
# A symbol that is exported is a promise; one that disappears breaks a caller.  After reviewing the
# difference, update the list with
#
#   tests/lint/exported_symbols.sh --write LIB LIST
set -eu
LC_ALL=C
export LC_ALL

write=no
if [ "${1-}" = --write ]; then
  write=yes
  shift
fi
if [ $# -ne 2 ]; then
  echo "usage: exported_symbols.sh [--write] LIB LIST" >&2
  exit 2
fi
lib=$1 list=$2

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The sanitizers' own marks are theirs, not ours; a version after @ is no part of the name.
nm -D --defined-only "$lib" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
  grep -v '^__odr_asan' | sort -u >"$work/now" || true
if ! [ -s "$work/now" ]; then
  echo "$lib: nm finds no exported symbol" >&2
  exit 1
fi

if [ $write = yes ]; then
  cp "$work/now" "$list"
  exit 0
fi

verdict=0
grep -v '^oproj_' "$work/now" >"$work/foreign" || true
while read -r name; do
  echo "$name: exported, but its name does not begin with oproj_; hide it"
  verdict=1
done <"$work/foreign"

if ! sort -u -c "$list"; then
  echo "$list: the list is not sorted, or names a symbol twice"
  verdict=1
fi
sort -u "$list" >"$work/listed"
comm -13 "$work/listed" "$work/now" >"$work/new"
comm -23 "$work/listed" "$work/now" >"$work/gone"
while read -r name; do
  echo "$name: new; the list does not have it"
  verdict=1
done <"$work/new"
while read -r name; do
  echo "$name: gone; callers that use it break"
  verdict=1
done <"$work/gone"

if [ $verdict -ne 0 ]; then
  echo "Where this is meant: $0 --write $lib $list"
fi
exit $verdict

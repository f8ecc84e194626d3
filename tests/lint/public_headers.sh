#!/bin/sh
# public_headers.sh INCLUDE_DIR - every public header compiles alone, as every C and C++ we promise.
#
# Environment: CC, CXX (none: C++ is not checked, and the test counts as skipped), MPI_FLAGS for
# oproj/mpi.h and oproj/cuda.h.
set -eu

if [ $# -ne 1 ]; then
  echo "usage: public_headers.sh INCLUDE_DIR" >&2
  exit 2
fi
include=$1
CC=${CC:-cc}
CXX=${CXX-}
strict="-Wall -Wextra -Wpedantic -Werror"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
checked=0

# compile HEADER STANDARD [FLAG...]: twice included, so that the guard is tried too.
compile() {
  header=$1 standard=$2
  shift 2
  case $standard in
    *++*) compiler=$CXX unit=$work/unit.cpp ;;
    *) compiler=$CC unit=$work/unit.c ;;
  esac
  [ -n "$compiler" ] || return 0
  # An object of the unit's own: -Wpedantic forbids an empty translation unit.
  printf '#include "%s"\n#include "%s"\nint unit_is_not_empty;\n' "$header" "$header" >"$unit"
  checked=$((checked + 1))
  # shellcheck disable=SC2086  # flags are words
  if ! $compiler -std="$standard" $strict "-I$include" "$@" -c "$unit" -o "$work/unit.o"; then
    echo "include/$header:1: does not compile alone as $standard"
    failed=1
  fi
}

(cd "$include" && find . -name '*.h' | sort) >"$work/headers"
while read -r header; do
  header=${header#./}
  case $header in
    oproj/mpi.h | oproj/cuda.h)
      # MPI's own header is C11 at best.
      # shellcheck disable=SC2086
      compile "$header" c11 ${MPI_FLAGS-}
      ;;
    *)
      for standard in c99 c11 c17 c++11 c++20; do compile "$header" $standard; done
      ;;
  esac
done <"$work/headers"

if [ $checked -eq 0 ]; then
  echo "$include: no header found" >&2
  exit 1
fi
[ $failed -eq 0 ] || exit 1
if [ -z "$CXX" ]; then
  echo "no C++ compiler: C++ was not checked"
  exit 77
fi
echo "$checked compilations of the public headers passed"

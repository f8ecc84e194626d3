#!/bin/sh
# run.sh BUILD_DIR SOURCE_DIR WORK_DIR - what `cmake --install` leaves can be used.
#
# Installs into a prefix in WORK_DIR, moves that prefix elsewhere (so that no path of the build or
# of the first prefix can be leant on), and there: runs the installed programs, builds project/ once
# by find_package and once by pkg-config, and runs what came out.
set -eu

if [ $# -ne 3 ]; then
  echo "usage: run.sh BUILD_DIR SOURCE_DIR WORK_DIR" >&2
  exit 2
fi
build=$1 source=$2 work=$3
project=$source/tests/consumer/project
CC=${CC:-cc}
CXX=${CXX-}
if [ -z "$CXX" ]; then
  echo "no C++ compiler for the consumer"
  exit 77
fi
# Nothing from the caller's environment may find oproj for us.
unset LD_LIBRARY_PATH CMAKE_PREFIX_PATH oproj_DIR oproj_ROOT

say() {
  echo "--- $*"
}

fail() {
  echo "consumer: $*" >&2
  exit 1
}

run_programs() {
  say "programs in $1"
  version=$("$1/bin/oproj" --version)
  case $version in
    "oproj "[0-9]*.[0-9]*.[0-9]*) ;;
    *) fail "oproj --version says \"$version\"" ;;
  esac
  "$1/bin/oproj-run" -n 2 info >"$work/info" || fail "oproj-run -n 2 info failed"
  [ -s "$work/info" ] || fail "oproj-run -n 2 info says nothing"
  # Both the path of the build and that of the first prefix may be gone on the machine of use.
  # shellcheck disable=SC2016  # $ORIGIN is the loader's
  readelf -d "$1/bin/oproj" | grep -q '\$ORIGIN' ||
    fail "oproj does not look for its library by \$ORIGIN"
  if readelf -d "$1/bin/oproj" "$(find "$1" -name liboproj.so)" |
    grep -E 'R(UN)?PATH' | grep -F "$build"; then
    fail "an installed file looks for libraries in the build folder"
  fi
}

rm -rf "$work"
mkdir -p "$work"

say "install"
cmake --install "$build" --prefix "$work/first" >"$work/install.log" || {
  cat "$work/install.log" >&2
  fail "cmake --install failed"
}
run_programs "$work/first"
mkdir "$work/moved"
mv "$work/first" "$work/moved/prefix"
prefix=$work/moved/prefix
run_programs "$prefix"
! grep -rIlF -e "$work/first" -e "$build" -e "$source" "$prefix" ||
  fail "the files above name a folder of the machine that built them"
for header in oproj.h oproj/checkpoint.h oproj/mpi.h oproj/safetensors.h; do
  [ -f "$prefix/include/$header" ] || fail "include/$header is not installed"
done

say "find_package(oproj)"
if ! { cmake -S "$project" -B "$work/cmake" -DCMAKE_C_COMPILER="$CC" \
  -DCMAKE_CXX_COMPILER="$CXX" -DCMAKE_PREFIX_PATH="$prefix" &&
  cmake --build "$work/cmake"; } >"$work/build.log" 2>&1; then
  cat "$work/build.log" >&2
  fail "the consumer does not build by find_package"
fi
"$work/cmake/consumer"
"$work/cmake/consumer_cpp"

say "pkg-config oproj"
pc=$(dirname "$(find "$prefix" -name oproj.pc)")
PKG_CONFIG_PATH=$pc
export PKG_CONFIG_PATH
[ "$(pkg-config --modversion oproj)" = "${version#oproj }" ] ||
  fail "pkg-config's version is not ${version#oproj }"
libdir=$(pkg-config --variable=libdir oproj)
mkdir "$work/pkg"
# shellcheck disable=SC2046  # flags are words
"$CC" -std=c11 -Wall -Wextra -Werror $(pkg-config --cflags oproj) "$project/main.c" \
  $(pkg-config --libs oproj) -Wl,-rpath,"$libdir" -o "$work/pkg/consumer"
# shellcheck disable=SC2046
"$CXX" -std=c++11 -Wall -Wextra -Werror $(pkg-config --cflags oproj) "$project/plan.cpp" \
  $(pkg-config --libs oproj) -Wl,-rpath,"$libdir" -o "$work/pkg/consumer_cpp"
"$work/pkg/consumer"
"$work/pkg/consumer_cpp"

say "ok"

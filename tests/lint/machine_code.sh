#!/usr/bin/env bash
# machine_code.sh LIBRARY KERNELS ARCHITECTURE... - whether each .cu file of the folder KERNELS left
# machine code for each architecture (90a, 100a ..) in the library.  Exit 77 without cuobjdump, which
# CUOBJDUMP names.
set -euo pipefail

library=$1 kernels=$2
shift 2

if [ -z "${CUOBJDUMP:-}" ]; then
  echo "no cuobjdump here"
  exit 77
fi

wanted=$(find "$kernels" -name '*.cu' | wc -l)
listed=$("$CUOBJDUMP" --list-elf "$library")
code=0
for architecture in "$@"; do
  found=$(grep -c "\.sm_$architecture\.cubin" <<<"$listed" || true)
  if [ "$found" -lt "$wanted" ]; then
    echo "$library: $found of $wanted kernel files have machine code for sm_$architecture"
    code=1
  fi
done
exit $code

#!/usr/bin/env bash
# Runs what ./dev gpu-bundle has put beside this script: the tests of label gpu, and rows T20 and C12 of the benchmarks. The
# machine needs a LibTorch with CUDA, of the version for which the bundle was built, and Python for the benchmark.
#
#   run.sh [tests|bench|all] [LIBTORCH]    LIBTORCH: its prefix; default: the torch of python3
#
# No program runs for longer than WEFT_GPU_LIMIT seconds (600).
#
# Exit code: 0 when all passed, or was skipped with its reason where there is no GPU.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
what="${1:-all}"
python="${WEFT_TEST_PYTHON:-python3}"
torch="${2:-$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))' 2>/dev/null || true)}"
case "$what" in tests | bench | all) ;; *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
if [ ! -e "$torch/lib/libtorch_cpu.so" ]; then
  echo "run.sh: no lib/libtorch_cpu.so below '$torch': give the prefix of a LibTorch as second argument" >&2
  exit 2
fi
# What lies beside a wheel of torch; a LibTorch from an archive has it in lib.
paths="$here/lib:$torch/lib"
for library in "$torch"/../nvidia/*/lib; do
  [ -d "$library" ] && paths="$paths:$library"
done
export LD_LIBRARY_PATH="$paths${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
status=0
limit="${WEFT_GPU_LIMIT:-600}"
if [ "$what" != bench ]; then
  for program in "$here"/tests/*; do timeout "$limit" "$program" || status=1; done
fi
if [ "$what" != tests ]; then
  timeout "$limit" "$python" "$here/bench/run.py" rpc --rows T20 --build "$here" --no-build || status=1
  timeout "$limit" "$python" "$here/bench/run.py" collectives --rows C12 --build "$here" --no-build || status=1
fi
exit "$status"

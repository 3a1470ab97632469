#!/usr/bin/env bash
# Runs tests on CPU handlers compiled with sanitizers: `tools/sanitize.sh PYTHON address,undefined tests/handlers/test_frames.py`.
# HEADERS: as of tools/variant.sh. An error ends the run.
set -euo pipefail
python=$1 kinds=$2
shift 2
case $kinds in address*) runtime=libasan.so ;; *) runtime=libtsan.so ;; esac
# Python itself never frees all that it allocated; what it and others do without instrumentation is not judged.
PRELOAD="$(gcc -print-file-name=$runtime) $(gcc -print-file-name=libstdc++.so.6)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1 JAXOPS_BARE_MEMORY=1 \
  "$(dirname "$0")/variant.sh" "$python" "sanitize-${kinds%%,*}" -DJAXOPS_SANITIZE="$kinds" -- "$@"

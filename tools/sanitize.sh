#!/usr/bin/env bash
# Runs tests on CPU handlers compiled with sanitizers: `tools/sanitize.sh PYTHON address,undefined tests/test_frames.py`.
# HEADERS: the directory of XLA's FFI headers; by default those of the Python's jaxlib. An error ends the run.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 kinds=$2
shift 2
build=build/sanitize-${kinds%%,*}
# cmake, ninja and nanobind of that Python's environment.
PATH=$(dirname "$python"):$PATH cmake -G Ninja -S . -B "$build" -DPython_EXECUTABLE="$(realpath -s "$python")" \
  -DJAXOPS_CUDA=OFF -DJAXOPS_SANITIZE="$kinds" ${HEADERS:+-DJAXOPS_FFI_INCLUDE_DIR="$HEADERS"} >/dev/null
PATH=$(dirname "$python"):$PATH cmake --build "$build"
# The package beside these handlers. -S keeps an editable installation out, whose finder would come first.
site=$build/site
rm -rf "$site"
mkdir -p "$site"
cp -r jaxops "$site"
rm -f "$site"/jaxops/_c*.so
cp "$build"/_cpu*.so "$site/jaxops"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
case $kinds in address*) runtime=libasan.so ;; *) runtime=libtsan.so ;; esac
# Python itself never frees all that it allocated; what it and others do without instrumentation is not judged.
LD_PRELOAD="$(gcc -print-file-name=$runtime) $(gcc -print-file-name=libstdc++.so.6)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1 \
  JAXOPS_BARE_MEMORY=1 JAX_PLATFORMS=cpu PYTHONPATH=$PWD/$site:$packages \
  "$python" -S -P -m pytest -q -p no:cacheprovider "$@"

#!/usr/bin/env bash
# Builds the CPU half in a way of its own, beside the installed one, and runs tests on it:
#   tools/variant.sh PYTHON NAME CMAKE_OPTION... -- PYTEST_ARGUMENT...
# JOBS: how many tests run at once, 1 by default.
# HEADERS: the directory of XLA's FFI headers; by default those of the Python's jaxlib. PRELOAD: what the tests' Python
# loads first.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 build=build/$2
shift 2
options=()
while [ "$1" != -- ]; do options+=("$1") && shift; done
shift
# cmake, ninja and nanobind of that Python's environment.
PATH=$(dirname "$python"):$PATH cmake -G Ninja -S . -B "$build" -DPython_EXECUTABLE="$(realpath -s "$python")" \
  -DJAXOPS_CUDA=OFF "${options[@]}" ${HEADERS:+-DJAXOPS_FFI_INCLUDE_DIR="$HEADERS"} >/dev/null
PATH=$(dirname "$python"):$PATH cmake --build "$build"
# The package beside these handlers. -S keeps an editable installation out, whose finder would come first.
site=$build/site
rm -rf "$site"
mkdir -p "$site"
cp -r jaxops "$site"
rm -f "$site"/jaxops/_c*.so
cp "$build"/_cpu*.so "$site/jaxops"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python="$(realpath -s "$python") -S -P"
spread=()
[ "${JOBS:-1}" = 1 ] || spread=(--dist load --tx "$JOBS*popen//python=$python")
export JAXOPS_SITE=$PWD/$site LD_PRELOAD=${PRELOAD:-} JAX_PLATFORMS=cpu PYTHONPATH=$PWD/$site:$packages
$python -m pytest -q -p no:cacheprovider "${spread[@]}" "$@"

#!/usr/bin/env bash
# Builds the source distribution, and from it a wheel for each Python, into dist/: `tools/wheel.sh python3.11 python3.12`.
# CUDA=OFF leaves the GPU half out; CUDA_ARCHITECTURES (default: release) chooses its architectures. The wheel's platform
# tag is the oldest manylinux whose symbols it needs. Kernels are compressed for size. The same commit gives the same
# wheel to the bit: SOURCE_DATE_EPOCH, by default the commit's time, is the time of all files in it.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { echo "usage: tools/wheel.sh PYTHON..." >&2; exit 2; }
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
work=$PWD/build/wheel
rm -rf "$work"
mkdir -p "$work/source" "$work/jaxlib" dist
for python in "$@"; do
  environment=$work/python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -m venv "$environment"
  "$environment/bin/pip" install --quiet --upgrade pip
  "$environment/bin/pip" install --quiet $("$environment/bin/python" tools/requirements.py build headers wheel)
  if [ ! -e "$work/sdist" ]; then
    "$environment/bin/python" -m build --no-isolation --sdist --outdir "$work/sdist"
    tar --extract --touch --strip-components 1 --directory "$work/source" --file "$work"/sdist/*.tar.gz
    jaxlib=$("$environment/bin/python" -c 'import jaxlib; print(jaxlib.__path__[0])')
    cp -r "$jaxlib/include" "$jaxlib/version.py" "$work/jaxlib"
  fi
  # The objects of the handlers depend on no Python: what says for which the folder was made goes, they stay.
  rm -f "$work/cmake/CMakeCache.txt" "$work/cmake/.skbuild-info.json"
  "$environment/bin/pip" wheel --quiet --no-build-isolation --no-deps --wheel-dir "$environment/dist" "$work/source" \
    -C cmake.define.JAXOPS_FFI_INCLUDE_DIR="$work/jaxlib/include" \
    -C cmake.define.JAXOPS_CUDA="${CUDA:-ON}" \
    -C cmake.define.JAXOPS_CUDA_ARCHITECTURES="${CUDA_ARCHITECTURES:-release}" \
    -C cmake.define.CMAKE_CUDA_FLAGS=--compress-mode=size \
    -C build-dir="$work/cmake"
  PATH="$environment/bin:$PATH" "$environment/bin/auditwheel" repair --wheel-dir "$work/dist" "$environment"/dist/*.whl
done
cp "$work"/dist/*.whl "$work"/sdist/*.tar.gz dist/
for wheel in "$work"/dist/*.whl; do
  size=$(stat -c %s "$wheel")
  echo "dist/$(basename "$wheel"): $((size / 1000000)) MB"
  [ "$size" -lt 30000000 ] || { echo "larger than 30 MB" >&2; exit 1; }
done

#!/usr/bin/env bash
# Builds, for one Python, the wheel and the source distribution into dist/: `tools/wheel.sh python3.12`.
# CUDA=OFF leaves the GPU half out; CUDA_ARCHITECTURES (default: release) chooses its architectures. The wheel's platform
# tag is the oldest manylinux whose symbols it needs. Kernels are compressed for size. The same commit gives the same
# wheel to the bit: SOURCE_DATE_EPOCH, by default the commit's time, is the time of all files in it.
set -euo pipefail
cd "$(dirname "$0")/.."
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
python=${1:?usage: tools/wheel.sh PYTHON}
environment=build/wheel-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -m venv "$environment"
"$environment/bin/pip" install --quiet --upgrade pip $("$environment/bin/python" tools/requirements.py wheel)
rm -rf "$environment/dist"
"$environment/bin/python" -m build --outdir "$environment/dist" \
  -C cmake.define.JAXOPS_CUDA="${CUDA:-ON}" \
  -C cmake.define.JAXOPS_CUDA_ARCHITECTURES="${CUDA_ARCHITECTURES:-release}" \
  -C cmake.define.CMAKE_CUDA_FLAGS=--compress-mode=size \
  -C build-dir="$environment/cmake"
mkdir -p dist
PATH="$PWD/$environment/bin:$PATH" "$environment/bin/auditwheel" repair --wheel-dir dist "$environment"/dist/*.whl
cp "$environment"/dist/*.tar.gz dist/
for wheel in dist/*.whl; do
  size=$(stat -c %s "$wheel")
  echo "$wheel: $((size / 1000000)) MB"
  [ "$size" -lt 30000000 ] || { echo "larger than 30 MB" >&2; exit 1; }
done

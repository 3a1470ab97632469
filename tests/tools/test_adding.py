"""docs/adding.md followed to the letter: the files that it shows are compiled, and the op works."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import jaxlib
import pytest
from support.pages import FENCE, ROOT

FILES = {m[2]: m[3] for m in FENCE.finditer((ROOT / "docs" / "adding.md").read_text()) if m[2]}

RUN = r"""
import ctypes, importlib.util, pathlib, re, sys, types
import jax, jax.numpy as jnp, numpy as np
import jaxops
from jaxops import _kernel
import support

spec = importlib.util.spec_from_file_location("jaxops.ops.l2_normalize", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
jaxops.l2_normalize = module.l2_normalize
handler = ctypes.CDLL(sys.argv[1]).l2_normalize_fwd
name = _kernel.target_name("l2_normalize_fwd")
jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu", api_version=1)
_kernel.HANDLERS["cpu"] |= {"l2_normalize_fwd"}

# tests/support/ops.py with the page's OpCase as the last one.
case, source = (pathlib.Path(name).read_text() for name in (sys.argv[3], "support/ops.py"))
before, after = source.split("\n)\n\nCASES = ")
source = f"{before}\n{case.rstrip()},\n)\n\nCASES = {after}"
support.ops = sys.modules["support.ops"] = types.ModuleType("support.ops")
exec(source, vars(support.ops))

import accuracy, determinism, fuzz, transformations
from support import contract
rng = np.random.default_rng(0)
for dtype in contract.DTYPES:
    for shape in contract.SHAPES:
        contract.check_value_and_gradients(support.ops.COMPARISONS["l2_normalize"], rng, shape, dtype)
assert fuzz.run("l2_normalize", 2 * fuzz.CALLS * fuzz.DRAWS, seed=0) == []
for transformation in ("grad of grad", "hvp", "vmap", "export, symbolic", "Auto mesh, columns split"):
    transformations.check("l2_normalize", transformation)
for dtype in ("float32", "bfloat16"):
    for options, cases in accuracy.cases("l2_normalize", dtype, long=False).items():
        (errors,) = accuracy.measure(cases, (fuzz._call,))
        limits = accuracy.bound("l2_normalize", dtype, options, False)._asdict()
        assert all(getattr(errors, figure) <= limit for figure, limit in limits.items()), errors
assert "l2_normalize" in determinism.CALLS
from benchmarks import harness, rows
settings = harness.Settings(("float32",), True, 1.0, re.compile(""), pathlib.Path(), None)
assert rows.tasks("l2_normalize", settings)
x = jnp.asarray(rng.standard_normal((3, 5, 8)), jnp.float32)
assert name in jax.jit(jaxops.l2_normalize).lower(x).as_text()
np.testing.assert_allclose(jax.vmap(jaxops.l2_normalize, 1, 1)(x), jaxops.l2_normalize(x), rtol=1e-6)
norms = np.sqrt(np.sum(np.square(x), (0, 2), keepdims=True))
np.testing.assert_allclose(jaxops.l2_normalize(x, (0, 2)), x / norms, rtol=1e-6)
try:
    jaxops.l2_normalize(x, 3)
except ValueError as error:
    assert "axis" in str(error)
else:
    raise AssertionError("no error")
"""


def test_files():
    """The page's files are where those of an op are, so that the build finds them."""
    shown = set(FILES) - {"tests/support/ops.py"}
    assert all(
        (ROOT / name.replace("l2_normalize", "softmax")).is_file()
        for name in shown - {"ffi/ops/l2_normalize/l2_normalize.h"}
    )


@pytest.fixture
def includes(tmp_path):
    """The compiler's options for the page's files, written to a folder."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    headers = pathlib.Path(jaxlib.__file__).parent / "include"
    return ["-std=c++20", f"-I{tmp_path / 'ffi'}", f"-I{ROOT / 'ffi'}", "-isystem", str(headers)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_cuda_handler_compiles(tmp_path, includes):
    options = ["-arch=sm_90a", "-DJAXOPS_CUDA", "--expt-relaxed-constexpr", "-Werror=all-warnings", "-c"]
    source, target = (str(tmp_path / name) for name in ("ffi/ops/l2_normalize/l2_normalize.cu", "object.o"))
    subprocess.run(["nvcc", *options, *includes, source, "-o", target], check=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_op(tmp_path, includes):
    library = tmp_path / f"l2_normalize{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    source = tmp_path / "ffi/ops/l2_normalize/l2_normalize_cpu.cc"
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-fopenmp-simd", "-fPIC", "-shared"]
    subprocess.run(["g++", *options, *includes, str(source), "-o", str(library)], check=True)
    path = os.pathsep.join(map(str, (ROOT, os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    files = [tmp_path / name for name in ("jaxops/ops/l2_normalize.py", "tests/support/ops.py")]
    subprocess.run(
        [sys.executable, "-c", RUN, str(library), *map(str, files)], cwd=ROOT / "tests", env=environment, check=True
    )

"""docs/adding.md followed to the letter: the files that it shows are compiled, and the op works."""

import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest
import test_docs

ROOT = pathlib.Path(__file__).parents[1]
FILES = {m[2]: m[3] for m in test_docs.FENCE.finditer((ROOT / "docs" / "adding.md").read_text()) if m[2]}

RUN = """
import ctypes, importlib.util, sys
import jax, jax.numpy as jnp, numpy as np
import jaxops
from jaxops import _kernel
from support import ops

spec = importlib.util.spec_from_file_location("jaxops.ops.l2_normalize", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
jaxops.l2_normalize = module.l2_normalize
handler = ctypes.CDLL(sys.argv[1]).l2_normalize_fwd
name = _kernel.target_name("l2_normalize_fwd")
jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu", api_version=1)
_kernel.HANDLERS["cpu"] |= {"l2_normalize_fwd"}
namespace = vars(ops) | {"jaxops": jaxops}
comparison = eval("(" + open(sys.argv[3]).read() + ")", namespace)[0]

import contract
rng = np.random.default_rng(0)
for dtype in contract.DTYPES:
    for shape in contract.SHAPES:
        contract.check_value_and_gradients(comparison, rng, shape, dtype)
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


def test_lists():
    """The page's additions to lists have the form of the existing entries."""
    assert " X(softmax_fwd) " in (ROOT / "ffi/targets.h").read_text()
    assert FILES["ffi/targets.h"].split() == ["X(l2_normalize_fwd)", "\\"]
    cmake = (ROOT / "CMakeLists.txt").read_text().splitlines()
    for line in FILES["CMakeLists.txt"].splitlines():
        assert line.replace("l2_normalize", "softmax") in cmake
    shown = set(FILES) - {"ffi/targets.h", "CMakeLists.txt", "tests/support/ops.py"}
    assert all((ROOT / name.replace("l2_normalize", "softmax")).parent.is_dir() for name in shown)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_op(tmp_path):
    jaxlib = pytest.importorskip("jaxlib")
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    library = tmp_path / f"l2_normalize{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    headers = pathlib.Path(jaxlib.__file__).parent / "include"
    source = tmp_path / "ffi/ops/l2_normalize/l2_normalize_cpu.cc"
    options = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fopenmp-simd", "-fPIC", "-shared"]
    includes = [f"-I{tmp_path / 'ffi'}", f"-I{ROOT / 'ffi'}", "-isystem", str(headers)]
    subprocess.run(["g++", *options, *includes, str(source), "-o", str(library)], check=True)
    files = [tmp_path / name for name in ("jaxops/ops/l2_normalize.py", "tests/support/ops.py")]
    subprocess.run([sys.executable, "-c", RUN, str(library), *map(str, files)], cwd=ROOT / "tests", check=True)

"""The kernels as profilers that listen to NVTX see them: XLA opens a range for every call, named by its operation."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, jaxops

def head(x, scale, bias):
    with jax.named_scope("head"):
        return jnp.sum(jaxops.log_softmax(jaxops.layer_norm(x, scale, bias))[:, 0])

x = jnp.ones((8, 64), jnp.bfloat16)
jax.block_until_ready(jax.jit(jax.grad(head))(x, jnp.ones(64), jnp.ones(64)))
"""


@pytest.mark.gpu
def test_ranges_are_named_by_kernel_and_scope(tmp_path):
    nvcc, compiler = shutil.which("nvcc"), shutil.which("c++")
    if not nvcc or not compiler:
        pytest.skip("NVTX's headers come with the CUDA toolkit, and need a compiler")
    include = pathlib.Path(nvcc).resolve().parents[1] / "include"
    tool = tmp_path / "nvtx_ranges.so"
    source = pathlib.Path(__file__).with_name("nvtx_ranges.cc")
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(tool)], check=True
    )
    environment = os.environ | {"NVTX_INJECTION64_PATH": str(tool), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # The kernels of a CUDA graph are launched together, without their own ranges.
    environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    ranges = [line for line in ran.stdout.splitlines() if line.startswith("NVTX TSL: Thunk:")]
    for kernel in ("layer_norm_fwd", "log_softmax_fwd", "log_softmax_bwd", "layer_norm_bwd"):
        assert any(kernel in line and "head" in line for line in ranges), f"{kernel}: no range among {ranges}"

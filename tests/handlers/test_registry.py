"""Primitives, CPU handlers and CUDA handlers are one set, under one name each."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops import COMPARISONS

import jaxops
from jaxops import _cpu, _kernel, _warnings
from jaxops.ops._cross_entropy import forward_backward

#: The kernels without a handler on the CPU, where XLA's own operations or other kernels run.
LEFT_TO_XLA_ON_CPU = {
    "matmul",
    "epilogue_bwd",
    "gated_matmul",
    "gated_matmul_bwd",
    "attention_fwd",
    "attention_bwd",
    "linear_cross_entropy_fwd",
}


@pytest.fixture
def cuda():
    """The GPU half, which imports without a driver."""
    return importlib.import_module("jaxops._cuda")


def test_cpu_targets_are_the_primitives():
    assert set(_cpu.targets()) | LEFT_TO_XLA_ON_CPU == set(_kernel.KERNELS)
    assert not set(_cpu.targets()) & LEFT_TO_XLA_ON_CPU
    assert _kernel.HANDLERS["cpu"] == set(_cpu.targets())


@pytest.mark.cuda
def test_cuda_targets_are_the_primitives(cuda):
    assert set(cuda.targets()) == set(_kernel.KERNELS)
    assert _kernel.HANDLERS["cuda"] == set(cuda.targets())


@pytest.mark.cuda
def test_both_halves_list_their_handlers_in_one_order(cuda):
    shared = [name for name in cuda.targets() if name not in LEFT_TO_XLA_ON_CPU]
    assert shared == list(_cpu.targets())


@pytest.mark.cuda
def test_halves_are_built_alike(cuda):
    assert cuda.jaxlib_headers == _cpu.jaxlib_headers
    assert cuda.cuda_architectures and not _cpu.cuda_architectures


@pytest.mark.parametrize("name", sorted(_kernel.KERNELS))
def test_names(name):
    kernel = _kernel.KERNELS[name]
    assert kernel.name == name and kernel.primitive.name == f"jaxops_{name}"
    assert _kernel.target_name(name) == f"jaxops.{name}.v{_kernel.CALLING_CONVENTION}"
    assert kernel.plain_on == ({"cpu"} if name in LEFT_TO_XLA_ON_CPU else set())


def calls(x):
    """Every kernel once: all ops with their gradients."""

    def total(x):
        found = 0
        for case in COMPARISONS.values():
            _, *others = case.operands(np.random.default_rng(0), x.shape, x.dtype)
            found += jnp.sum(case.ours(x, *(jnp.ones(other.shape, other.dtype) for other in others)))
        q = x[:, None, :8].astype(jnp.bfloat16)
        found += jnp.sum(jaxops.dot_product_attention(q, q, q).astype(x.dtype))
        wide = x.astype(jnp.bfloat16)
        w = jnp.tile(wide.T, (1, 8))
        found += jnp.sum(jaxops.gated_mlp(wide, w, w, w.T).astype(x.dtype))
        labels = np.zeros(len(x), int)
        found += jnp.sum(jaxops.linear_cross_entropy(wide, w, labels))
        return found + jnp.sum(jaxops.softmax_cross_entropy_with_integer_labels(x, labels))

    ones = jnp.ones((len(x), 1))
    both = forward_backward(
        x, None, None, ones, None, None, axes=(1,), dtype=x.dtype, cap=0.0, z_loss=0.0, in_place=False
    )
    with jax.default_matmul_precision("highest"):
        return jax.value_and_grad(total)(x), both


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_lowering_calls_every_handler(platform):
    """Lowering for a platform does not need its device. The product is one for which XLA's own dot is not chosen."""
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    text = jax.jit(calls).trace(x).lower(lowering_platforms=(platform,)).as_text()
    for name in _kernel.KERNELS:
        there = name in _kernel.HANDLERS[platform]
        assert (f"@{_kernel.target_name(name)}(" in text) == there, name


def test_other_platforms_lower_to_plain_jax(monkeypatch):
    monkeypatch.setattr(_warnings, "_said", set())
    with pytest.warns(jaxops.FallbackWarning, match=" on tpu"):
        text = jax.jit(calls).trace(jnp.ones((3, 9))).lower(lowering_platforms=("tpu",)).as_text()
    assert "jaxops." not in text and "stablehlo.exponential" in text


@pytest.mark.cuda
def test_cuda_half_links_no_driver(cuda):
    """It imports without a driver: libcuda is not among its libraries, and the runtime is linked statically."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    script = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_cuda", {cuda.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.targets()
print(open("/proc/self/maps").read())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "_cuda" in result.stdout
    assert "libcuda" not in result.stdout  # neither libcuda.so (the driver) nor libcudart.so (the runtime)


def test_compiled_halves_are_part_of_the_package():
    assert importlib.util.find_spec("jaxops._cpu").origin.endswith(".so")

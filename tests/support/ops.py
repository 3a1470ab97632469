"""The ops beside what a user would write without jaxops: one list for the tests, the benchmarks and the demo."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxops


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An op, the reference it competes with, and operands for both.

    ours, reference: functions of the operands. operands: from a numpy generator, the shape of the first operand and a
    dtype. oracle: taken in float64 as the exact function; default: reference.
    """

    name: str
    ours: Callable[..., jax.Array]
    reference: Callable[..., jax.Array]
    operands: Callable[[np.random.Generator, tuple[int, ...], np.dtype], tuple[np.ndarray, ...]]
    oracle: Callable[..., jax.Array] | None = None


def _normal(rng, shape, dtype, scale=1.0, offset=0.0):
    return (offset + scale * rng.standard_normal(shape)).astype(dtype)


def _logits(rng, shape, dtype):
    return (_normal(rng, shape, dtype, 3.0),)


def parameter_dtype(dtype) -> np.dtype:
    """The dtype of the scale and bias that go with x: at least f32."""
    return np.dtype("float64") if np.dtype(dtype) == np.float64 else np.dtype("float32")


def _norm_operands(parameters):
    def operands(rng, shape, dtype):
        wide = parameter_dtype(dtype)
        vectors = [_normal(rng, shape[-1:], wide, 0.2, 1.0), _normal(rng, shape[-1:], wide, 0.2)]
        return (_normal(rng, shape, dtype, 1.5, 0.5), *vectors[:parameters])

    return operands


def _flax_layer_norm(x, scale, bias, use_fast_variance=True):
    import flax.linen as nn

    module = nn.LayerNorm(dtype=x.dtype, use_fast_variance=use_fast_variance)
    return module.apply({"params": {"scale": scale, "bias": bias}}, x)


def _flax_rms_norm(x, scale):
    import flax.linen as nn

    return nn.RMSNorm(dtype=x.dtype).apply({"params": {"scale": scale}}, x)


def _matrices(rng, shape, dtype):
    m, k = shape[-2:]
    return _normal(rng, shape, dtype), _normal(rng, (k, m), dtype)


def _dense_operands(rng, shape, dtype):
    a, b = _matrices(rng, shape, dtype)
    return a, b, _normal(rng, b.shape[-1:], parameter_dtype(dtype))


#: The ops that work on rows.
ROW_OPS = ("softmax", "log_softmax", "layer_norm", "rms_norm")

COMPARISONS = {
    comparison.name: comparison
    for comparison in (
        Comparison("softmax", jaxops.softmax, jax.nn.softmax, _logits),
        Comparison("log_softmax", jaxops.log_softmax, jax.nn.log_softmax, _logits),
        Comparison(
            "layer_norm",
            lambda x, scale, bias: jaxops.layer_norm(x, scale, bias, dtype=x.dtype),
            _flax_layer_norm,
            _norm_operands(2),
            functools.partial(_flax_layer_norm, use_fast_variance=False),
        ),
        Comparison(
            "rms_norm",
            lambda x, scale: jaxops.rms_norm(x, scale, dtype=x.dtype),
            _flax_rms_norm,
            _norm_operands(1),
        ),
        Comparison("matmul", jaxops.matmul, jnp.matmul, _matrices),
        Comparison(
            "dense_gelu",
            lambda a, b, bias: jaxops.matmul(a, b, bias=bias, activation="gelu"),
            lambda a, b, bias: jax.nn.gelu(a @ b + bias.astype(a.dtype)),
            _dense_operands,
        ),
    )
}


def value_and_gradients(function, operands, cotangent):
    """function(*operands) and the gradients of its inner product with `cotangent` with respect to every operand."""
    value, pullback = jax.vjp(function, *operands)
    return value, *pullback(cotangent.astype(value.dtype))


@functools.cache
def _oracle(comparison: Comparison):
    """Compiled once for each shape, whatever the dtypes that are compared with it."""
    function = comparison.oracle or comparison.reference
    return jax.jit(lambda *xs: value_and_gradients(function, xs[:-1], xs[-1]))


def exact(comparison: Comparison, operands, cotangent) -> list[np.ndarray]:
    """The reference's value and gradients in float64, computed on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = [np.asarray(x).astype(np.float64) for x in (*operands, cotangent)]
        return [np.asarray(x) for x in _oracle(comparison)(*wide)]


def ulps(got, wanted: np.ndarray) -> float:
    """The largest error of `got`, in units in the last place (of its dtype) of the largest wanted value."""
    got = np.asarray(got)
    if not got.size:
        return 0.0
    spacing = float(jnp.finfo(got.dtype).eps) * max(float(np.max(np.abs(wanted))), float(jnp.finfo(got.dtype).tiny))
    return float(np.max(np.abs(got.astype(np.float64) - wanted))) / spacing

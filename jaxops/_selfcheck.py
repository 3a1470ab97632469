"""Compares every op on the default device with its definition in float64: this checks an installation, and is not a
test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jaxops

#: Larger errors mean a broken kernel, not rounding: correct kernels' errors are below 8 ulp.
LIMIT = 32.0


def _layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * scale + bias


def _rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


_Function = Callable[..., jax.Array]


def _attention(qkv):
    """Self-attention with causality: m tokens, n // 64 heads; the operand is queries, keys and values at once."""
    q, k, v = qkv
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    visible = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(visible, logits, -jnp.inf)), v)


def _labels(x):
    return jnp.arange(x.shape[0]) * 7 % x.shape[1]


def _loss(x):
    return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, _labels(x)[:, None], 1)[:, 0]


#: By name: the op, its definition, and its operands' shapes, from m and n.
OPS: dict[str, tuple[_Function, _Function, Callable[[int, int], list[tuple[int, ...]]]]] = {
    "softmax": (jaxops.softmax, jax.nn.softmax, lambda m, n: [(m, n)]),
    "log_softmax": (jaxops.log_softmax, jax.nn.log_softmax, lambda m, n: [(m, n)]),
    "layer_norm": (jaxops.layer_norm, _layer_norm, lambda m, n: [(m, n), (n,), (n,)]),
    "rms_norm": (jaxops.rms_norm, _rms_norm, lambda m, n: [(m, n), (n,)]),
    "attention": (
        lambda qkv: jaxops.dot_product_attention(*qkv, is_causal=True),
        _attention,
        lambda m, n: [(3, 1, m, n // 64, 64)],
    ),
    "cross_entropy": (
        lambda x: jaxops.softmax_cross_entropy_with_integer_labels(x, _labels(x)),
        _loss,
        lambda m, n: [(m, n)],
    ),
    "linear_cross_entropy": (
        # Logits are rounded to x's dtype, so that the f32 losses are no more exact.
        lambda x, w: jaxops.linear_cross_entropy(x, w, _labels(x @ w)).astype(x.dtype),
        lambda x, w: _loss(x @ w),
        lambda m, n: [(m, n), (n, m)],
    ),
    "logsumexp": (lambda x: jaxops.logsumexp(x, -1), lambda x: jax.nn.logsumexp(x, -1), lambda m, n: [(m, n)]),
    "matmul": (jaxops.matmul, jnp.matmul, lambda m, n: [(m, n), (n, m)]),
    "matmul with bias and gelu": (
        lambda a, b, bias: jaxops.matmul(a, b, bias=bias, activation="gelu"),
        lambda a, b, bias: jax.nn.gelu(a @ b + bias),
        lambda m, n: [(m, n), (n, m), (m,)],
    ),
    "gated_mlp": (
        jaxops.gated_mlp,
        lambda x, gate, up, down: (jax.nn.silu(x @ gate) * (x @ up)) @ down,
        lambda m, n: [(m, n), (n, m), (n, m), (m, n)],
    ),
}


@dataclasses.dataclass(frozen=True)
class Check:
    """The largest errors in a value and in its gradients, in units in the last place at the largest exact element."""

    op: str
    dtype: str
    value_error_ulp: float
    gradient_error_ulp: float

    @property
    def passed(self) -> bool:
        """Whether both errors are small. NaN is not."""
        return self.value_error_ulp <= LIMIT and self.gradient_error_ulp <= LIMIT


def _error(got: jax.Array, exact: np.ndarray) -> float:
    eps = float(jnp.finfo(got.dtype).eps)
    return float(np.max(np.abs(np.asarray(got).astype(np.float64) - exact)) / (eps * np.max(np.abs(exact))))


def run(quick: bool = False, seed: int = 0) -> Iterator[Check]:
    """Checks each op in float32 and bfloat16.

    Args:
      quick: one shape instead of three.
      seed: the random operands' seed.
    """
    rng = np.random.default_rng(seed)
    cpu = jax.local_devices(backend="cpu")[0]
    for op, (function, definition, shapes) in OPS.items():
        for dtype in ("float32", "bfloat16"):
            errors = []
            for m, n in ((64, 256),) if quick else ((64, 256), (33, 1001), (256, 4096)):
                first, *rest = shapes(m, n)
                weights = (rng.standard_normal(s) * (s[0] ** -0.5 if len(s) > 1 else 1) for s in rest)
                operands = [x.astype(dtype) for x in (rng.standard_normal(first), *weights)]
                with jax.enable_x64(True), jax.default_device(cpu):
                    wide = [x.astype(np.float64) for x in operands]
                    exact, pullback = jax.vjp(definition, *wide)
                    cotangent = rng.standard_normal(exact.shape).astype(dtype)
                    wanted = [np.asarray(x) for x in (exact, *pullback(jnp.asarray(cotangent, exact.dtype)))]

                def both(cotangent, *operands, function=function):
                    value, pullback = jax.vjp(function, *operands)
                    return value, *pullback(cotangent.astype(value.dtype))

                with jax.default_matmul_precision("highest"):  # float32, where the default on a GPU is TF32
                    got = jax.jit(both)(cotangent, *operands)
                errors.append([_error(g, w) for g, w in zip(got, wanted, strict=True)])
            yield Check(op, dtype, max(e[0] for e in errors), max(max(e[1:]) for e in errors))

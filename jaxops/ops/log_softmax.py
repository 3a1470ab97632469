"""log_softmax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._rows import RowKernel, accumulator
from jaxops.ops import _logits


def _plain_forward(x, *, axes, dtype):
    return (jax.nn.log_softmax(x.astype(accumulator(x.dtype)), axis=axes).astype(dtype),)


def _plain_backward(x, dy, *, axes, dtype):
    wide = accumulator(x.dtype)
    x, dy = x.astype(wide), dy.astype(wide)
    return ((dy - jax.nn.softmax(x, axis=axes) * jnp.sum(dy, axis=axes, keepdims=True)).astype(dtype),)


_forward = RowKernel("log_softmax_fwd", "x: full -> y: full", _plain_forward)
_backward = RowKernel("log_softmax_bwd", "x: full, dy: full -> dx: full", _plain_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _log_softmax(x, axes, dtype):
    return _forward(x, axes=axes, dtype=dtype)[0]


def _log_softmax_fwd(x, axes, dtype):
    return _log_softmax(x, axes, dtype), x


def _log_softmax_bwd(axes, dtype, x, dy):
    return (_backward(x, dy, axes=axes, dtype=x.dtype)[0],)


_log_softmax.defvjp(_log_softmax_fwd, _log_softmax_bwd)


def log_softmax(
    x: jax.typing.ArrayLike,
    axis: int | tuple[int, ...] | None = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    causal: bool = False,
    dtype: Any = None,
) -> jax.Array:
    r"""Logarithm of the softmax of `x * scale + bias`: :math:`z_i - \log \sum_j e^{z_j}`.

    Computed in f32 (f64 if `x` or the result is f64); bfloat16 logits with `dtype=jnp.float32` give f32
    log-probabilities in one pass. Without the keyword arguments it is a drop-in for :func:`jax.nn.log_softmax`. The
    backward pass computes the probabilities from `x` again instead of taking `exp` of a rounded result.

    Args:
      x: logits of any shape; float64, float32, float16 or bfloat16. Integers promote as in jax.numpy. Complex arrays
        run on XLA's operations, with a warning, and take no keyword argument.
      axis: the axis or axes over which the probabilities sum to one; None: all.
      where: boolean mask that broadcasts with `x` (both ways). Where it is False the result is -inf, the gradient 0.
      scale: scalar that multiplies `x`; 1 by default.
      bias: array that broadcasts with `x` and is added after the scaling; differentiable.
      causal: mask entry (i, j) of the last two axes unless j <= i: query i sees keys 0 to i.
      dtype: dtype of the result; that of `x` by default.

    Returns:
      An array of the joint shape of `x`, `bias` and `where`. A row that contains NaN or +inf, or nothing but -inf, is
      NaN throughout.

    Raises:
      TypeError: `x` is a list or boolean, or `dtype` is not floating.
      ValueError: `axis` is out of bounds or repeated, `where` is not boolean, or shapes do not broadcast.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.log_softmax(jnp.array([0.0, 0.0], jnp.bfloat16), dtype=jnp.float32)
      Array([-0.6931472, -0.6931472], dtype=float32)
    """
    return _logits.apply(
        "log_softmax", _log_softmax, jax.nn.log_softmax, -np.inf, x, axis, where, scale, bias, causal, dtype
    )

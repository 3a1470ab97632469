"""softmax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._rows import RowKernel, accumulator
from jaxops.ops import _logits


def _plain_forward(x, *, axes, dtype):
    return (jax.nn.softmax(x.astype(accumulator(x.dtype)), axis=axes).astype(dtype),)


def _plain_backward(y, dy, *, axes, dtype):
    wide = accumulator(y.dtype)
    y, dy = y.astype(wide), dy.astype(wide)
    return ((y * (dy - jnp.sum(y * dy, axis=axes, keepdims=True))).astype(dtype),)


_forward = RowKernel("softmax_fwd", "x: full -> y: full", _plain_forward)
_backward = RowKernel("softmax_bwd", "y: full, dy: full -> dx: full", _plain_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _differentiable(x, axes, dtype, x_dtype):
    del x_dtype  # only the backward pass needs it
    return _forward(x, axes=axes, dtype=dtype)[0]


def _differentiable_fwd(x, axes, dtype, x_dtype):
    y = _differentiable(x, axes, dtype, x_dtype)
    return y, y


def _differentiable_bwd(axes, dtype, x_dtype, y, dy):
    return (_backward(y, dy, axes=axes, dtype=x_dtype)[0],)


_differentiable.defvjp(_differentiable_fwd, _differentiable_bwd)


def _softmax(x, axes, dtype):
    return _differentiable(x, axes, dtype, x.dtype)


def softmax(
    x: jax.typing.ArrayLike,
    axis: int | tuple[int, ...] | None = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    causal: bool = False,
    dtype: Any = None,
) -> jax.Array:
    r"""Softmax of `x * scale + bias` over one or several axes: :math:`e^{z_i} / \sum_j e^{z_j}`.

    Computed in f32 (f64 if `x` or the result is f64) whatever the dtype of `x`, with the largest logit subtracted
    first. Without the keyword arguments it is a drop-in for :func:`jax.nn.softmax`.

    Args:
      x: logits of any shape; float64, float32, float16 or bfloat16. Integers promote as in jax.numpy. Complex arrays
        run on XLA's operations, with a warning, and take no keyword argument.
      axis: the axis or axes over which the result sums to one; None: all.
      where: boolean mask that broadcasts with `x` (both ways). Where it is False the entry does not take part: its
        result and its gradient are 0, also in a row in which nothing takes part.
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
      >>> jaxops.softmax(jnp.array([[0.0, 0.0], [0.0, 100.0]]), causal=True)
      Array([[1., 0.],
             [0., 1.]], dtype=float32)
    """
    return _logits.apply("softmax", _softmax, jax.nn.softmax, 0.0, x, axis, where, scale, bias, causal, dtype)

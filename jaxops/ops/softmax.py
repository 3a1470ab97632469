"""softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import softmax as _jax_softmax

from jaxops._rows import accumulator
from jaxops.ops import _logits


def _plain_forward(rows, x, scale, bias, where, *, dtype, **causal):
    z, mask = _logits.plain_logits(rows, x, scale, bias, where, **causal)
    exponentials = _logits.plain_exponentials(z, jax.lax.stop_gradient(rows.max(z)), mask)
    return (_logits.visible(mask, exponentials / rows.sum(exponentials)[0]).astype(dtype),)


def _plain_backward(rows, y, scale, bias, where, dy, *, dtype, masked, **causal):
    del bias, where, causal  # y tells which entries are masked
    y, dy = (value.astype(accumulator(value.dtype)) for value in (y, dy))
    mask = y != 0 if masked else None
    dy = _logits.visible(mask, dy)
    dz = _logits.visible(mask, y * (dy - rows.sum(y * dy)[0]))
    return _logits.plain_gradient(dz, scale, dtype)


def _tangent(kernels, rows, y, x, scale, bias, where, dx, dscale, dbias, **params):
    """The backward kernel: dy = y (dz - <y, dz>) is symmetric."""
    del bias, where
    if dscale is dbias is None:
        return kernels.backward(y, scale, None, None, dx.astype(y.dtype), axes=rows.axes, **params)[:1]
    # In plain JAX, which does not round dz to y's dtype: in float16, x dscale may be infinite.
    x = None if x is None else jnp.where(y == 0, 0, x)
    dz = _logits.logits_tangent(x, y.shape, scale, dx, dscale, dbias)
    return _plain_backward(rows, y, None, None, None, dz, **params)


_KERNELS = _logits.Kernels("softmax", _plain_forward, _plain_backward, _tangent)


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

    Computed in f32 (f64 if `x` or the result is f64), with the largest logit subtracted first. Without keyword
    arguments it is a drop-in for :func:`jax.nn.softmax`.

    Args:
      x: logits of any shape; float64, float32, float16 or bfloat16. Integers promote as in jax.numpy. Complex arrays
        run on XLA's operations, with a warning; for them scale, bias, causal and dtype are errors.
      axis: the axis or axes over which the result sums to one; they index the result's shape. None: all axes.
      where: boolean mask that broadcasts with `x`, and may be larger. Where it is False, the entry is masked: its
        result and gradient are 0, even if the whole row is masked.
      scale: scalar that multiplies `x`; default 1. Differentiable.
      bias: array that broadcasts with `x`, and may be larger; added after scaling. Differentiable.
      causal: if True, query i sees only keys 0 to i: entry (i, j) along the last two axes is masked unless j <= i.
      dtype: the result's dtype; default: x's dtype.

    Returns:
      An array with the joint shape of `x`, `bias` and `where`. If a row's unmasked entries include NaN or +inf, or are
      all -inf, they become NaN. Masked entries never affect other entries.

    Raises:
      TypeError: `x` is a list or boolean, or `dtype` is not floating.
      ValueError: `axis` is out of bounds or repeated, `where` is not boolean, or shapes do not broadcast.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.softmax(jnp.array([[0.0, 0.0], [0.0, 100.0]]), causal=True)
      Array([[1., 0.],
             [0., 1.]], dtype=float32)
    """
    return _logits.apply("softmax", _KERNELS, _jax_softmax, x, axis, where, scale, bias, causal, dtype)

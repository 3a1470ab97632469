"""log_softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import log_softmax as _jax_log_softmax

from jaxops.ops import _logits


def _plain_forward(rows, x, scale, bias, where, *, dtype, **causal):
    z, mask = _logits.plain_logits(rows, x, scale, bias, where, **causal)
    max = jax.lax.stop_gradient(rows.max(z))
    (total,) = rows.sum(_logits.plain_exponentials(z, max, mask))
    y = (z - max) - jnp.log(total)
    return (y if mask is None else jnp.where(mask, y, -jnp.inf)).astype(dtype), max, total


def _plain_backward(rows, x, scale, bias, where, max, total, dy, *, dtype, masked, **causal):
    del masked
    z, mask = _logits.plain_logits(rows, x, scale, bias, where, **causal)
    dy = _logits.visible(mask, dy.astype(z.dtype))
    exponentials = _logits.plain_exponentials(z, max, mask)
    dz = _logits.visible(mask, dy - exponentials * (rows.sum(dy)[0] / total))
    return _logits.plain_gradient(dz, scale, dtype)


def _moving_exponentials(rows, x, scale, bias, where, max, dx, dscale, dbias, **causal):
    """exp(z - max), with max(z) for None, dz and the mask."""
    z, mask = _logits.plain_logits(rows, x, scale, bias, where, **causal)
    max = jax.lax.stop_gradient(rows.max(z)) if max is None else max
    # An infinite x hides its entry, whatever the scale.
    dz = _logits.logits_tangent(jnp.where(jnp.isfinite(x), x, 0), x.shape, scale, dx, dscale, dbias)
    return _logits.plain_exponentials(z, max, mask), _logits.visible(mask, dz), mask


def _tangent(kernels, rows, x, _, scale, bias, where, max, total, dx, dscale, dbias, *, dtype, masked, **causal):
    """dy = dz - <p, dz>, with the probabilities p = exp(z - max) / sum(exp(z - max))."""
    del kernels, masked, total  # which belongs to another rounding of z
    if scale is not None and bias is not None:
        max = None  # as does max, if the kernel did not round x scale
    exponentials, dz, mask = _moving_exponentials(rows, x, scale, bias, where, max, dx, dscale, dbias, **causal)
    moved, total = rows.sum(exponentials * dz, exponentials)
    return (_logits.visible(mask, dz - moved / total).astype(dtype),)


def _total_tangent(*operands, **causal):
    exponentials, dz, _ = _moving_exponentials(*operands, **causal)
    return operands[0].sum(exponentials * dz)[0]


_KERNELS = _logits.Kernels("log_softmax", _plain_forward, _plain_backward, _tangent, _total_tangent)


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

    Computed in f32 (f64 if `x` or the result is f64). bfloat16 logits with `dtype=jnp.float32` give f32
    log-probabilities in one pass. Without keyword arguments it is a drop-in for :func:`jax.nn.log_softmax`.

    The forward pass saves each row's maximum and sum of exponentials. From them and `x` the backward pass recomputes
    the probabilities, which is more accurate than using the rounded result.

    Args:
      x: logits of any shape; float64, float32, float16 or bfloat16. Integers promote as in jax.numpy. Complex arrays
        run on XLA's operations, with a warning; for them scale, bias, causal and dtype are errors.
      axis: the axis or axes over which the probabilities sum to one; they index the result's shape. None: all axes.
      where: boolean mask that broadcasts with `x`, and may be larger. Where it is False, the entry is masked: its
        result is -inf and its gradient 0.
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
      >>> jaxops.log_softmax(jnp.array([0.0, 0.0], jnp.bfloat16), dtype=jnp.float32)
      Array([-0.6931472, -0.6931472], dtype=float32)
    """
    return _logits.apply("log_softmax", _KERNELS, _jax_log_softmax, x, axis, where, scale, bias, causal, dtype)

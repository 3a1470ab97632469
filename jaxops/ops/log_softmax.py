"""log_softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._rows import accumulator
from jaxops.ops import _logits


def _plain_forward(rows, x, scale, bias, where, *, dtype, **causal):
    z, mask = _logits.plain_logits(rows, x, scale, bias, where, **causal)
    exponentials, shifted = _logits.plain_exponentials(rows, z, mask)
    y = shifted - jnp.log(rows.sum(exponentials)[0])
    return ((y if mask is None else jnp.where(mask, y, -jnp.inf)).astype(dtype),)


def _plain_backward(rows, x, scale, bias, where, dy, *, dtype, masked, **causal):
    del masked
    z, mask = _logits.plain_logits(rows, x, scale, bias, where, **causal)
    exponentials, _ = _logits.plain_exponentials(rows, z, mask)
    dy = _logits.visible(mask, dy.astype(z.dtype))
    total, total_dy = rows.sum(exponentials, dy)
    dz = _logits.visible(mask, dy - exponentials * (total_dy / total))
    return _logits.plain_gradients(rows, dz, scale, dtype)


def _tangent(kernels, rows, x, _, scale, bias, where, dx, dscale, dbias, *, dtype, masked, **causal):
    """dy = dz - <p, dz>, with the probabilities p of the forward kernel."""
    del masked
    (y,) = kernels.forward(x, scale, bias, where, axes=rows.axes, dtype=accumulator(x.dtype), **causal)
    p = jnp.exp(y)
    mask = _logits.plain_mask(rows, x.shape, where, **causal)
    # Where p underflows the logit still moves with its scale; where it is -inf, x may be anything.
    dz = _logits.logits_tangent(jnp.where(jnp.isneginf(y), 0, x), x.shape, scale, dx, dscale, dbias)
    dz = _logits.visible(mask, dz)
    return (_logits.visible(mask, dz - rows.sum(p * dz)[0]).astype(dtype),)


_KERNELS = _logits.Kernels("log_softmax", _plain_forward, _plain_backward, _tangent, from_result=False)


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
    return _logits.apply("log_softmax", _KERNELS, jax.nn.log_softmax, x, axis, where, scale, bias, causal, dtype)

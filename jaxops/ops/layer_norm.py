"""layer_norm."""

from __future__ import annotations

from typing import Any

import jax

from jaxops.ops import _norm


def layer_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    epsilon: float = 1e-6,
    where: jax.typing.ArrayLike | None = None,
    residual: jax.typing.ArrayLike | None = None,
    dtype: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Layer normalisation: :math:`(x - \mu) / \sqrt{\sigma^2 + \epsilon} \cdot \mathrm{scale} + \mathrm{bias}`.

    After Ba, Kiros and Hinton, "Layer Normalization" (2016). Mean and (biased) variance are taken over `axis`, in f32
    (f64 if an operand or the result is f64). The variance is computed from deviations, so it stays accurate even if the
    mean is much larger than the spread. The result equals Flax's `LayerNorm` with `use_fast_variance=False`.

    Args:
      x: array of any shape; float64, float32, float16 or bfloat16. Integers promote as in jax.numpy.
      scale: multiplies the normalised values. It has the normalised axes' shape, in the order of x's axes.
      bias: added last; same shape as `scale`.
      axis: the axis or axes to normalise over; None: all axes.
      epsilon: added to the variance, in x's units squared; a Python number, at least 0.
      where: boolean mask that broadcasts to x's shape (Flax's `mask`). Only positions where it is True count in the
        statistics, but all positions are normalised. If no position in a row counts, the row is NaN.
      residual: array with x's shape, added to `x` first.
      dtype: the result's dtype. By default `x`, `residual`, `scale` and `bias` promote, as in Flax: bfloat16 `x` with
        float32 parameters gives a float32 result.

    Returns:
      The normalised array, with x's shape. With `residual`, the pair (normalised array, `x + residual`).

    Raises:
      TypeError: an operand is a list, boolean or complex, `dtype` is not floating, or `epsilon` is traced.
      ValueError: a shape does not fit, `axis` is out of bounds or repeated, or `epsilon` is negative.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.layer_norm(jnp.array([[1.0, 3.0], [10.0, 10.0]]), jnp.array([2.0, 2.0]), epsilon=0.0).round(3)[0]
      Array([-2.,  2.], dtype=float32)
    """
    return _norm.apply("layer_norm", x, scale, bias, axis, epsilon, where, residual, dtype)

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
    (f64 if an operand or the result is f64); the variance from the deviations, so that it stays exact where the mean
    is much larger than the spread. Results equal those of Flax's `LayerNorm` with `use_fast_variance=False`.

    Args:
      x: array of any shape; float64, float32, float16 or bfloat16. Integers promote as in jax.numpy.
      scale: multiplies the normalised values; has the shape of the normalised axes, in the order of x's axes.
      bias: added last; shape as `scale`.
      axis: the axis or axes to normalise over; None: all.
      epsilon: added to the variance, in the square of x's units; a Python number, at least 0.
      where: boolean mask that broadcasts to x's shape: which positions count in the statistics (Flax's `mask`). All
        positions are normalised; a row without a counting position is NaN.
      residual: array of x's shape that is added to `x` before everything else.
      dtype: dtype of the result; by default the one to which `x`, `scale` and `bias` promote, as in Flax: bfloat16 `x`
        with float32 parameters gives a float32 result.

    Returns:
      The normalised array, of x's shape; with `residual` the pair of it and `x + residual`.

    Raises:
      TypeError: an operand is a list, boolean or complex, `dtype` is not floating, or `epsilon` is traced.
      ValueError: a shape does not fit, `axis` is out of bounds or repeated, or `epsilon` is negative.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.layer_norm(jnp.array([[1.0, 3.0], [10.0, 10.0]]), jnp.array([2.0, 2.0]), epsilon=0.0).round(3)[0]
      Array([-2.,  2.], dtype=float32)
    """
    return _norm.apply("layer_norm", x, scale, bias, axis, epsilon, where, residual, dtype)

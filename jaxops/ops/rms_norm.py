"""rms_norm."""

from __future__ import annotations

from typing import Any

import jax

from jaxops.ops import _norm


def rms_norm(
    x: jax.typing.ArrayLike,
    scale: jax.typing.ArrayLike | None = None,
    *,
    axis: int | tuple[int, ...] | None = -1,
    epsilon: float = 1e-6,
    residual: jax.typing.ArrayLike | None = None,
    dtype: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Root mean square normalisation: :math:`x / \sqrt{\mathrm{mean}(x^2) + \epsilon} \cdot \mathrm{scale}`.

    After Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). The mean square is taken over `axis`, in
    f32 (f64 if an operand or the result is f64). The result equals Flax's `RMSNorm`.

    Args:
      x: array of any shape; float64, float32, float16 or bfloat16. Integers promote as in jax.numpy.
      scale: multiplies the normalised values. It has the normalised axes' shape, in the order of x's axes.
      axis: the axis or axes to normalise over; None: all axes.
      epsilon: added to the mean square, in x's units squared; a Python number, at least 0.
      residual: array with x's shape, added to `x` first.
      dtype: the result's dtype. By default `x`, `residual` and `scale` promote, as in Flax.

    Returns:
      The normalised array, with x's shape. With `residual`, the pair (normalised array, `x + residual`).

    Raises:
      TypeError: an operand is a list, boolean or complex, `dtype` is not floating, or `epsilon` is traced.
      ValueError: a shape does not fit, `axis` is out of bounds or repeated, or `epsilon` is negative.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.rms_norm(jnp.array([3.0, 4.0]), epsilon=0.0)
      Array([0.84852815, 1.1313709 ], dtype=float32)
    """
    return _norm.apply("rms_norm", x, scale, None, axis, epsilon, None, residual, dtype)

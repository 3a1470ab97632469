"""logsumexp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.nn import logsumexp as jax_logsumexp

from jaxops import _arguments as arguments
from jaxops._rows import accumulator, expand_rank
from jaxops._warnings import warn_fallback
from jaxops.ops import _cross_entropy as kernels


def logsumexp(
    a: jax.typing.ArrayLike,
    axis: int | tuple[int, ...] | None = None,
    b: jax.typing.ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: jax.typing.ArrayLike | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Logarithm of the sum of exponentials, :math:`\log \sum_j e^{a_j}`: a drop-in for :func:`jax.nn.logsumexp`.

    Sums are f32 (f64 for f64). The forward pass reads `a` once; the backward pass reads it once and writes its gradient
    once.

    Args:
      a: array of any shape; float64, float32, float16 or bfloat16. Integers promote as in jax.numpy.
      axis: the axis or axes over which to sum; None: all.
      b: factors for the exponentials, which broadcast with `a`. Calls with `b` or with complex `a` run on XLA's
        operations, with a warning.
      keepdims: keep the axes, with size 1.
      return_sign: return a pair: the logarithm of the sum's absolute value, and its sign.
      where: boolean mask that broadcasts with `a`: the entries to sum over.

    Returns:
      The logarithms, in the dtype of `a`; -inf if nothing is summed.

    Raises:
      TypeError: `a` is a list or boolean.
      ValueError: `axis` is out of bounds or repeated, `where` is not boolean, or shapes do not broadcast.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.logsumexp(jnp.array([[0.0, 0.0], [1.0, -jnp.inf]]), axis=-1)
      Array([0.6931472, 1.       ], dtype=float32)
    """
    op = "logsumexp"
    a = arguments.float_array(op, "a", a)
    keepdims, return_sign = arguments.flag(op, "keepdims", keepdims), arguments.flag(op, "return_sign", return_sign)
    shape = a.shape
    if where is not None:
        where = arguments.boolean(op, "where", where)
        shape = arguments.joint_shape(op, a=shape, where=where.shape)
    if b is not None:
        b = arguments.float_array(op, "b", b)
        shape = arguments.joint_shape(op, a=shape, b=b.shape)
    axes = arguments.axes(op, axis, len(shape))
    if b is not None or jnp.issubdtype(a.dtype, jnp.complexfloating):
        warn_fallback(op, "there is no kernel for factors b or complex numbers")
        return jax_logsumexp(jnp.broadcast_to(a, shape), axes, b, keepdims, return_sign, where)
    a, where = jnp.broadcast_to(a, shape), None if where is None else expand_rank(where, len(shape))
    origin, total, _, _ = kernels.forward(a, None, where, axes=axes, dtype=accumulator(a.dtype), cap=0.0)
    out = (origin + kernels.log_total(total)).astype(a.dtype)
    out = out if keepdims else jnp.squeeze(out, axes)
    if not return_sign:
        return out
    return out, jnp.where(jnp.isnan(out), out, jnp.where(jnp.isneginf(out), 0, 1).astype(out.dtype))

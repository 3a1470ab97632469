"""softmax and log_softmax: what is around their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops import _arguments as arguments
from jaxops._kernel import warn_fallback
from jaxops._rows import accumulator, kernel_dtypes


def _compose_logits(op: str, x, scale, bias, where, causal):
    """`x * scale + bias` in f32 (f64 for f64), -inf where masked; and the mask, or None.

    Composed from XLA's operations: the kernels do not take these options themselves yet.
    """
    if scale is not None:
        scale = arguments.real_array(op, "scale", scale)
        if scale.ndim:
            raise ValueError(f"{op}: scale must be a scalar, got shape {scale.shape}")
        x = x * scale.astype(x.dtype)
    if bias is not None:
        bias = arguments.real_array(op, "bias", bias)
        arguments.joint_shape(op, x=x.shape, bias=bias.shape)
        x = x + bias.astype(x.dtype)
    mask = None
    if where is not None:
        mask = arguments.boolean(op, "where", where)
        x = jnp.broadcast_to(x, arguments.joint_shape(op, x=x.shape, where=mask.shape))
    if causal:
        if x.ndim < 2:
            raise ValueError(f"{op}: causal needs x to have at least 2 dimensions (queries, keys), got {x.ndim}")
        queries, keys = (jax.lax.broadcasted_iota(np.int32, x.shape[-2:], dimension) for dimension in (0, 1))
        visible = keys <= queries
        mask = visible if mask is None else mask & visible
    if mask is not None:
        x = jnp.where(mask, x, -np.inf)
    return x, mask


def apply(
    op: str,
    kernel: Callable[[jax.Array, tuple[int, ...], np.dtype], jax.Array],
    reference: Callable[..., jax.Array],
    masked: float,
    x: Any,
    axis: Any,
    where: Any,
    scale: Any,
    bias: Any,
    causal: bool,
    dtype: Any,
) -> jax.Array:
    """Checks the arguments, composes the logits and runs `kernel` over them; masked entries become `masked`."""
    x = arguments.float_array(op, "x", x)
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"{op}: causal must be True or False, got {causal!r}")
    if not x.ndim and axis is not None:
        arguments.axes(op, axis, 0)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        if any(option is not None for option in (scale, bias, dtype)) or causal:
            raise TypeError(f"{op}: scale, bias, causal and dtype are not available for complex x, got {x.dtype}")
        warn_fallback(f"{op} of {x.dtype}", "there is no kernel for complex numbers")
        return reference(x, axis, where)
    result = arguments.result_dtype(op, dtype, x.dtype)
    mask = None
    if where is not None or scale is not None or bias is not None or causal:
        x, mask = _compose_logits(op, x.astype(accumulator(x.dtype, result)), scale, bias, where, causal)
    axes = arguments.axes(op, axis, x.ndim)
    kernel_input, kernel_result = kernel_dtypes(x.dtype, result)
    y = kernel(x.astype(kernel_input), axes, kernel_result).astype(result)
    return y if mask is None else jnp.where(mask, y, jnp.asarray(masked, result))

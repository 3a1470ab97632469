"""layer_norm and rms_norm: what is around their kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxops import _arguments as arguments
from jaxops._rows import RowKernel, accumulator, kernel_dtypes


def _plain_forward(centred, x, scale, bias, *, axes, dtype, epsilon):
    x = x.astype(accumulator(x.dtype))
    mean = jnp.mean(x, axis=axes, keepdims=True) if centred else jnp.zeros((), x.dtype)
    rstd = 1 / jnp.sqrt(jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True) + epsilon)
    y = (x - mean) * rstd
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias
    return (y.astype(dtype), mean, rstd) if centred else (y.astype(dtype), rstd)


def _plain_backward(centred, x, scale, mean, rstd, dy, *, axes, kept, dtype):
    wide = accumulator(x.dtype)
    x, dy = x.astype(wide), dy.astype(wide)
    normalised = (x - mean) * rstd if centred else x * rstd
    gradient = dy if scale is None else dy * scale
    dx = gradient - normalised * jnp.mean(gradient * normalised, axis=axes, keepdims=True)
    dx = dx - jnp.mean(gradient, axis=axes, keepdims=True) if centred else dx
    summed = tuple(a for a in range(x.ndim) if a not in axes and a not in kept)
    dscale, dbias = (jnp.sum(g, axis=summed, keepdims=True) for g in (dy * normalised, dy))
    return ((rstd * dx).astype(dtype), dscale, dbias)


def _rms_plain_forward(x, scale, **options):
    return _plain_forward(False, x, scale, None, **options)


def _rms_plain_backward(x, scale, rstd, dy, **options):
    return _plain_backward(False, x, scale, None, rstd, dy, **options)[:2]


_LAYER_NORM = (
    RowKernel(
        "layer_norm_fwd",
        "x: full, scale: parameter?, bias: parameter? -> y: full, mean: row, rstd: row",
        functools.partial(_plain_forward, True),
    ),
    RowKernel(
        "layer_norm_bwd",
        "x: full, scale: parameter?, mean: row, rstd: row, dy: full -> dx: full, dscale: parameter?, dbias: parameter?",
        functools.partial(_plain_backward, True),
    ),
)
_RMS_NORM = (
    RowKernel("rms_norm_fwd", "x: full, scale: parameter? -> y: full, rstd: row", _rms_plain_forward),
    RowKernel(
        "rms_norm_bwd",
        "x: full, scale: parameter?, rstd: row, dy: full -> dx: full, dscale: parameter?",
        _rms_plain_backward,
    ),
)


def _names(**operands):
    return tuple(name for name, value in operands.items() if value is not None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _norm(x, scale, bias, centred, axes, epsilon, dtype):
    """Normalised x; scale and bias are in the accumulator's dtype and of x's rank, or None."""
    return _norm_fwd(x, scale, bias, centred, axes, epsilon, dtype)[0]


def _norm_fwd(x, scale, bias, centred, axes, epsilon, dtype):
    options = {"axes": axes, "dtype": dtype, "epsilon": epsilon, "has": _names(scale=scale, bias=bias)}
    if centred:
        y, mean, rstd = _LAYER_NORM[0](x, scale, bias, **options)
        return y, (x, scale, bias, mean, rstd)
    y, rstd = _RMS_NORM[0](x, scale, **options)
    return y, (x, scale, bias, None, rstd)


def _norm_bwd(centred, axes, epsilon, dtype, residuals, dy):
    del epsilon, dtype
    x, scale, bias, mean, rstd = residuals
    options = {"axes": axes, "dtype": x.dtype, "has": _names(scale=scale, dscale=scale, dbias=bias)}
    if centred:
        dx, dscale, dbias = _LAYER_NORM[1](x, scale, mean, rstd, dy, **options)
        return dx, dscale, dbias
    dx, dscale = _RMS_NORM[1](x, scale, rstd, dy, **options)
    return dx, dscale, None


_norm.defvjp(_norm_fwd, _norm_bwd)


def _compose_masked_norm(x, scale, bias, where, axes, epsilon, dtype):
    """layer_norm whose statistics count only the positions where `where` holds.

    Composed from XLA's operations: the kernels do not take `where` themselves yet.
    """
    count = jnp.sum(where, axis=axes, keepdims=True, dtype=x.dtype)
    mean = jnp.sum(jnp.where(where, x, 0), axis=axes, keepdims=True) / count
    deviation = x - mean
    variance = jnp.sum(jnp.where(where, jnp.square(deviation), 0), axis=axes, keepdims=True) / count
    y = deviation / jnp.sqrt(variance + epsilon)
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias
    return y.astype(dtype)


def apply(op, centred, x, scale, bias, axis, epsilon, where, residual, dtype: Any):
    """Checks the arguments and runs the kernels of layer_norm (centred) or rms_norm."""
    x = arguments.real_array(op, "x", x)
    if residual is not None:  # the sum is XLA's: the kernels do not add it themselves yet
        residual = arguments.real_array(op, "residual", residual)
        if residual.shape != x.shape:
            raise ValueError(f"{op}: residual must have x's shape {x.shape}, got {residual.shape}")
        x = x + residual
    axes = arguments.axes(op, axis, x.ndim)
    epsilon = arguments.static_float(op, "epsilon", epsilon)
    parameters = {"scale": scale, "bias": bias}
    shape = tuple(x.shape[a] for a in axes)
    for name, value in parameters.items():
        if value is not None:
            parameters[name] = value = arguments.real_array(op, name, value)
            if value.shape != shape:
                raise ValueError(f"{op}: {name} must have the shape of the normalised axes, {shape}, got {value.shape}")
    given = [value for value in parameters.values() if value is not None]
    result = arguments.result_dtype(op, dtype, jnp.result_type(x, *given))
    wide = accumulator(x.dtype, result, *(value.dtype for value in given))
    expanded = [d if a in axes else 1 for a, d in enumerate(x.shape)]
    scale, bias = (None if value is None else value.astype(wide).reshape(expanded) for value in parameters.values())
    if where is not None:
        where = arguments.boolean(op, "where", where)
        if arguments.joint_shape(op, x=x.shape, where=where.shape) != x.shape:
            raise ValueError(f"{op}: where must broadcast to x's shape {x.shape}, got {where.shape}")
        where = jnp.broadcast_to(where, x.shape)
        y = _compose_masked_norm(x.astype(wide), scale, bias, where, axes, epsilon, result)
    else:
        kernel_input, kernel_result = kernel_dtypes(wide if wide.itemsize == 8 else x.dtype, result)
        y = _norm(x.astype(kernel_input), scale, bias, centred, axes, epsilon, kernel_result).astype(result)
    return y if residual is None else (y, x)

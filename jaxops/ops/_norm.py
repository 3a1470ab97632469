"""layer_norm and rms_norm: what is around their kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from jaxops import _arguments as arguments
from jaxops._rows import (
    RowKernel,
    accumulator,
    expand_rank,
    kernel_dtypes,
    read_perturbed,
    record_perturbed,
    sum_rows,
)


def _row_mean(x, where, axes):
    """The mean over each row's positions where `where` holds; None: over all."""
    where = None if where is None else jnp.broadcast_to(where, x.shape)
    return jnp.mean(x, axis=axes, keepdims=True, where=where)


def _plain_forward(centred, x, residual, scale, bias, where, *, axes, dtype, epsilon):
    wide = x.astype(accumulator(x.dtype))
    if residual is not None:  # what is normalised is the rounded sum; XLA would keep the exact one
        precision = jnp.finfo(x.dtype)
        wide = jax.lax.reduce_precision(wide + residual.astype(wide.dtype), precision.nexp, precision.nmant)
    total = wide.astype(x.dtype)
    mean = _row_mean(wide, where, axes) if centred else 0
    rstd = 1 / jnp.sqrt(_row_mean(jnp.square(wide - mean), where, axes) + epsilon)
    y = (wide - mean) * rstd
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias
    return (y.astype(dtype), total, *([mean] if centred else []), rstd)


def _plain_backward(centred, x, scale, where, *rest, axes, kept, dtype):
    *mean, rstd, dy, dsum = rest
    wide = accumulator(x.dtype)
    x, dy = x.astype(wide), dy.astype(wide)
    normalised = (x - mean[0]) * rstd if centred else x * rstd
    gradient = dy if scale is None else dy * scale
    # The statistics are means over the counted positions, through which all positions' gradients come back to those.
    through = normalised * jnp.sum(gradient * normalised, axis=axes, keepdims=True)
    through = through + jnp.sum(gradient, axis=axes, keepdims=True) if centred else through
    counted = jnp.broadcast_to(True if where is None else where, x.shape)
    share = counted / jnp.sum(counted, axis=axes, keepdims=True, dtype=np.int32).astype(wide)
    dx = rstd * (gradient - share * through)
    dx = dx if dsum is None else dx + dsum.astype(wide)
    return (dx.astype(dtype), *(sum_rows(g, axes, kept) for g in (dy * normalised, dy)))


class _Kernels(NamedTuple):
    """The kernels of an op. rms_norm's are those of layer_norm without the mean; it uses neither bias nor where."""

    forward: RowKernel
    backward: RowKernel

    @classmethod
    def declare(cls, op: str, centred: bool) -> _Kernels:
        statistics = "mean: row, rstd: row" if centred else "rstd: row"
        return cls(
            RowKernel(
                f"{op}_fwd",
                "x: full, residual: full?, scale: broadcast?, bias: broadcast?, where: broadcast? "
                f"-> y: full, sum: full?residual, {statistics}",
                functools.partial(_plain_forward, centred),
            ),
            RowKernel(
                f"{op}_bwd",
                f"x: full, scale: broadcast?, where: broadcast?, {statistics}, dy: full, dsum: full? "
                "-> dx: full, dscale: sum?, dbias: sum?",
                functools.partial(_plain_backward, centred),
            ),
        )


_KERNELS = {"layer_norm": _Kernels.declare("layer_norm", True), "rms_norm": _Kernels.declare("rms_norm", False)}


class _Call(NamedTuple):
    """What is known of a call without its operands."""

    op: str
    axes: tuple[int, ...]
    epsilon: float
    dtype: np.dtype  # of the result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(call: _Call, x, residual, scale, bias, where):
    """The normalised x, or with a residual the normalised sum and the sum.

    All operands have x's rank; residual has x's dtype, scale and bias the accumulator's.
    """
    return _run(call, x, residual, scale, bias, where)[0]


def _run(call: _Call, *operands):
    """The results, and the statistics that the backward pass needs: (mean,) rstd."""
    y, total, *statistics = _KERNELS[call.op].forward(*operands, axes=call.axes, dtype=call.dtype, epsilon=call.epsilon)
    return [y] if total is None else [y, total], statistics


def _forward(call: _Call, *primals):
    _, _, *parameters, _ = primals
    x, residual, scale, bias, where = custom_vjp_primal_tree_values(primals)
    out, statistics = _run(call, x, residual, scale, bias, where)
    summed = x if residual is None else out[1]
    return out, (summed, scale, where, statistics, record_perturbed(*parameters))


def _backward(call: _Call, residuals, cotangents):
    x, scale, where, statistics, perturbed = residuals
    dy, *dsum = (None if isinstance(cotangent, SymbolicZero) else cotangent for cotangent in cotangents)
    if dy is None:
        return *dsum, *dsum, None, None, None
    wanted = [name for name, flag in zip(("dscale", "dbias"), read_perturbed(perturbed), strict=True) if flag]
    dx, dscale, dbias = _KERNELS[call.op].backward(
        x, scale, where, *statistics, dy, *(dsum or [None]), axes=call.axes, dtype=x.dtype, results=wanted
    )
    return dx, dx if dsum else None, dscale, dbias, None


_norm.defvjp(_forward, _backward, symbolic_zeros=True)


def apply(op, x, scale, bias, axis, epsilon, where, residual, dtype: Any):
    """Checks the arguments and runs the kernels of layer_norm or rms_norm."""
    x = arguments.real_array(op, "x", x)
    if residual is not None:
        residual = arguments.real_array(op, "residual", residual)
        if residual.shape != x.shape:
            raise ValueError(f"{op}: residual must have x's shape {x.shape}, got {residual.shape}")
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
    total = np.dtype(x.dtype if residual is None else jnp.result_type(x, residual))
    result = arguments.result_dtype(op, dtype, jnp.result_type(total, *given))
    wide = accumulator(total, result, *(value.dtype for value in given))
    expanded = [d if a in axes else 1 for a, d in enumerate(x.shape)]
    scale, bias = (None if value is None else value.astype(wide).reshape(expanded) for value in parameters.values())
    if where is not None:
        where = arguments.boolean(op, "where", where)
        if arguments.joint_shape(op, x=x.shape, where=where.shape) != x.shape:
            raise ValueError(f"{op}: where must broadcast to x's shape {x.shape}, got {where.shape}")
        where = expand_rank(where, x.ndim)
    kernel_input, kernel_result = kernel_dtypes(wide if wide.itemsize == 8 else total, result)
    x, residual = (None if value is None else value.astype(kernel_input) for value in (x, residual))
    y, *sums = _norm(_Call(op, axes, epsilon, kernel_result), x, residual, scale, bias, where)
    y = y.astype(result)
    return (y, sums[0].astype(total)) if sums else y

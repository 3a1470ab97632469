"""softmax and log_softmax: what is around their kernels.

Both are functions of the logits z = x scale + bias, masked where `where` is false and, if causal, where the position
along the key axis exceeds the one along the query axis. The kernels take x, scale, bias and where as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import custom_vjp_primal_tree_values

from jaxops import _arguments as arguments
from jaxops._kernel import warn_fallback
from jaxops._rows import (
    RowKernel,
    accumulator,
    expand_rank,
    kernel_dtypes,
    read_perturbed,
    record_perturbed,
    sum_rows,
)

#: The bytes of a row of x up to which the backward kernels sum the gradient of the bias themselves.
_DBIAS_ROW_BYTES = 131072


def plain_logits(x, scale, bias, where, *, query_axis, key_axis):
    """The logits in the accumulator's dtype, and which of them take part: a boolean array of x's shape, or None."""
    z = x.astype(accumulator(x.dtype))
    z = z if scale is None else z * scale
    z = z if bias is None else z + bias.astype(z.dtype)
    mask = where
    if query_axis >= 0:
        query, key = (jax.lax.broadcasted_iota(np.int32, x.shape, axis) for axis in (query_axis, key_axis))
        mask = key <= query if mask is None else mask & (key <= query)
    return z, None if mask is None else jnp.broadcast_to(mask, x.shape)


def plain_gradients(dz, scale, *, axes, kept, dtype):
    """dx and dbias, from the gradient of the logits."""
    return (dz if scale is None else dz * scale).astype(dtype), sum_rows(dz, axes, kept)


class Kernels(NamedTuple):
    """The kernels of an op. from_result: the backward pass starts from y, not from x, bias and where."""

    forward: RowKernel
    backward: RowKernel
    from_result: bool

    @classmethod
    def declare(cls, op: str, plain_forward: Callable, plain_backward: Callable, from_result: bool) -> Kernels:
        options = "scale: broadcast?, bias: broadcast?, where: broadcast?"
        return cls(
            RowKernel(f"{op}_fwd", f"x: full, {options} -> y: full", plain_forward),
            RowKernel(
                f"{op}_bwd",
                f"x: full, {options}, dy: full -> dx: full, dbias: sum?",
                plain_backward,
                trailing_sums=True,
            ),
            from_result,
        )


class _Call(NamedTuple):
    """What is known of a call without its operands' values."""

    kernels: Kernels
    axes: tuple[int, ...]
    causal: bool  # the last two axes are queries and keys
    masked: bool  # causal or with where
    scale_varies: bool  # it is an array: its gradient may be wanted
    dtype: np.dtype  # of the result
    x: jax.ShapeDtypeStruct
    bias: jax.ShapeDtypeStruct | None

    @property
    def options(self) -> dict[str, Any]:
        rank = len(self.x.shape)
        query_axis, key_axis = (rank - 2, rank - 1) if self.causal else (-1, -1)
        return {"axes": self.axes, "query_axis": query_axis, "key_axis": key_axis}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, x, scale, bias, where):
    """The kernels' function; all operands have x's rank, scale has the accumulator's dtype."""
    return call.kernels.forward(x, scale, bias, where, dtype=call.dtype, **call.options)[0]


def _forward(call: _Call, *primals):
    _, *parameters, _ = primals
    x, scale, bias, where = custom_vjp_primal_tree_values(primals)
    y = _differentiable(call, x, scale, bias, where)
    operands = (y, scale, None, None) if call.kernels.from_result else (x, scale, bias, where)
    return y, (operands, x if call.scale_varies else None, record_perturbed(*parameters))


def _backward(call: _Call, residuals, dy):
    (operand, scale, bias, where), x, perturbed = residuals
    scale_wanted, bias_wanted = read_perturbed(perturbed)
    shape, dtype = call.x.shape, call.x.dtype
    if bias_wanted and all(call.bias.shape[a] == 1 for a in call.axes):
        bias_wanted = False  # what is added to a whole row does not change y: dz sums to 0 over each row
    in_kernel = (
        bias_wanted
        and not scale_wanted
        and call.axes == tuple(range(len(shape)))[-len(call.axes) :]
        and math.prod(shape[a] for a in call.axes) * dtype.itemsize <= _DBIAS_ROW_BYTES
        and all(call.bias.shape[a] == shape[a] for a in call.axes)
        and call.bias.shape != shape
    )
    kernel = functools.partial(call.kernels.backward, masked=call.masked, **call.options)
    if in_kernel or not (scale_wanted or bias_wanted):
        rows = [a for a in range(len(shape)) if a not in call.axes]
        kept = [a for a in rows if call.bias.shape[a] == shape[a]] if in_kernel else []
        results = ("dbias",) if in_kernel else ()
        dx, dbias = kernel(operand, scale, bias, where, dy, dtype=dtype, kept=kept, results=results)
        return dx, None, None if dbias is None else dbias.astype(call.bias.dtype), None

    # The kernel gives dz, XLA the rest: dx = scale dz, dscale = sum(dz x), dbias = sum(dz).
    wide = accumulator(dtype)
    z_dtype = jnp.promote_types(dtype, call.bias.dtype) if bias_wanted else dtype
    if not call.kernels.from_result:
        operand = operand.astype(z_dtype) if scale is None else operand.astype(wide) * scale
        z_dtype = operand.dtype
    dz = kernel(operand, None, bias, where, dy, dtype=z_dtype)[0]
    dx = (dz if scale is None else dz.astype(wide) * scale).astype(dtype)
    dscale = dbias = None
    if scale_wanted:  # masked entries of x may hold anything
        dscale = jnp.sum(jnp.where(dz == 0, 0, dz.astype(wide) * x.astype(wide)), keepdims=True)
    if bias_wanted:
        summed = tuple(a for a, d in enumerate(shape) if call.bias.shape[a] != d)
        dbias = jnp.sum(dz.astype(wide), axis=summed, keepdims=True).astype(call.bias.dtype)
    return dx, dscale, dbias, None


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)


def apply(
    op: str,
    kernels: Kernels,
    reference: Callable[..., jax.Array],
    x: Any,
    axis: Any,
    where: Any,
    scale: Any,
    bias: Any,
    causal: bool,
    dtype: Any,
) -> jax.Array:
    """Checks the arguments and runs the kernels, or `reference` for complex x."""
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
    kernel_input, kernel_result = kernel_dtypes(x.dtype, result)
    wide = accumulator(kernel_input)
    shape = x.shape
    scale_varies = not isinstance(scale, int | float | np.ndarray | np.generic | None)
    if scale is not None:
        scale = arguments.real_array(op, "scale", scale)
        if scale.ndim:
            raise ValueError(f"{op}: scale must be a scalar, got shape {scale.shape}")
        scale = scale.astype(wide)
    if bias is not None:
        bias = arguments.real_array(op, "bias", bias)
        bias = bias if accumulator(bias.dtype) == wide else bias.astype(wide)
        shape = arguments.joint_shape(op, x=shape, bias=bias.shape)
    if where is not None:
        where = arguments.boolean(op, "where", where)
        shape = arguments.joint_shape(op, x=shape, where=where.shape)
    if causal and len(shape) < 2:
        raise ValueError(f"{op}: causal needs x to have at least 2 dimensions (queries, keys), got {len(shape)}")
    axes = arguments.axes(op, axis, len(shape))
    x = jnp.broadcast_to(x.astype(kernel_input), shape)
    scale, bias, where = (value if value is None else expand_rank(value, len(shape)) for value in (scale, bias, where))
    call = _Call(
        kernels,
        axes,
        bool(causal),
        bool(causal) or where is not None,
        scale_varies,
        kernel_result,
        jax.ShapeDtypeStruct(shape, kernel_input),
        None if bias is None else jax.ShapeDtypeStruct(bias.shape, bias.dtype),
    )
    return _differentiable(call, x, scale, bias, where).astype(result)

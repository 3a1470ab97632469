"""Kernels, derivatives and arguments for softmax and log_softmax.

Both are functions of the logits z = x scale + bias. An entry is masked if `where` is False there or, with `causal`, if
its key comes after its query. The kernels take x, scale, bias and where unexpanded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxops import _arguments as arguments
from jaxops._rows import Named, RowKernel, Rows, accumulator, expand_rank, kernel_dtypes, promoted, sum_to
from jaxops._warnings import warn_fallback

_OPTIONS = "scale: broadcast?, bias: broadcast?, where: broadcast?"


def _causal_mask(rows: Rows, shape, query_axis, key_axis):
    """True for keys that are not after their query; size 1 along all other axes."""
    axes = (query_axis, key_axis)
    shape = [d if a in axes else 1 for a, d in enumerate(shape)]
    query, key = (rows.positions(shape, axis) for axis in axes)
    return key <= query


def plain_mask(rows: Rows, shape, where, *, query_axis, key_axis):
    """True for unmasked entries; broadcasts to x's shape. None: nothing is masked."""
    if query_axis < 0:
        return where
    causal = _causal_mask(rows, shape, query_axis, key_axis)
    return causal if where is None else where & causal


def visible(mask, x):
    """x, with 0 in masked entries."""
    return x if mask is None else jnp.where(mask, x, 0)


def plain_logits(rows: Rows, x, scale, bias, where, **causal):
    """The logits in the accumulator's dtype, with -inf in masked entries, and the mask."""
    mask = plain_mask(rows, x.shape, where, **causal)
    z = visible(mask, x.astype(accumulator(x.dtype)))  # masked entries may hold anything
    z = z if scale is None else _rounded_product(z, scale)
    z = z if bias is None else z + bias.astype(z.dtype)
    return z if mask is None else jnp.where(mask, z, -jnp.inf), mask


def _rounded_product(x, scale):
    """x scale, always rounded to its dtype.

    Compilers contract x scale - max to one operation whose product is not rounded: at the maximum, the largest entry's
    difference is then not 0, but anything up to half a unit of max, which overflows exp from 2^31 on. They may contract
    this sum, which gives the same, not two sums; a NaN in x is added as a 0 that the compilers cannot see.
    """
    return x * scale + jax.lax.stop_gradient(jnp.where(jnp.isnan(x), x, 0))


def plain_exponentials(z, max, mask):
    """exp(z - max), 0 where masked. A kernel may have rounded z differently for max: no entry counts more than 1."""
    distance = z - max
    # Not jnp.where(distance > 0, 0, distance): the largest entry would lose its derivative to a rounding error.
    return visible(mask, jnp.exp(distance - jax.lax.stop_gradient(jnp.maximum(distance, 0))))


def plain_gradient(dz, scale, dtype):
    """dx, from the logits' gradient."""
    return ((dz if scale is None else dz * scale).astype(dtype),)


def logits_tangent(x, shape, scale, dx, dscale, dbias):
    """The logits' tangent, in the given shape; absent tangents are None."""
    terms = []
    if dx is not None:
        terms.append(dx if scale is None else dx.astype(scale.dtype) * scale)
    if dscale is not None:
        terms.append(x.astype(dscale.dtype) * dscale)
    if dbias is not None:
        terms.append(dbias)
    wide = accumulator(*(term.dtype for term in terms))
    return jnp.broadcast_to(functools.reduce(jnp.add, (term.astype(wide) for term in terms)), shape)


class _LogitsKernel(RowKernel):
    """The handlers know a row's query from its position; on a part of the queries, causality becomes a mask."""

    #: Whether the zeros in the first operand, a result, tell which entries are masked.
    from_result = False

    def local(self, run, shards, scatter, *operands, has, query_axis, key_axis, **params):
        shape = operands[0].shape
        split = tuple(shards.get(f"x{a}", ()) for a in range(len(shape)))
        if query_axis >= 0 and (split[query_axis] or split[key_axis]):
            named = self._named(self.operands, operands, has)
            if not self.from_result:
                rows = Rows((), (), split)
                named["where"] = plain_mask(rows, shape, named["where"], query_axis=query_axis, key_axis=key_axis)
                has = tuple(name for name in self._optional if name in has or name == "where")
            query_axis = key_axis = -1
            operands = [x for x in named.values() if x is not None]
        params |= {"has": has, "query_axis": query_axis, "key_axis": key_axis}
        return super().local(run, shards, scatter, *operands, **params)


class Kernels:
    """An op's kernels and their derivatives.

    Args:
      op: its name.
      plain_forward, plain_backward: the kernels in plain JAX.
      tangent: the tangent map, from the kernels: takes them; Rows; the operand with which the backward pass starts; x,
        if this operand is y and the scale has a tangent; scale, bias, where; the statistics; the tangents of x, scale
        and bias, None for zero.
      total_tangent: if the backward pass starts from x, bias, where and each row's statistics, max(z) and sum(exp(z -
        max)), not from y: the sum's tangent, from Rows, x, scale, bias, where, max, the tangents of x, scale and bias.
        The maximum's tangent is taken as zero: it cancels in everything that uses both.
    """

    def __init__(
        self,
        op: str,
        plain_forward: Callable,
        plain_backward: Callable,
        tangent: Callable,
        total_tangent: Callable | None = None,
    ):
        self.from_result = total_tangent is None
        self._total_tangent = total_tangent
        self._statistics = () if self.from_result else ("max", "total")
        statistics = "".join(f", {name}: row" for name in self._statistics)
        kept_for_backward = "" if self.from_result else ", max: row?, total: row?max"
        self.forward = _LogitsKernel(
            f"{op}_fwd", f"x: full, {_OPTIONS} -> y: full{kept_for_backward}", plain_forward, jvp=self._jvp, joined=2
        )
        self.backward = _LogitsKernel(
            f"{op}_bwd",
            f"x: full, {_OPTIONS}{statistics}, dy: full -> dx: full",
            plain_backward,
            linear=("dy",),
            transpose=self._transpose_backward,
            joined=1,
        )
        self.backward.from_result = self.from_result
        self.tangent = RowKernel(
            f"{op}_jvp",
            f"operand: full, x: full?, {_OPTIONS}{statistics}, dx: full?, dscale: broadcast?, dbias: broadcast? "
            "-> dy: full",
            functools.partial(tangent, self),
            linear=("dx", "dscale", "dbias"),
            transpose=self._transpose_tangent,
            target=False,
        )

    def _jvp(self, primals: Named, tangents: Named, *, results, **params):
        x, scale, bias, where = primals.values()
        y, *statistics = self.forward(*primals.values(), results=self._statistics[:1], **params)
        out = {"y": y, **dict(zip(self._statistics, statistics, strict=True))}
        dx, dscale, dbias, _ = tangents.values()
        if dx is dscale is dbias is None:
            return out, {}
        residuals = (
            (y, None if dscale is None else x, scale, None, None) if self.from_result else (x, None, scale, bias, where)
        )
        masked = where is not None or params["query_axis"] >= 0
        (dy,) = self.tangent(*residuals, *statistics, dx, dscale, dbias, masked=masked, **params)
        found: Named = {"y": dy}
        if "total" in results:
            rows, causal = Rows(params["axes"]), {name: params[name] for name in ("query_axis", "key_axis")}
            found["total"] = self._total_tangent(rows, x, scale, bias, where, out["max"], dx, dscale, dbias, **causal)
        return out, found

    def _transpose_backward(self, given: Named, wanted: Named, cotangents: Named, *, kept, dtype, **params):
        del kept, dtype
        x, scale, bias, where, *statistics, _ = given.values()
        residuals = (x, None, scale, bias, where, *statistics)
        (dy,) = self.tangent(*residuals, cotangents["dx"], None, None, dtype=wanted["dy"].dtype, **params)
        return {"dy": dy}

    def _transpose_tangent(
        self, given: Named, wanted: Named, cotangents: Named, *, axes, kept, dtype, masked, **causal
    ):
        del kept, dtype
        operand, x, scale, bias, where, *statistics, _, _, _ = given.values()
        dy = cotangents["dy"]
        x = operand if x is None else x
        dtype = (operand if wanted["dx"] is None else wanted["dx"]).dtype
        scale_wanted, bias_type = wanted["dscale"] is not None, wanted["dbias"]
        if bias_type is not None and all(bias_type.shape[a] == 1 for a in axes):
            bias_type = None  # adding a constant to a row does not change y: dz sums to 0 over each row
        if wanted["dx"] is None and not scale_wanted and bias_type is None:
            return {}
        kernel = functools.partial(self.backward, axes=axes, masked=masked, **causal)
        if not scale_wanted and bias_type is None:
            return {"dx": kernel(operand, scale, bias, where, *statistics, dy, dtype=dtype)[0]}

        # The kernel computes dz. XLA computes dx = scale dz, dscale = sum(dz x) and dbias = sum(dz): its sums over rows
        # are the fastest.
        wide = accumulator(dtype)
        z_dtype = dtype if bias_type is None else promoted(dtype, bias_type.dtype)
        if not self.from_result:
            operand = operand.astype(z_dtype) if scale is None else operand.astype(wide) * scale
            z_dtype = operand.dtype
        dz = kernel(operand, None, bias, where, *statistics, dy, dtype=z_dtype)[0]
        found: Named = {"dx": (dz if scale is None else dz.astype(wide) * scale).astype(dtype)}
        if scale_wanted:  # masked entries in x may hold anything
            products = jnp.where(dz == 0, 0, dz.astype(wide) * x.astype(wide))
            found["dscale"] = sum_to(products, wanted["dscale"].shape)
        if bias_type is not None:
            found["dbias"] = sum_to(dz.astype(wide), bias_type.shape).astype(bias_type.dtype)
        return found


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
    causal = arguments.flag(op, "causal", causal)
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
    query_axis, key_axis = (len(shape) - 2, len(shape) - 1) if causal else (-1, -1)
    y, *_ = kernels.forward(
        x, scale, bias, where, axes=axes, dtype=kernel_result, query_axis=query_axis, key_axis=key_axis
    )
    return y.astype(result)

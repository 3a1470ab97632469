"""Kernels, derivatives and arguments for layer_norm and rms_norm."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxops import _arguments as arguments
from jaxops._rows import Named, RowKernel, Rows, accumulator, expand_rank, kernel_dtypes, promoted, sum_to


def _sums(rows: Rows, where, *xs):
    """Each row's sums, then how many of its positions count."""
    if where is None:
        return *rows.sum(*xs), rows.size(xs[0])
    return rows.sum(*xs, jnp.broadcast_to(where, xs[0].shape).astype(xs[0].dtype))


def _mean(rows: Rows, where, x):
    """The mean over a row's positions that count; the others may hold anything."""
    total, count = _sums(rows, where, x if where is None else jnp.where(where, x, 0))
    return total / count


def _plain_forward(centred, rows, x, residual, scale, bias, where, *, dtype, epsilon):
    wide = x.astype(accumulator(x.dtype))
    if residual is not None:  # the rounded sum is normalised; without this XLA would keep the exact one
        precision = jnp.finfo(x.dtype)
        wide = jax.lax.reduce_precision(wide + residual.astype(wide.dtype), precision.nexp, precision.nmant)
    total = wide.astype(x.dtype)
    mean = _mean(rows, where, wide) if centred else None
    deviations = wide - mean if centred else wide
    rstd = 1 / jnp.sqrt(_mean(rows, where, jnp.square(deviations)) + epsilon)
    y = deviations * rstd
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias
    return (y.astype(dtype), total, *([mean] if centred else []), rstd)


def _plain_backward(centred, rows, x, scale, where, *rest, dtype):
    *mean, rstd, dy, dsum = rest
    wide = accumulator(x.dtype)
    x, dy = x.astype(wide), dy.astype(wide)
    normalised = (x - mean[0]) * rstd if centred else x * rstd
    gradient = dy if scale is None else dy * scale
    # The statistics are means over the positions that count, so all gradients flow back to these positions.
    products, *total, count = _sums(rows, where, gradient * normalised, *([gradient] if centred else []))
    through = (normalised * products + total[0] if centred else normalised * products) / count
    dx = rstd * (gradient - (through if where is None else jnp.where(where, through, 0)))
    dx = dx if dsum is None else dx + dsum.astype(wide)
    return (dx.astype(dtype), *rows.sum_rows(dy * normalised, dy))


class _Kernels:
    """An op's kernels and their derivatives.

    centred: subtract the mean, as layer_norm does. rms_norm does not, and takes neither bias nor where.
    """

    def __init__(self, op: str, centred: bool):
        self.centred = centred
        statistics = "mean: row, rstd: row" if centred else "rstd: row"
        kept_for_backward = "mean: row!, rstd: row!" if centred else "rstd: row!"
        self.forward = RowKernel(
            f"{op}_fwd",
            "x: full, residual: full?, scale: broadcast?, bias: broadcast?, where: broadcast? "
            f"-> y: full, sum: full?residual, {kept_for_backward}",
            functools.partial(_plain_forward, centred),
            jvp=self._jvp,
            joined=3 if centred else 1,
            unsplit=("where",),
        )
        self.backward = RowKernel(
            f"{op}_bwd",
            f"x: full, scale: broadcast?, where: broadcast?, {statistics}, dy: full, dsum: full? "
            "-> dx: full, dscale: sum?, dbias: sum?",
            functools.partial(_plain_backward, centred),
            linear=("dy", "dsum"),
            transpose=self._transpose_backward,
            joined=2,
            unsplit=("where",),
        )
        self.tangent = RowKernel(
            f"{op}_jvp",
            f"x: full, scale: broadcast?, where: broadcast?, {statistics}, "
            "dx: full?, dscale: broadcast?, dbias: broadcast? -> dy: full, dsum: full?",
            self._tangent,
            linear=("dx", "dscale", "dbias"),
            transpose=self._transpose_tangent,
            target=False,
        )

    def _jvp(self, primals: Named, tangents: Named, *, results, axes, kept, **params):
        del kept
        statistics = ("mean", "rstd") if self.centred else ("rstd",)
        values = self.forward(*primals.values(), axes=axes, results=statistics, **params)
        out = dict(zip(("y", "sum", *statistics), values, strict=True))
        x = primals["x"] if out["sum"] is None else out["sum"]
        where, given = primals["where"], [out[name] for name in statistics]
        moved = [tangents[name] for name in ("x", "residual") if tangents[name] is not None]
        dx = functools.reduce(jnp.add, moved) if moved else None
        dscale, dbias = tangents["scale"], tangents["bias"]
        if dx is dscale is dbias is None:
            return out, {}
        dy, dsum = self.tangent(
            *(x, primals["scale"], where, *given, dx, dscale, dbias),
            axes=axes,
            dtype=params["dtype"],
            results=("dsum",) if out["sum"] is not None and dx is not None else (),
        )
        found: Named = {"y": dy, "sum": dsum}
        if "rstd" in results and dx is not None:
            rows, rstd = Rows(axes), out["rstd"]
            dx, deviations = dx.astype(rstd.dtype), x.astype(rstd.dtype) - out.get("mean", 0)
            found["mean"] = _mean(rows, where, dx)
            found["rstd"] = -(rstd**3) * _mean(rows, where, deviations * dx)
        return out, found

    def _tangent(self, rows: Rows, x, scale, where, *rest, dtype):
        """dy = scale A dx + x^ dscale + dbias, with x^ = (x - mean) rstd.

        A dx = rstd (dx - mean(dx) - x^ mean(x^ dx)), with means over the positions that count; mean(dx) only if
        centred. If all positions count, A is symmetric, and the backward kernel without a scale computes A dx.
        """
        *statistics, dx, dscale, dbias = rest
        wide = accumulator(x.dtype)
        normalised = (x.astype(wide) - (statistics[0] if self.centred else 0)) * statistics[-1]
        terms = []
        if dx is not None and where is None:
            precise = promoted(x.dtype, dtype)
            operands = (x.astype(precise), None, None, *statistics, dx.astype(precise), None)
            terms.append(self.backward(*operands, axes=rows.axes, dtype=precise)[0])
        elif dx is not None:
            t = dx.astype(wide)
            through = normalised * _mean(rows, where, normalised * t)
            terms.append(statistics[-1] * (t - _mean(rows, where, t) - through))
        if terms and scale is not None:
            terms[0] = terms[0].astype(wide) * scale
        if dscale is not None:
            terms.append(normalised * dscale)
        if dbias is not None:
            terms.append(dbias)
        return jnp.broadcast_to(functools.reduce(jnp.add, terms), x.shape).astype(dtype), dx

    def _transpose_backward(self, given: Named, wanted: Named, cotangents: Named, *, kept, dtype, **params):
        del kept, dtype
        x, scale, where, *statistics, _, _ = given.values()
        found: Named = {"dsum": cotangents["dx"]}
        if wanted["dy"] is not None:
            operands = (x, scale, where, *statistics, *cotangents.values())
            found["dy"] = self.tangent(*operands, dtype=wanted["dy"].dtype, **params)[0]
        return found

    def _transpose_tangent(self, given: Named, wanted: Named, cotangents: Named, *, axes, **_):
        dy, dsum = cotangents.values()
        if dy is None:
            return {"dx": dsum}
        x, scale, where, *statistics, _, _, _ = given.values()
        types = {name: wanted[name] for name in ("dscale", "dbias") if wanted[name] is not None}
        kept = [a for a in range(x.ndim) if a not in axes and any(t.shape[a] == x.shape[a] for t in types.values())]
        found = self.backward(
            *(x, scale, where, *statistics, dy, dsum), axes=axes, dtype=x.dtype, kept=kept, results=tuple(types)
        )
        named = dict(zip(("dx", "dscale", "dbias"), found, strict=True))
        return named | {name: sum_to(named[name], t.shape) for name, t in types.items()}


_KERNELS = {op: _Kernels(op, centred) for op, centred in (("layer_norm", True), ("rms_norm", False))}


def apply(op, x, scale, bias, axis, epsilon, where, residual, dtype: Any):
    """Checks the arguments and runs layer_norm's or rms_norm's kernels."""
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
    total = arguments.joint_dtype(op, x=x, residual=residual)
    default = arguments.joint_dtype(op, x=x, residual=residual, **parameters) if dtype is None else None
    result = arguments.result_dtype(op, dtype, default)
    wide = accumulator(total, result, *(value.dtype for value in parameters.values() if value is not None))
    expanded = [d if a in axes else 1 for a, d in enumerate(x.shape)]
    scale, bias = (None if value is None else value.astype(wide).reshape(expanded) for value in parameters.values())
    if where is not None:
        where = arguments.boolean(op, "where", where)
        if arguments.joint_shape(op, x=x.shape, where=where.shape) != x.shape:
            raise ValueError(f"{op}: where must broadcast to x's shape {x.shape}, got {where.shape}")
        where = expand_rank(where, x.ndim)
    kernel_input, kernel_result = kernel_dtypes(wide if wide.itemsize == 8 else total, result)
    x, residual = (None if value is None else value.astype(kernel_input) for value in (x, residual))
    y, summed, *_ = _KERNELS[op].forward(
        x, residual, scale, bias, where, axes=axes, dtype=kernel_result, epsilon=epsilon
    )
    y = y.astype(result)
    return y if summed is None else (y, summed.astype(total))

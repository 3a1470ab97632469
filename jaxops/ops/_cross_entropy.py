"""The kernels for the cross entropy and logsumexp, and their derivatives.

For logits z = x, or cap tanh(x / cap), a kernel gives each row's origin (its maximum), total = sum(exp(z - origin)),
the label's logit and, if it is wanted, the sum of z; XLA computes the rest from these, [rows]-sized. So one backward
kernel serves every loss: dx = (dtotal exp(z - origin) + dsum + dpicked [column is the label's]) dz/dx.
ffi/ops/cross_entropy/cross_entropy.h says more.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._rows import Named, RowKernel, Rows, accumulator

#: No vocabulary has this column.
NO_LABEL = np.int32(-(2**31))


def _logits(x, cap):
    """In the accumulator's dtype."""
    x = x.astype(accumulator(x.dtype))
    return cap * jnp.tanh(x / cap) if cap else x


def _slope(z, cap):
    return 1 - jnp.square(z / cap) if cap else 1


def _visible(where, x):
    return x if where is None else jnp.where(where, x, 0)


def from_first(labels, columns):
    """Labels as columns counted from the first one; negative ones count from the end."""
    return jnp.where(labels < 0, labels + columns, labels)


def _at_label(rows: Rows, shape, labels):
    """Which entries are the labels', and which rows have one."""
    (axis,) = rows.axes
    labels = from_first(labels, shape[axis])
    columns = jax.lax.broadcasted_iota(np.int32, shape, axis)
    return columns == labels, (labels >= 0) & (labels < shape[axis])


def _plain_forward(rows, x, labels, where, *, dtype, cap):
    del dtype
    z = _logits(x, cap)
    masked = z if where is None else jnp.where(where, z, -jnp.inf)
    max = jax.lax.stop_gradient(rows.max(masked))
    origin = jnp.where(jnp.isfinite(max), max, 0)
    picked = None
    if labels is not None:
        at_label, has_label = _at_label(rows, x.shape, labels)
        (found,) = rows.sum(jnp.where(at_label, z, 0))
        picked = jnp.where(has_label, found, jnp.nan)
    total, sum = rows.sum(jnp.exp(masked - origin), _visible(where, z))
    return origin, total, picked, sum


def _plain_backward(rows, x, labels, where, origin, dtotal, dpicked, dsum, *, dtype, cap):
    z = _logits(x, cap)
    dz = jnp.exp(z - origin) * dtotal
    dz = _visible(where, dz if dsum is None else dz + dsum)
    zero = dtotal == 0 if dsum is None else (dtotal == 0) & (dsum == 0)
    if labels is not None:
        at_label, _ = _at_label(rows, x.shape, labels)
        dz = dz + jnp.where(at_label, dpicked, 0)
        zero &= dpicked == 0
    return (jnp.where(zero, 0, dz * _slope(z, cap)).astype(dtype),)


def _tangent(rows, x, labels, where, origin, dx, *, dtype, cap):
    del dtype
    z = _logits(x, cap)
    dz = dx.astype(z.dtype) * _slope(z, cap)
    picked = None
    if labels is not None:
        at_label, has_label = _at_label(rows, x.shape, labels)
        (found,) = rows.sum(jnp.where(at_label, dz, 0))
        picked = jnp.where(has_label, found, 0)
    visible = _visible(where, dz)
    total, sum = rows.sum(_visible(where, jnp.exp(z - origin)) * visible, visible)
    return total, picked, sum


def plain_tangent(x, labels, origin, dx, cap):
    """The tangents of each row's total, picked and sum, for logits [rows, columns], from x's tangent."""
    return _tangent(Rows((1,)), x, labels, None, origin, dx, dtype=None, cap=cap)


def _plain_both(rows, x, labels, where, dlog, dpicked, dsum, *, dtype, cap, z_loss, in_place):
    del in_place
    origin, total, picked, sum = _plain_forward(rows, x, labels, where, dtype=None, cap=cap)
    dtotal = total_cotangent(dlog, origin, total, z_loss)
    (dx,) = _plain_backward(rows, x, labels, where, origin, dtotal, dpicked, dsum, dtype=dtype, cap=cap)
    return dx, origin, total, picked, sum


def log_total(total):
    """log(total), with derivative 0 if nothing was summed."""
    return jnp.where(total == 0, -jnp.inf, jnp.log(jnp.where(total == 0, 1, total)))


def total_cotangent(dlog, origin, total, z_loss):
    """The cotangent of `total`, if logsumexp's is dlog and dlog z_loss logsumexp^2 is added to the loss.

    Where dlog is 0, so is the cotangent, even if logsumexp is infinite; its derivative in dlog is not 0.
    """

    def slope(origin, total):
        return (1 + 2 * z_loss * (origin + jnp.log(total)) if z_loss else 1) / total

    counts = (dlog != 0) | jnp.isfinite(jax.lax.stop_gradient(slope(origin, total)))
    origin, total = jnp.where(counts, origin, 0), jnp.where(counts, total, 1)
    return jnp.where(counts, dlog * slope(origin, total), 0)


class Parts:
    """The rows' labels where the columns are split over the mesh axes `over`, as each device's own.

    labels: as columns in this device's part, NO_LABEL if another one has it.
    """

    def __init__(self, labels, width, over: tuple[str, ...]):
        self.over, self.labels = over, labels
        if labels is None:
            return
        columns = width * jax.lax.psum(1, over)
        labels = from_first(labels, columns)
        first = width * jax.lax.axis_index(over)
        self._found = (labels >= 0) & (labels < columns)
        self._own = (labels >= first) & (labels < first + width)
        self.labels = jnp.where(self._own, labels - first, NO_LABEL)

    def join(self, origin, total, picked, sum):
        """Whole rows' values, from every device's part: the devices exchange a maximum, then the sums as one."""
        max = jax.lax.pmax(jnp.where(total == 0, -jnp.inf, origin), self.over)
        joint = jnp.where(jnp.isfinite(max), max, 0)
        values = [total * jnp.exp(jnp.where(total == 0, 0, origin - joint))]
        if picked is not None:
            values.append(jnp.where(self._own, picked, 0))
        if sum is not None:
            values.append(sum)
        total, *values = jax.lax.psum(jnp.stack(values), self.over)
        if picked is not None:
            picked = jnp.where(self._found, values.pop(0), jnp.nan)
        return joint, total, picked, None if sum is None else values.pop(0)


class _Kernel(RowKernel):
    """Where columns are split over devices, each runs the kernels on its own, with the labels that it has."""

    def ffi_call(self, results, *operands, in_place=False, **attributes):
        return super().ffi_call(results, *operands, aliases={0: 0} if in_place else None, **attributes)

    def call(self, how: str | None, *operands, axes, results=(), **params):
        """A call in one device's program, by `how` ("call_target" or "plain"); None: as a primitive."""
        if how is None:
            return self(*operands, axes=axes, results=results, **params)
        given = [slot.name for slot, x in zip(self.operands, operands, strict=True) if x is not None]
        has = tuple(name for name in self._optional if name in given or name in results)
        present = [x for x in operands if x is not None]
        out = self._named(self.results, getattr(self, how)(*present, axes=axes, kept=(), has=has, **params), has)
        return list(out.values())

    def local(self, run, shards, scatter, *operands, axes, has, **params):
        over = tuple(name for a in axes for name in shards.get(f"x{a}", ()))
        if not over:
            return super().local(run, shards, scatter, *operands, axes=axes, has=has, **params)
        named = self._named(self.operands, operands, has)
        parts = Parts(named["labels"], math.prod(operands[0].shape[a] for a in axes), over)
        named["labels"] = parts.labels
        given = [x for x in named.values() if x is not None]
        if self is not forward_backward:
            out = run(*given, axes=axes, has=has, **params)
            if self is backward:
                return out
            values = self._named(self.results, out, has)
            return [x for x in parts.join(*values.values()) if x is not None]
        return self._local_both(run.__name__, parts, named, axes=axes, **params)

    def _local_both(self, how, parts, named, *, axes, kept, dtype, cap, z_loss, in_place):
        """Each row's values have to be joined in between."""
        del kept, in_place
        x, labels, where, dlog, dpicked, dsum = named.values()
        wanted = () if dsum is None else ("sum",)
        values = forward.call(how, x, labels, where, axes=axes, results=wanted, dtype=accumulator(x.dtype), cap=cap)
        values = parts.join(*values)
        dtotal = total_cotangent(dlog, *values[:2], z_loss)
        operands = (x, labels, where, values[0], dtotal, dpicked, dsum)
        (dx,) = backward.call(how, *operands, axes=axes, dtype=dtype, cap=cap)
        return [value for value in (dx, *values) if value is not None]


def _jvp_forward(primals: Named, tangents: Named, *, results, axes, **params):
    x, labels, where = primals.values()
    wanted = ("sum",) if "sum" in results else ()
    out = forward(x, labels, where, axes=axes, results=wanted, **params)
    named = dict(zip(("origin", "total", "picked", "sum"), out, strict=True))
    if tangents["x"] is None:
        return named, {}
    moved_wanted = tuple("d" + name for name in wanted)
    moved = _tangent_kernel(x, labels, where, out[0], tangents["x"], axes=axes, results=moved_wanted, **params)
    return named, dict(zip(("total", "picked", "sum"), moved, strict=True))


def _transpose_tangent(given: Named, wanted: Named, cotangents: Named, *, dtype, **params):
    del dtype
    x, labels, where, origin, _ = given.values()
    dtotal, dpicked, dsum = cotangents.values()
    dtotal = jnp.zeros_like(origin) if dtotal is None else dtotal
    if labels is not None and dpicked is None:
        dpicked = jnp.zeros_like(origin)
    (dx,) = backward(x, labels, where, origin, dtotal, dpicked, dsum, dtype=x.dtype, **params)
    return {"dx": dx.astype(wanted["dx"].dtype)}


def _transpose_backward(given: Named, wanted: Named, cotangents: Named, *, dtype, **params):
    del dtype
    x, labels, where, origin, *_ = given.values()
    results = ("dsum",) if wanted["dsum"] is not None else ()
    dtype = accumulator(x.dtype)
    out = _tangent_kernel(x, labels, where, origin, cotangents["dx"], results=results, dtype=dtype, **params)
    return dict(zip(("dtotal", "dpicked", "dsum"), out, strict=True))


def _jvp_both(primals: Named, tangents: Named, *, results, z_loss, in_place, dtype, **params):
    """The rule of the two passes that it combines."""
    del in_place
    wanted = ("sum",) if "sum" in results else ()
    moving = [name for name, tangent in tangents.items() if tangent is not None]

    def both(*values):
        x, labels, where, dlog, dpicked, dsum = (primals | dict(zip(moving, values, strict=True))).values()
        values = forward(x, labels, where, results=wanted, dtype=accumulator(x.dtype), **params)
        dtotal = total_cotangent(dlog, *values[:2], z_loss)
        (dx,) = backward(x, labels, where, values[0], dtotal, dpicked, dsum, dtype=dtype, **params)
        return [x for x in (dx, *values) if x is not None]

    out, moved = jax.jvp(both, [primals[name] for name in moving], [tangents[name] for name in moving])
    return dict(zip(results, out, strict=True)), dict(zip(results, moved, strict=True))


_OPERANDS = "x: full, labels: row?, where: broadcast?"

forward = _Kernel(
    "cross_entropy_fwd",
    f"{_OPERANDS} -> origin: row, total: row, picked: row?labels, sum: row?",
    _plain_forward,
    jvp=_jvp_forward,
)
backward = _Kernel(
    "cross_entropy_bwd",
    f"{_OPERANDS}, origin: row, dtotal: row, dpicked: row?labels, dsum: row? -> dx: full",
    _plain_backward,
    linear=("dtotal", "dpicked", "dsum"),
    transpose=_transpose_backward,
)
forward_backward = _Kernel(
    "cross_entropy_fwd_bwd",
    f"{_OPERANDS}, dlog: row, dpicked: row?labels, dsum: row? "
    "-> dx: full, origin: row, total: row, picked: row?labels, sum: row?dsum",
    _plain_both,
    jvp=_jvp_both,
)
_tangent_kernel = RowKernel(
    "cross_entropy_jvp",
    f"{_OPERANDS}, origin: row, dx: full -> dtotal: row, dpicked: row?labels, dsum: row?",
    _tangent,
    linear=("dx",),
    transpose=_transpose_tangent,
    target=False,
)

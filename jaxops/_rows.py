"""Row kernels: the common layer of softmax, log_softmax, layer_norm and rms_norm between Python and the device.

All operands and results of a row kernel have the rank of its first operand, x. If a tensor has size 1 along an axis, it
is constant (an operand) or reduced (a result) along it. So one model serves every rule: vmap inserts an axis
everywhere, with size 1 if an operand is not mapped. The handlers take the tensors as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad

from jaxops._kernel import Kernel, jvp_of_linear
from jaxops._limits import MAX_AXES, MAX_CAUSAL_SIZE, MAX_COLUMNS
from jaxops._sharding import Layout
from jaxops._warnings import warn_fallback

#: The parameters that name x's axes. vmap shifts them; an axis -1 is none.
AXIS_PARAMETERS = ("axes", "kept", "query_axis", "key_axis")


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A row kernel's operand or result.

    kind: "full", x's shape; "row", one value a row: size 1 along the normalised axes; "broadcast", an operand that has
    x's size or 1 along each axis; "sum", a result that has x's size along the normalised and the kept axes and is
    summed over the others. condition: the optional slot with which it is there (mostly itself); None: always. given:
    the handler has this result whether it is wanted or not.
    """

    name: str
    kind: str
    condition: str | None
    given: bool

    @classmethod
    def parse(cls, text: str) -> _Slot:
        name, kind = (part.strip() for part in text.split(":"))
        given = kind.endswith("!")
        kind, optional, condition = kind.replace("!", "?").partition("?")
        return cls(name, kind, (condition or name) if optional else None, given)

    def present(self, has: Sequence[str]) -> bool:
        return self.condition is None or self.condition in has


def accumulator(*dtypes) -> np.dtype:
    """The dtype in which sums, statistics and parameters are kept: f64 as soon as one operand is f64, else f32."""
    return np.dtype("float64" if any(np.dtype(d) == np.float64 for d in dtypes) else "float32")


def promoted(*dtypes) -> np.dtype:
    """The dtype to which dtypes promote if a rule chose them differently, whatever promotion the user allows."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(*dtypes))


def kernel_dtypes(x, result) -> tuple[np.dtype, np.dtype]:
    """The dtypes of x and the result that have a kernel: equal, or one is f32."""
    x, result = np.dtype(x), np.dtype(result)
    if accumulator(x, result) == np.float64:
        return np.dtype("float64"), np.dtype("float64")
    if x == result or np.float32 in (x, result):
        return x, result
    return x, np.dtype("float32")


def expand_rank(x: jax.Array, rank: int) -> jax.Array:
    """x with leading axes of size 1, as numpy broadcasts it."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def sum_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """x summed over the axes along which `shape` has size 1."""
    summed = tuple(a for a, d in enumerate(x.shape) if shape[a] != d)
    return jnp.sum(x, axis=summed, keepdims=True) if summed else x


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that plain JAX code works on, and their reductions.

    axes: the normalised axes. kept: further axes along which the sums over rows are not taken. shards: if x is one
    device's part of an array, the mesh axes over which each of x's axes is split; then the reductions cover the whole
    array, each with one collective operation on its results.
    """

    axes: tuple[int, ...]
    kept: tuple[int, ...] = ()
    shards: tuple[tuple[str, ...], ...] = ()

    def _over(self, axes: Iterable[int]) -> tuple[str, ...]:
        return tuple(name for a in axes if self.shards for name in self.shards[a])

    def max(self, x: jax.Array) -> jax.Array:
        """Each row's largest element, with size 1 along the normalised axes."""
        largest = jnp.max(x, axis=self.axes, keepdims=True, initial=-jnp.inf)
        over = self._over(self.axes)
        return jax.lax.pmax(largest, over) if over else largest

    def sum(self, *xs: jax.Array) -> list[jax.Array]:
        """Each row's sums, in one dtype, with size 1 along the normalised axes."""
        sums = [jnp.sum(x, axis=self.axes, keepdims=True) for x in xs]
        over = self._over(self.axes)
        if not over:
            return sums
        return list(jax.lax.psum(jnp.stack(sums), over)) if len(sums) > 1 else [jax.lax.psum(sums[0], over)]

    def size(self, x: jax.Array) -> float:
        """How many elements a row has: a float, as there may be more than an int32 counts."""
        over = self._over(self.axes)
        here = math.prod(x.shape[a] for a in self.axes)
        return (float(here) if isinstance(here, int) else here) * (jax.lax.psum(1, over) if over else 1)

    def sum_rows(self, *xs: jax.Array) -> list[jax.Array]:
        """The sums over rows: x's size along the normalised and the kept axes, else size 1."""
        summed = tuple(a for a in range(xs[0].ndim) if a not in self.axes and a not in self.kept)
        sums = [jnp.sum(x, axis=summed, keepdims=True) for x in xs]
        over = self._over(summed)
        return jax.lax.psum(sums, over) if over else sums

    def positions(self, shape: Sequence[int], axis: int) -> jax.Array:
        """Each element's position along an axis in the whole array."""
        here = jax.lax.broadcasted_iota(np.int32, shape, axis)
        over = self._over((axis,))
        return here + shape[axis] * jax.lax.axis_index(over) if over else here


def _plans():
    """The functions in ffi/rows/plan.h: how the handlers for GPUs work on rows, and the workspaces that they want."""
    from jaxops import _cpu

    if not hasattr(_cpu, "plan_rows"):
        raise ImportError("jaxops' compiled half is older than its sources: build it again (make build)")
    return _cpu


def _segments(shape: Sequence[int], axes: Sequence[int], dtypes: Iterable[np.dtype], backward: bool) -> int:
    """Into how many segments, runs of columns, the handlers split a call's rows; 0: they do not split them.

    Args:
      dtypes: the distinct dtypes among tensors with x's shape.
    """
    if not all(isinstance(d, int) for d in shape):  # symbolic
        return 0
    sizes = ((a in axes, d) for a, d in enumerate(shape) if d != 1)
    runs = [(of_row, math.prod(d for _, d in run)) for of_row, run in itertools.groupby(sizes, lambda size: size[0])]
    rows, columns = (math.prod(d for of_row, d in runs if of_row == kind) for kind in (False, True))
    across = not (runs and runs[-1][0])
    if across and ([of_row for of_row, _ in runs[-2:]] != [True, False] or len(runs) > 3):
        return 0
    if columns <= 2048:  # never split; spares most calls the question
        return 0
    one, *more = dtypes
    packs = not across or runs[-1][1] % 4 == 0
    told = bool(more) or one == np.float16  # at run time: such rows are split by single elements
    return _plans().plan_segments(rows, columns, across, packs, len(runs) > 2, one.itemsize, told, backward)


#: A row kernel's operands or results by name; None if absent.
Named = dict[str, "jax.Array | None"]


class RowKernel(Kernel):
    """A kernel over the rows of x.

    Args:
      name: the FFI target.
      spec: `"x: full, scale: broadcast?, residual: full? -> y: full, sum: full?residual, rstd: row"`: operands and
        results, each with its kind (see `_Slot`). One with `?` is there only in some calls, or, with another's name
        behind it, together with that one. The handler has a boolean attribute `has_scale` for it. One with `!` is a
        result that the handler always has, and some calls leave out.
      plain: the same function in plain JAX: takes Rows, the operands by position (None if absent) and the parameters by
        keyword, returns the results as a tuple in the spec's order.
      linear: the operands in which it is linear.
      jvp: the JVP rule, if the kernel is linear in no operand: takes the primals and the tangents (None for zero) as
        dictionaries, the parameters and the wanted results' names by keyword; returns the results and their tangents as
        dictionaries.
      transpose: the transpose rule, if the kernel is linear in some operands: takes as dictionaries the given operands,
        the wanted operands' types and the results' cotangents (None for zero), and the parameters by keyword; returns
        the wanted operands' cotangents as a dictionary.
      joined: how many values a row are joined over its parts, where the handlers split rows: they have a boolean
        attribute `has_parts`, and with it a workspace behind the other results. None: they split none.
      unsplit: the slots with which they split none; None: broadcast operands and sums.
      target: see Kernel.

    A call's parameters: `axes`, the normalised axes, ascending; `dtype`, the first result's dtype (further full results
    have x's); `has`, the optional slots that are given; `kept`, further axes over which sums are not taken (mapped
    ones); anything else goes to the handler.
    """

    def __init__(
        self,
        name: str,
        spec: str,
        plain: Callable[..., tuple],
        *,
        linear: Sequence[str] = (),
        jvp: Callable[..., tuple[Named, Named]] | None = None,
        transpose: Callable[..., Named] | None = None,
        joined: int | None = None,
        unsplit: Sequence[str] | None = None,
        target: bool = True,
    ):
        super().__init__(name, target=target)
        operands, results = spec.split("->")
        self.operands = [_Slot.parse(text) for text in operands.split(",")]
        self.results = [_Slot.parse(text) for text in results.split(",")]
        self._optional = [slot.name for slot in (*self.operands, *self.results) if slot.condition == slot.name]
        self._plain = plain
        self._linear = frozenset(linear)
        self._jvp_rule = jvp
        self._transpose_rule = transpose
        self.joined = joined
        slots = (*self.operands, *self.results)
        self._unsplit = (
            {slot.name for slot in slots if slot.kind in ("broadcast", "sum")} if unsplit is None else {*unsplit}
        )

    def __call__(self, *operands, axes: Sequence[int], dtype, kept: Sequence[int] = (), results=(), **attributes):
        """The results in the spec's order, None if absent.

        Args:
          operands: in the spec's order, None if absent.
          results: the wanted optional results' names.
        """
        given = [slot.name for slot, x in zip(self.operands, operands, strict=True) if x is not None]
        present = [x for x in operands if x is not None]
        single = not axes  # every element is a row: an axis is inserted for it
        if single:
            axes, present = (present[0].ndim,), [jnp.expand_dims(x, -1) for x in present]
        has = tuple(name for name in self._optional if name in given or name in results)
        out = self.bind(*present, axes=tuple(axes), kept=tuple(kept), has=has, dtype=np.dtype(dtype), **attributes)
        out = iter([jnp.squeeze(x, -1) for x in out] if single else out)
        return [next(out) if slot.present(has) else None for slot in self.results]

    def _present(self, slots: Sequence[_Slot], has: Sequence[str]) -> list[_Slot]:
        return [slot for slot in slots if slot.present(has)]

    def abstract(self, *avals, axes, kept, has, dtype, **_) -> list[ShapedArray]:
        slots = self._present(self.operands, has)
        if len(slots) != len(avals):
            raise TypeError(f"{self.name} takes {[slot.name for slot in slots]}, got {len(avals)} operands")
        x = avals[0]
        row = tuple(1 if a in axes else d for a, d in enumerate(x.shape))
        for slot, aval in zip(slots, avals, strict=True):
            fits = {
                "full": aval.shape == x.shape,
                "row": aval.shape == row,
                "broadcast": aval.ndim == x.ndim and all(d in (1, e) for d, e in zip(aval.shape, x.shape, strict=True)),
            }[slot.kind]
            if not fits:
                raise TypeError(f"{self.name}: {slot.name} has shape {aval.shape}, which does not fit x's {x.shape}")
        wide = accumulator(*(aval.dtype for aval in avals))
        shapes = {
            "full": x.shape,
            "row": row,
            "sum": tuple(d if a in axes or a in kept else 1 for a, d in enumerate(x.shape)),
        }
        first, *rest = self._present(self.results, has)
        return [
            ShapedArray(shapes[first.kind], dtype),
            *(ShapedArray(shapes[slot.kind], x.dtype if slot.kind == "full" else wide) for slot in rest),
        ]

    def layout(self, *operands, axes, kept, has, **_) -> Layout:
        """x's axes by number; the handlers sum over rows, and `local` over their shards."""
        sizes = operands[0].shape

        def names(kind, shape=None):
            own = {
                "full": lambda a: False,
                "row": lambda a: a in axes,
                "broadcast": lambda a: shape[a] != sizes[a],
                "sum": lambda a: a not in axes and a not in kept,
            }[kind]
            return ["" if own(a) else f"x{a}" for a in range(len(sizes))]

        inputs = zip(self._present(self.operands, has), operands, strict=True)
        return Layout.of(
            (names(slot.kind, x.shape) for slot, x in inputs),
            (names(slot.kind) for slot in self._present(self.results, has)),
        )

    def _run_plain(self, rows: Rows, *operands, has, dtype, **attributes) -> list[jax.Array]:
        named = self._named(self.operands, operands, has)
        out = self._plain(rows, *named.values(), dtype=dtype, **attributes)
        return [value for slot, value in zip(self.results, out, strict=True) if slot.present(has)]

    def plain(self, *operands, axes, kept, **params) -> list[jax.Array]:
        return self._run_plain(Rows(axes, kept), *operands, **params)

    def local(self, run, shards, scatter, *operands, axes, kept, has, **params) -> list[jax.Array]:
        """Where rows are split, plain JAX with collective operations on a few values a row; else the kernel."""
        if not shards:
            return run(*operands, axes=axes, kept=kept, has=has, **params)
        rows = Rows(axes, kept, tuple(shards.get(f"x{a}", ()) for a in range(operands[0].ndim)))
        if any(rows.shards[a] for a in axes):
            return self._run_plain(rows, *operands, has=has, **params)
        out = run(*operands, axes=axes, kept=kept, has=has, **params)
        summed = [i for i, slot in enumerate(self._present(self.results, has)) if slot.kind == "sum"]
        over = [name for a, names in enumerate(rows.shards) if a not in (*axes, *kept) for name in names]
        if summed and over:
            for i, total in zip(summed, jax.lax.psum([out[i] for i in summed], over), strict=True):
                out[i] = total
        return out

    def plan(self, *operands, axes, kept, has, dtype, **attributes) -> dict[str, Any]:
        """How a Hopper GPU's handler works on a call's rows: see `plan_rows` in ffi/module.cc.

        Only the handler sees how broadcast operands lie; where their axes do not merge, its plan may be another.
        """
        x, *_ = operands
        results = self.abstract(*operands, axes=axes, kept=kept, has=has, dtype=dtype)
        slots = (*self._present(self.operands, has), *self._present(self.results, has))
        buffers = list(zip(slots, (*operands, *results), strict=True))
        logits = "query_axis" in attributes
        masked = "where" in has
        kinds = {np.dtype(value.dtype).name for slot, value in buffers if slot.kind == "full"}
        elements = kinds.pop() if len(kinds) == 1 and (logits or not masked) else "any"
        elements = elements if elements in ("bfloat16", "float16", "float32", "float64") else "any"
        # Runs of row axes and column axes, the innermost last; rows lie across if their run is the last one.
        sizes = [(a in axes, d) for a, d in enumerate(x.shape) if d != 1]
        runs = [
            (of_row, math.prod(d for _, d in run)) for of_row, run in itertools.groupby(sizes, lambda size: size[0])
        ]
        across = bool(runs) and not runs[-1][0]
        column_axes = max(sum(of_row for of_row, _ in runs), 1)
        pack = 1 if elements == "float64" else 4 if across or elements == "float32" else 8
        aligned = not runs or runs[-1][1] % pack == 0
        shared = [
            value for slot, value in buffers if slot.kind == "broadcast" and not (logits and slot.name == "scale")
        ]
        whole = across or all(value.shape[a] == x.shape[a] for value in shared for a in axes)
        alike = all(value.shape[a] == 1 for value in shared for a in range(x.ndim) if a not in axes)
        options = 0
        if logits:
            masks = masked or "scale" in has or attributes["query_axis"] >= 0 or attributes.get("masked", False)
            # There are kernels for masks alone.
            alone = not self.name.endswith("_bwd") and elements not in ("any", "float16")
            options = 2 if "bias" in has or (masks and not alone) else int(masks)
        inputs = sum(slot.kind == "full" and slot.condition is None for slot in self.operands)
        summed = [slot for slot in self.results if slot.kind == "sum"]
        return _plans().plan_rows(
            rows=math.prod(d for of_row, d in runs if not of_row),
            columns=math.prod(d for of_row, d in runs if of_row),
            elements=elements,
            across=across,
            packs=aligned and whole and (across or column_axes == 1),
            aligned_packs=aligned,
            single_elements=whole and column_axes == 1,
            one_axis=column_axes == 1,
            alike=alike and (logits or (inputs == 1 and "residual" not in has and not masked)),
            inputs=inputs,
            parameters=0 if logits else sum(slot.name in ("scale", "bias") for slot in self.operands),
            options=options,
            as_f32=masked and not logits,
            sums=len(summed) if any(slot.present(has) for slot in summed) else 0,
            fetched=inputs + ("dsum" in has),
        )

    def _chunks(self, *operands, axes, kept, **params) -> int:
        """Into how many partial sums the sums over each group's rows are split, at most.

        At least 8 rows each. The handlers take fewer if threads would have no rows, and none for few rows (HasFewRows).
        Depends on nothing but the operands: it is part of the compiled program.
        """
        sizes = operands[0].shape
        if not all(isinstance(sizes[a], int) for a in kept):
            return 1  # how many groups there are is not known before the program is compiled
        # Symbolic columns may be many, and unaligned.
        known = [d if isinstance(d, int) else 4097 if a in axes else 2 for a, d in enumerate(sizes)]
        shapes = ([1 if d == 1 else known[a] for a, d in enumerate(x.shape)] for x in operands)
        structs = (jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, operands, strict=True))
        groups = math.prod(sizes[a] for a in kept)
        each = self.plan(*structs, axes=axes, kept=kept, **params)["chunks"] // max(groups, 1)
        rows = math.prod(d for a, d in enumerate(sizes) if a not in axes and a not in kept)
        return max(1, min(each, rows // 8) if isinstance(rows, int) else each)

    def explain(self, *operands, axes, **params) -> str:
        """How rows lie and how a Hopper GPU's handler treats them, then the parameters."""
        x = operands[0]
        columns = math.prod(x.shape[a] for a in axes)
        lie = "adjacent" if axes == tuple(range(x.ndim - len(axes), x.ndim)) else "strided"
        rows = f"{x.size // max(columns, 1)} rows of {columns} {lie}"
        if all(isinstance(d, int) for d in x.shape) and x.size:
            plan = self.plan(*operands, axes=axes, **params)
            rows += f": {plan['text']}"
        return f"{rows}; {super().explain(*operands, axes=axes, **params)}"

    def _beyond_limits(self, x, axes, query_axis=-1, key_axis=-1, **_) -> tuple[str, str] | None:
        """A call beyond the handlers' limits, and the limit, as `warn_fallback` takes them; None: within them."""
        if max(len(axes), x.ndim - len(axes)) > MAX_AXES:
            return f"{self.name} of rank {x.ndim}", f"the kernels take up to {MAX_AXES} axes of a kind"
        columns = math.prod(x.shape[a] for a in axes)
        if isinstance(columns, int) and columns > MAX_COLUMNS:
            return f"{self.name} of {columns} columns", f"the kernels take rows of up to {MAX_COLUMNS} elements"
        sizes = [x.shape[a] for a in (query_axis, key_axis) if a >= 0 and isinstance(x.shape[a], int)]
        if max(sizes, default=0) > MAX_CAUSAL_SIZE:
            return f"causal {self.name} of {x.shape}", f"the kernels take up to {MAX_CAUSAL_SIZE} queries and keys"
        return None

    def is_chosen(self, x, *operands, axes, **params) -> bool:
        return self._beyond_limits(x, axes, **params) is None

    def parts(self, operands: Sequence, results: Sequence, axes, has, **attributes) -> ShapedArray | None:
        """The workspace [parts, values, rows] if the handlers split the call's rows; None: they do not.

        They split the rows that `_segments` tells, without masks.
        """
        slots = (*self._present(self.operands, has), *self._present(self.results, has))
        buffers = list(zip(slots, (*operands, *results), strict=True))
        dtypes = {np.dtype(x.dtype) for slot, x in buffers if slot.kind == "full"}
        options = any(slot.name in self._unsplit for slot in slots)
        options = options or attributes.get("masked", False) or attributes.get("query_axis", -1) >= 0
        if self.joined is None or options or np.dtype("float64") in dtypes:
            return None
        shape = operands[0].shape
        inputs = [slot for slot in self.operands if slot.kind == "full" and slot.condition is None]
        count = _segments(shape, axes, dtypes, backward=len(inputs) == 2)
        rows = (d for a, d in enumerate(shape) if a not in axes)
        return ShapedArray((count, self.joined, math.prod(rows)), np.float32) if count else None

    def call_target(self, *operands, axes, kept, has, dtype, **attributes) -> list[jax.Array]:
        if (beyond := self._beyond_limits(operands[0], axes, **attributes)) is not None:
            warn_fallback(*beyond)
            return self.plain(*operands, axes=axes, kept=kept, has=has, dtype=dtype, **attributes)
        wanted, given = has, [slot.name for slot in self.results if slot.given]
        has = (*(name for name in has if name not in given), *given)
        results = self.abstract(*operands, axes=axes, kept=kept, has=has, dtype=dtype)
        parts = self.parts(operands, results, axes, has, **attributes)
        kinds = [slot.kind for slot in self._present(self.results, has)]
        sums = kinds.count("sum")
        if sums:  # before them stands the handlers' workspace
            x = operands[0]
            groups, columns = (math.prod(x.shape[a] for a in named) for named in (kept, axes))
            chunks = self._chunks(*operands, axes=axes, kept=kept, has=has, dtype=dtype, **attributes)
            first = kinds.index("sum")
            results.insert(first, ShapedArray((sums, groups, chunks, columns), results[first].dtype))
        if self.joined is not None:
            attributes["has_parts"] = parts is not None
        attributes |= {f"has_{name}": name in has for name in self._optional if name not in given}
        attributes["axes"] = axes
        for name in AXIS_PARAMETERS:
            if name in attributes:
                attributes[name] = np.int64(attributes[name])  # a scalar or an array
        out = self.ffi_call([*results, *([parts] if parts else [])], *operands, **attributes)
        if sums:
            del out[first]
        there = self._present(self.results, has)
        del out[len(there) :]
        return [value for slot, value in zip(there, out, strict=True) if slot.present(wanted)]

    def batch(self, operands, dims, *, has, **params):
        slots = self._present(self.operands, has)
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        full = [d for slot, d in zip(slots, dims, strict=True) if slot.kind == "full" and d is not None]
        sums = any(slot.kind == "sum" and slot.present(has) for slot in self.results)
        position = full[0] if full else 0  # x's own mapped axis stays where it is

        def insert(kind, x, dim):
            if dim is not None:
                return jnp.moveaxis(x, dim, position)
            x = jnp.expand_dims(x, position)
            if kind == "broadcast":
                return x
            return jnp.broadcast_to(x, (*x.shape[:position], size, *x.shape[position + 1 :]))

        def shift(axis):
            return axis + (axis >= position) if isinstance(axis, int) else tuple(shift(a) for a in axis)

        moved = [insert(slot.kind, x, dim) for slot, x, dim in zip(slots, operands, dims, strict=True)]
        params |= {name: shift(params[name]) for name in AXIS_PARAMETERS if name in params}
        if sums:
            params["kept"] = tuple(sorted((*params["kept"], position)))
        out = self.bind(*moved, has=has, **params)
        return out, [position] * len(out)

    def _named(self, slots: Sequence[_Slot], values: Sequence, has: Sequence[str]) -> dict[str, Any]:
        values = iter(values)
        return {slot.name: next(values) if slot.present(has) else None for slot in slots}

    def jvp(self, primals, tangents, *, has, **params):
        if self._linear:
            linear = [slot.name in self._linear for slot in self._present(self.operands, has)]
            return jvp_of_linear(self, linear, primals, tangents, has=has, **params)
        tangents = [None if isinstance(t, ad.Zero) else t for t in tangents]
        named = (self._named(self.operands, values, has) for values in (primals, tangents))
        slots = self._present(self.results, has)
        out, moved = self._jvp_rule(*named, results=tuple(slot.name for slot in slots), **params)
        zeros = [ad.Zero(jax.typeof(out[slot.name])) for slot in slots]
        moved = [zero if moved.get(s.name) is None else moved[s.name] for s, zero in zip(slots, zeros, strict=True)]
        return [out[slot.name] for slot in slots], moved

    def transpose(self, cotangents, *operands, has, **params):
        slots = self._present(self.operands, has)
        undefined = {slot.name for slot, x in zip(slots, operands, strict=True) if ad.is_undefined_primal(x)}
        if not undefined <= self._linear:
            raise NotImplementedError(
                f"{self.name} cannot be transposed in {', '.join(sorted(undefined))}; use jax.vjp"
            )
        cotangents = [None if isinstance(t, ad.Zero) else t for t in cotangents]
        given = [None if ad.is_undefined_primal(x) else x for x in operands]
        types = [x.aval if ad.is_undefined_primal(x) else None for x in operands]
        found = self._transpose_rule(
            self._named(self.operands, given, has),
            self._named(self.operands, types, has),
            self._named(self.results, cotangents, has),
            **params,
        )
        return [found.get(slot.name) for slot in slots]

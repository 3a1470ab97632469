"""Row kernels: what softmax, log_softmax, layer_norm and rms_norm have in common between Python and the device.

All operands and results of a row kernel have the rank of its first operand, x. An axis along which a tensor has size 1
is one along which it is constant (an operand) or reduced (a result). One model then serves every rule: vmap inserts an
axis everywhere, of size 1 where an operand is not mapped.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from jaxops._kernel import Kernel


@dataclasses.dataclass(frozen=True)
class _Slot:
    """An operand or result of a row kernel.

    kind: "full", x's shape; "row", one value a row: size 1 along the normalised axes; "parameter", an operand that may
    have size 1 along any axis, or a result summed over all axes but the normalised and the kept ones.
    """

    name: str
    kind: str
    optional: bool

    @classmethod
    def parse(cls, text: str) -> _Slot:
        name, kind = text.split(":")
        return cls(name.strip(), kind.strip().rstrip("?"), kind.strip().endswith("?"))


def accumulator(*dtypes) -> np.dtype:
    """The dtype in which sums, statistics and parameters are kept: f64 as soon as one operand is f64, else f32."""
    return np.dtype("float64" if any(np.dtype(d) == np.float64 for d in dtypes) else "float32")


def kernel_dtypes(x, result) -> tuple[np.dtype, np.dtype]:
    """The dtypes of x and of the result between which a kernel exists: equal, or one of them f32."""
    x, result = np.dtype(x), np.dtype(result)
    if accumulator(x, result) == np.float64:
        return np.dtype("float64"), np.dtype("float64")
    if x == result or np.float32 in (x, result):
        return x, result
    return x, np.dtype("float32")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How tensors of x's rank are brought into the handlers' form [groups, rows, columns, inner]."""

    order: tuple[int, ...]  # x's axes: grouped, other rows, normalised, rows behind the last normalised axis
    shape: tuple[int, ...]  # x's shape in that order
    counts: tuple[int, int, int, int]  # how many axes make up groups, rows, columns and inner

    @classmethod
    def of(cls, shape: Sequence[int], axes: Sequence[int], grouped: Sequence[int]) -> _Layout:
        rest = [a for a in range(len(shape)) if a not in axes and a not in grouped]
        inner = [a for a in rest if axes and a > max(axes)]
        rows = [a for a in rest if a not in inner]
        order = (*grouped, *rows, *axes, *inner)
        counts = (len(grouped), len(rows), len(axes), len(inner))
        return cls(order, tuple(shape[a] for a in order), counts)

    def _sizes(self, shape: Sequence[int]) -> list[int]:
        bounds = np.cumsum((0, *self.counts))
        return [math.prod(shape[a:b]) for a, b in itertools.pairwise(bounds)]

    @property
    def sizes(self) -> list[int]:
        return self._sizes(self.shape)

    def _ordered(self, x):
        return x if self.order == tuple(range(x.ndim)) else jnp.transpose(x, self.order)

    def canonical(self, kind: str, x: jax.Array) -> jax.Array:
        """x as a handler takes it: [G, R, N, I] (full), [G, R, I] (row) or [1 or G, N] (parameter)."""
        x = self._ordered(x)
        groups, rows, columns, inner = self.sizes
        if kind == "full":
            return x.reshape(groups, rows, columns, inner)
        if kind == "row":
            return x.reshape(groups, rows, inner)
        n_groups, n_rows, n_columns, _ = self.counts
        group_dims = x.shape[:n_groups] if math.prod(x.shape[:n_groups]) == 1 else self.shape[:n_groups]
        column_dims = self.shape[n_groups + n_rows : n_groups + n_rows + n_columns]
        rest = x.shape[n_groups : n_groups + n_rows], x.shape[n_groups + n_rows + n_columns :]
        x = jnp.broadcast_to(x, (*group_dims, *rest[0], *column_dims, *rest[1]))
        return x.reshape(math.prod(group_dims), columns)

    def canonical_shape(self, kind: str) -> tuple[int, ...]:
        """The shape of a result in the handlers' form."""
        groups, rows, columns, inner = self.sizes
        return {
            "full": (groups, rows, columns, inner),
            "row": (groups, rows, inner),
            "parameter": (groups, columns),
        }[kind]

    def restore(self, shape: Sequence[int], x: jax.Array) -> jax.Array:
        """The inverse of `canonical`, for a result whose own shape is `shape`."""
        x = x.reshape([shape[a] for a in self.order])
        if self.order == tuple(range(len(shape))):
            return x
        return jnp.transpose(x, np.argsort(self.order))


def _chunks(rows: int, columns: int, itemsize: int) -> int:
    """Into how many partial sums the parameter gradients of a group's rows are split.

    On a GPU each is a block's, and one wave of blocks is best (TUNING.md): as many as an H200's 132 multiprocessors
    hold at once, but at least 8 rows each. Where rows are no multiple of 8 elements, a multiple of 8 blocks keeps each
    thread on the same columns. Depends on nothing but the operands, so that results do not depend on the device.
    """
    row_bytes = columns * itemsize
    if row_bytes > 32768:  # more than a block holds; there the columns themselves make enough blocks
        return min(8, max(1, rows // 8))
    full = 656 if row_bytes <= 1024 else 528 if row_bytes <= 4096 else 264 if row_bytes <= 8192 else 132
    chunks = min(full, max(1, rows // 8))
    return chunks if columns % 8 == 0 or chunks < 8 else chunks // 8 * 8


class RowKernel(Kernel):
    """A kernel over the rows of x.

    Args:
      name: the FFI target.
      spec: `"x: full, scale: parameter? -> y: full, rstd: row"`: operands and results, each with its kind (see
        `_Slot`); one with `?` is there only if the parameter `has` names it.
      plain: the same function in plain JAX: takes the operands by name (None where absent) and the parameters by
        keyword (`kept` only if it sums), returns the results as a tuple in the order of the spec, absent ones as None.

    Parameters of a call: `axes`, the normalised axes, ascending; `dtype`, that of the full results; `has`; `kept`,
    further axes over which parameter gradients are not summed (mapped ones); anything else goes to the handler.
    """

    def __init__(self, name: str, spec: str, plain: Callable[..., tuple]):
        super().__init__(name)
        operands, results = spec.split("->")
        self.operands = [_Slot.parse(text) for text in operands.split(",")]
        self.results = [_Slot.parse(text) for text in results.split(",")]
        self._plain = plain
        self._summed = any(slot.kind == "parameter" for slot in self.results)

    def __call__(self, *operands, has: Sequence[str] = (), axes: Sequence[int], dtype, **attributes) -> list:
        """Binds the primitive. Absent operands are None and do not appear in `has`; so are absent results."""
        present = [x for x in operands if x is not None]
        out = iter(self.bind(*present, axes=tuple(axes), kept=(), has=tuple(has), dtype=np.dtype(dtype), **attributes))
        return [next(out) if not slot.optional or slot.name in has else None for slot in self.results]

    def _present(self, slots: Sequence[_Slot], has: Sequence[str]) -> list[_Slot]:
        return [slot for slot in slots if not slot.optional or slot.name in has]

    def abstract(self, *avals, axes, kept, has, dtype, **_) -> list[ShapedArray]:
        slots = self._present(self.operands, has)
        if len(slots) != len(avals):
            raise TypeError(f"{self.name} takes {[slot.name for slot in slots]}, got {len(avals)} operands")
        x = avals[0]
        kept_shape = tuple(1 if a in axes else d for a, d in enumerate(x.shape))
        for slot, aval in zip(slots, avals, strict=True):
            fits = {
                "full": aval.shape == x.shape,
                "row": aval.shape == kept_shape,
                "parameter": aval.ndim == x.ndim and all(d in (1, e) for d, e in zip(aval.shape, x.shape, strict=True)),
            }[slot.kind]
            if not fits:
                raise TypeError(f"{self.name}: {slot.name} has shape {aval.shape}, which does not fit x's {x.shape}")
        wide = accumulator(*(aval.dtype for aval in avals))
        summed = tuple(d if a in axes or a in kept else 1 for a, d in enumerate(x.shape))
        shapes = {"full": x.shape, "row": kept_shape, "parameter": summed}
        return [
            ShapedArray(shapes[slot.kind], dtype if slot.kind == "full" else wide)
            for slot in self._present(self.results, has)
        ]

    def plain(self, *operands, axes, kept, has, dtype, **attributes) -> list[jax.Array]:
        given = iter(operands)
        named = [next(given) if not slot.optional or slot.name in has else None for slot in self.operands]
        if self._summed:
            attributes["kept"] = kept
        out = self._plain(*named, axes=axes, dtype=dtype, **attributes)
        return [value for slot, value in zip(self.results, out, strict=True) if not slot.optional or slot.name in has]

    def call_target(self, *operands, axes, kept, has, dtype, **attributes) -> list[jax.Array]:
        slots = self._present(self.operands, has)
        results = self.abstract(*operands, axes=axes, kept=kept, has=has, dtype=dtype)
        grouped = set(kept)
        for slot, operand in zip(slots, operands, strict=True):
            if slot.kind == "parameter":
                grouped |= {a for a, d in enumerate(operand.shape) if d != 1 and a not in axes}
        layout = _Layout.of(operands[0].shape, axes, sorted(grouped))
        kinds = [slot.kind for slot in self._present(self.results, has)]
        shapes = [
            jax.ShapeDtypeStruct(layout.canonical_shape(kind), aval.dtype)
            for kind, aval in zip(kinds, results, strict=True)
        ]
        if "parameter" in kinds:  # the handlers' workspace stands before the parameter gradients
            groups, rows, columns, inner = layout.sizes
            first = kinds.index("parameter")
            widest = max(x.dtype.itemsize for slot, x in zip(slots, operands, strict=True) if slot.kind == "full")
            chunks = _chunks(rows * inner, columns, widest)
            workspace = (kinds.count("parameter"), groups, chunks, columns)
            shapes.insert(first, jax.ShapeDtypeStruct(workspace, shapes[first].dtype))
        if any(slot.optional for slot in (*self.operands, *self.results)):
            attributes["has_scale"] = "scale" in has or "dscale" in has
            attributes["has_bias"] = "bias" in has or "dbias" in has
        canonical = [layout.canonical(slot.kind, x) for slot, x in zip(slots, operands, strict=True)]
        out = self.ffi_call(shapes, *canonical, **attributes)
        if "parameter" in kinds:
            del out[first]
        return [layout.restore(aval.shape, value) for aval, value in zip(results, out, strict=True)]

    def batch(self, operands, dims, *, axes, kept, has, **params):
        kinds = [slot.kind for slot in self._present(self.operands, has)]
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        full = [d for kind, d in zip(kinds, dims, strict=True) if kind == "full" and d is not None]
        position = full[0] if full else 0  # x's own mapped axis stays where it is

        def insert(kind, x, dim):
            if dim is not None:
                return jnp.moveaxis(x, dim, position)
            x = jnp.expand_dims(x, position)
            if kind == "parameter":
                return x
            return jnp.broadcast_to(x, (*x.shape[:position], size, *x.shape[position + 1 :]))

        moved = [insert(*operand) for operand in zip(kinds, operands, dims, strict=True)]
        axes = tuple(a + (a >= position) for a in axes)
        kept = tuple(a + (a >= position) for a in kept)
        if self._summed:
            kept = tuple(sorted((*kept, position)))
        out = self.bind(*moved, axes=axes, kept=kept, has=has, **params)
        return out, [position] * len(out)

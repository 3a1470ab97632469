"""Row kernels: what softmax, log_softmax, layer_norm and rms_norm have in common between Python and the device.

All operands and results of a row kernel have the rank of its first operand, x. An axis along which a tensor has size 1
is one along which it is constant (an operand) or reduced (a result). One model then serves every rule: vmap inserts an
axis everywhere, of size 1 where an operand is not mapped. The handlers take the tensors as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.custom_derivatives import CustomVJPPrimal

from jaxops._kernel import Kernel, warn_fallback

#: The parameters that name axes of x. vmap shifts them; an axis of -1 is none.
AXIS_PARAMETERS = ("axes", "kept", "query_axis", "key_axis")

#: As many normalised axes, and as many others, do the handlers take (ffi/core/row_shape.h).
MAX_AXES = 12


@dataclasses.dataclass(frozen=True)
class _Slot:
    """An operand or result of a row kernel.

    kind: "full", x's shape; "row", one value a row: size 1 along the normalised axes; "broadcast", an operand that has
    x's size or 1 along each axis; "sum", a result that has x's size along the normalised and the kept axes and is
    summed over the others. condition: the optional slot with which it is there (mostly itself); None: always.
    """

    name: str
    kind: str
    condition: str | None

    @classmethod
    def parse(cls, text: str) -> _Slot:
        name, kind = (part.strip() for part in text.split(":"))
        kind, optional, condition = kind.partition("?")
        return cls(name, kind, (condition or name) if optional else None)

    def present(self, has: Sequence[str]) -> bool:
        return self.condition is None or self.condition in has


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


def expand_rank(x: jax.Array, rank: int) -> jax.Array:
    """x with axes of size 1 in front, as numpy broadcasts it."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def sum_rows(x: jax.Array, axes: Sequence[int], kept: Sequence[int]) -> jax.Array:
    """A "sum" result in plain JAX."""
    summed = tuple(a for a in range(x.ndim) if a not in axes and a not in kept)
    return jnp.sum(x, axis=summed, keepdims=True)


def record_perturbed(*primals: CustomVJPPrimal | None) -> np.ndarray:
    """Which operands of a custom_vjp function are differentiated, as a residual for its backward pass.

    An empty array that says it with its shape: (0, 1 or 0 for each operand). The structure of the residuals must not
    depend on it: all pullbacks of a jitted function are run with the structure that was traced last.
    """
    return np.zeros((0, *(int(primal is not None and primal.perturbed) for primal in primals)), np.float32)


def read_perturbed(recorded: jax.Array) -> list[bool]:
    """What `record_perturbed` recorded."""
    return [bool(d) for d in recorded.shape[1:]]


def _chunks(groups: int, rows: int, columns: int, itemsize: int) -> int:
    """Into how many partial sums the sums over each group's rows are split.

    On a GPU each is a block's, and one wave of blocks is best (TUNING.md): as many as an H200's 132 multiprocessors
    hold at once, but at least 8 rows each. Where rows are no multiple of 8 elements, a multiple of 8 blocks keeps each
    thread on the same columns; of few blocks that would leave out too many, so that two waves are better. Depends on
    nothing but the operands, so that results do not depend on the device.
    """
    row_bytes = columns * itemsize
    limits = ((512, 792), (2048, 528), (12288, 264), (32768, 132), (65536, 66), (131072, 30), (262144, 15))
    full = next((count for limit, count in limits if row_bytes <= limit), 7)
    if columns % 8:
        full = max((2 * full if full <= 30 else full) // 8 * 8, 8)
    chunks = max(1, min(full // groups, rows // 8))
    return chunks if columns % 8 == 0 or chunks < 8 else chunks // 8 * 8


class RowKernel(Kernel):
    """A kernel over the rows of x.

    Args:
      name: the FFI target.
      spec: `"x: full, scale: broadcast?, residual: full? -> y: full, sum: full?residual, rstd: row"`: operands and
        results, each with its kind (see `_Slot`). One with `?` is there only in some calls, or, with another's name
        behind it, together with that one. The handler has a boolean attribute `has_scale` for it.
      plain: the same function in plain JAX: takes the operands by position (None where absent) and the parameters by
        keyword (`kept` only if it sums), returns the results as a tuple in the order of the spec.
      trailing_sums: the sums exist only where the normalised axes are x's last ones.

    Parameters of a call: `axes`, the normalised axes, ascending; `dtype`, that of the first result (further full ones
    have x's); `has`, the optional slots that are there; `kept`, further axes over which sums are not taken (mapped
    ones, those of a bias); anything else goes to the handler.
    """

    def __init__(self, name: str, spec: str, plain: Callable[..., tuple], trailing_sums: bool = False):
        super().__init__(name)
        operands, results = spec.split("->")
        self.operands = [_Slot.parse(text) for text in operands.split(",")]
        self.results = [_Slot.parse(text) for text in results.split(",")]
        self._optional = [slot.name for slot in (*self.operands, *self.results) if slot.condition == slot.name]
        self._plain = plain
        self._trailing_sums = trailing_sums

    def __call__(self, *operands, axes: Sequence[int], dtype, kept: Sequence[int] = (), results=(), **attributes):
        """The results in the order of the spec, None where absent.

        Args:
          operands: in the order of the spec, None where absent.
          results: the names of the optional results that are wanted.
        """
        given = [slot.name for slot, x in zip(self.operands, operands, strict=True) if x is not None]
        present = [x for x in operands if x is not None]
        single = not axes  # every element is a row: of an axis of its own
        if single:
            axes, present = (present[0].ndim,), [jnp.expand_dims(x, -1) for x in present]
        has = tuple(name for name in self._optional if name in given or name in results)
        out = self.bind(*present, axes=tuple(axes), kept=tuple(kept), has=has, dtype=np.dtype(dtype), **attributes)
        out = iter([jnp.squeeze(x, -1) for x in out] if single else out)
        return [next(out) if slot.present(has) else None for slot in self.results]

    def abstract(self, *avals, axes, kept, has, dtype, **_) -> list[ShapedArray]:
        slots = [slot for slot in self.operands if slot.present(has)]
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
        first, *rest = (slot for slot in self.results if slot.present(has))
        return [
            ShapedArray(shapes[first.kind], dtype),
            *(ShapedArray(shapes[slot.kind], x.dtype if slot.kind == "full" else wide) for slot in rest),
        ]

    def plain(self, *operands, axes, kept, has, dtype, **attributes) -> list[jax.Array]:
        given = iter(operands)
        named = [next(given) if slot.present(has) else None for slot in self.operands]
        if any(slot.kind == "sum" for slot in self.results):
            attributes["kept"] = kept
        out = self._plain(*named, axes=axes, dtype=dtype, **attributes)
        return [value for slot, value in zip(self.results, out, strict=True) if slot.present(has)]

    def call_target(self, *operands, axes, kept, has, dtype, **attributes) -> list[jax.Array]:
        rank = operands[0].ndim
        if max(len(axes), rank - len(axes)) > MAX_AXES:
            warn_fallback(f"{self.name} of rank {rank}", f"the kernels take up to {MAX_AXES} axes of a kind")
            return self.plain(*operands, axes=axes, kept=kept, has=has, dtype=dtype, **attributes)
        avals = self.abstract(*operands, axes=axes, kept=kept, has=has, dtype=dtype)
        results = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        kinds = [slot.kind for slot in self.results if slot.present(has)]
        sums = kinds.count("sum")
        if sums:  # before them stands the handlers' workspace
            x = operands[0]
            groups, columns = (math.prod(x.shape[a] for a in named) for named in (kept, axes))
            slots = [slot for slot in self.operands if slot.present(has)]
            widest = max(x.dtype.itemsize for slot, x in zip(slots, operands, strict=True) if slot.kind == "full")
            chunks = _chunks(groups, x.size // (groups * columns), columns, widest)
            first = kinds.index("sum")
            workspace = jax.ShapeDtypeStruct((sums, groups, chunks, columns), results[first].dtype)
            results.insert(first, workspace)
        attributes |= {f"has_{name}": name in has for name in self._optional}
        attributes["axes"] = axes
        for name in AXIS_PARAMETERS:
            if name in attributes:
                attributes[name] = np.int64(attributes[name])  # a scalar or an array
        out = self.ffi_call(results, *operands, **attributes)
        if sums:
            del out[first]
        return out

    def batch(self, operands, dims, *, has, **params):
        slots = [slot for slot in self.operands if slot.present(has)]
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        full = [d for slot, d in zip(slots, dims, strict=True) if slot.kind == "full" and d is not None]
        sums = any(slot.kind == "sum" and slot.present(has) for slot in self.results)
        position = full[0] if full else 0  # x's own mapped axis stays where it is
        if sums and self._trailing_sums:
            position = min(position, params["axes"][0])

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

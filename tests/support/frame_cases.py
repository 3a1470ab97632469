"""Calls to every handler, recorded from JAX, and malformed variants that XLA would never make."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops import _kernel
from jaxops.ops import _matmul_choice as choices
from support import contract, frames

#: Distinct sizes in the recorded calls, which `resized` replaces.
ROWS, LENGTH, COLUMNS = 5, 7, 11

LOGITS = ("softmax", "log_softmax")
NORMS = ("layer_norm", "rms_norm")


def _forward_and_backward(function, platform, dtype, operands, differentiated, **results):
    """The handlers' calls for a function, with operands given as (shape, dtype), and for its gradients."""

    def both(*xs):
        given, (cotangents, _) = xs[: len(operands)], xs[len(operands) :]
        first = list(given[:differentiated])
        out, pullback = jax.vjp(lambda *firsts: function(*firsts, *given[differentiated:]), *first)
        return out, pullback(cotangents)

    with contract.precision_of(dtype):
        avals = [jax.ShapeDtypeStruct(shape, d) for shape, d in operands]
        out = jax.eval_shape(function, *avals)
        return frames.record(both, *avals, out, 0.0, platform=platform, **results)


@functools.cache
def row_calls(op: str, dtype: str, options: bool, across: bool = False, platform: str = "cpu") -> list[frames.Call]:
    """A row op's forward and backward call, on x [ROWS, COLUMNS], or [ROWS, LENGTH, COLUMNS] normalised over LENGTH.

    options: with every optional operand and result.
    """
    shape, axis = ((ROWS, LENGTH, COLUMNS), 1) if across else ((ROWS, COLUMNS), -1)
    columns = (LENGTH, 1) if across else (COLUMNS,)
    wide = "float64" if dtype == "float64" else "float32"
    where = ((ROWS, 1, COLUMNS) if across else (1, COLUMNS), "bool")  # along rows, beyond whose edges nothing may count
    call = functools.partial(getattr(jaxops, op), axis=axis)
    x = (shape, dtype)
    if not options:
        parameters = 0 if op in LOGITS else {"layer_norm": 2, "rms_norm": 1}[op]
        vector = ((LENGTH if across else COLUMNS,), wide)
        return _forward_and_backward(call, platform, dtype, [x, *[vector] * parameters], 1 + parameters)
    if op in LOGITS:
        function = lambda x, bias, scale, where: call(x, where=where, bias=bias, scale=scale, causal=True)  # noqa: E731
        return _forward_and_backward(function, platform, dtype, [x, (columns, wide), ((), wide), where], 2)
    vectors = [((LENGTH if across else COLUMNS,), wide)] * 2
    if op == "rms_norm":
        function = lambda x, scale, residual: call(x, scale, residual=residual, dtype=dtype)  # noqa: E731
        return _forward_and_backward(function, platform, dtype, [x, vectors[0], x], 2)
    function = lambda x, scale, bias, residual, where: call(  # noqa: E731
        x, scale, bias, residual=residual, where=where, dtype=dtype
    )
    return _forward_and_backward(function, platform, dtype, [x, *vectors, x, where], 3)


def planned(call: frames.Call) -> tuple[Any, dict[str, Any]]:
    """A row op's kernel, and the keyword arguments with which it plans a call: as when it is traced."""
    kernel, attributes = _kernel.KERNELS[call.handler], dict(call.attributes)
    has = tuple(name[4:] for name in attributes if name.startswith("has_") and attributes[name] and name != "has_parts")
    has += tuple(slot.name for slot in kernel.results if slot.given)
    params = {name: value for name, value in attributes.items() if not name.startswith("has_") and name != "epsilon"}
    axes = tuple(int(a) for a in params.pop("axes"))
    first, last = call.operands[0], call.results[0]
    kept: tuple[int, ...] = ()
    if summed := [r for r in call.results[1:] if len(r.shape) == len(first.shape)]:
        grouped = (a for a, d in enumerate(last.shape) if a not in axes and d > 1)
        kept = tuple(a for a in grouped if summed[-1].shape[a] == first.shape[a])
    numbers = {name: int(value) for name, value in params.items()}
    return kernel, {"axes": axes, "kept": kept, "has": has, "dtype": last.dtype, **numbers}


def resized(
    call: frames.Call, rows: int, columns: int, length: int = LENGTH, chunks: int | None = None, split: bool = True
) -> frames.Call:
    """The call in `row_calls` with another size.

    chunks: in how many its sums over rows are taken; by default as many as such a call has. split: whether its rows are
    in parts if such a call's are.
    """
    sizes = {ROWS: rows, LENGTH: length, COLUMNS: columns}

    def buffers(given: Sequence[frames.Operand]) -> list[frames.Operand]:
        return [frames.Operand(tuple(sizes.get(d, d) for d in operand.shape), operand.code) for operand in given]

    operands, results = buffers(call.operands), buffers(call.results)
    for i in call.workspaces:
        sums, groups, _, summed = results[i].shape
        if chunks is None:
            kernel, arguments = planned(call.replace(operands=tuple(operands), results=tuple(results)))
            found = kernel._chunks(*operands, **arguments)
        else:
            found = chunks
        results[i] = frames.Operand((sums, groups, found, summed), results[i].code)
    attributes = dict(call.attributes)
    if split and "has_parts" in attributes:
        has = [name.removeprefix("has_") for name, value in attributes.items() if name.startswith("has_") and value]
        kernel = _kernel.KERNELS[call.handler]
        has += [slot.name for slot in kernel.results if slot.given]
        given = [buffer for i, buffer in enumerate(results) if i not in call.workspaces]
        parts = kernel.parts(operands, given, has=has, **attributes)
        attributes["has_parts"] = np.bool_(parts is not None)
        results += [frames.Operand.of(parts)] if parts is not None else []
    return call.replace(operands=tuple(operands), results=tuple(results), attributes=attributes)


def matmul_calls() -> list[frames.Call]:
    """A call for each kind: tiles and arithmetics, split k, copied operands, batches, activations."""
    f32, bf16, e4m3, e5m2 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2

    def product(a, b, *dtypes, **options):
        shapes = [jax.ShapeDtypeStruct(s, d) for s, d in zip((a, b), dtypes * 2, strict=False)]
        bias = [jax.ShapeDtypeStruct(b[-1:], f32)] if "activation" in options else []
        given = lambda a, b, *bias: jaxops.matmul(a, b, bias=bias[0] if bias else None, **options)  # noqa: E731
        return frames.record(given, *shapes, *bias, platform="cuda")

    def training(a, b):
        def loss(a, b, bias):
            return jnp.sum(jaxops.matmul(a, b, bias=bias, activation="gelu", precision="highest"))

        shapes = (jax.ShapeDtypeStruct(s, f32) for s in (a, b, b[-1:]))
        return frames.record(jax.grad(loss, (0, 1, 2)), *shapes, platform="cuda")

    calls = training((1030, 1024), (1024, 2048))
    calls += product((2047, 1025), (1025, 2049), f32, precision="highest")
    calls += product((2047, 1027), (1027, 2049), f32, activation="relu")
    calls += product((2049, 1025), (1025, 2047), bf16, activation="silu")
    calls += product((2047, 1025), (1025, 2048), bf16, preferred_element_type=f32)
    calls += product((2048, 1024), (1024, 2048), e4m3, e5m2, preferred_element_type=bf16)
    calls += product((33, 16384), (16384, 65), f32, precision="highest")
    calls += product((4, 515, 1025), (4, 1025, 513), f32, precision="highest")
    return calls


def matmul_call(
    name: str,
    tile: choices.Tile | choices.FewRowsTile | None,
    dtypes: tuple[int, int, int],
    size: tuple[int, int, int],
    *,
    transposed: tuple[bool, bool] = (False, False),
    splits: int = 1,
    partials: bool = False,
    shared: str | None = None,
    copies: tuple[int, int] | None = None,
) -> frames.Call:
    """A product with an arithmetic from choices.ARITHMETICS, by a tile, or by the kernels for every GPU if it is None.

    dtypes: codes for lhs, rhs and result; size: m, n, k. splits: the parts of k, which clusters of blocks sum, or a
    separate kernel if `partials`. shared: a name in choices.SHARED_OPERANDS. copies: for lhs and rhs; None: as many as
    the arithmetic needs.
    """
    arithmetic, (m, n, k) = choices.ARITHMETICS[name], size
    turned = isinstance(tile, choices.Tile) and tile.turned
    copies = copies or ((0, 0) if name == "16bit" or turned else (1, 2))  # others lie along k in a copy
    parts, depth = 3 if arithmetic.in_parts else 1, arithmetic.depth
    shapes = [shape[::-1] if swapped else shape for shape, swapped in zip(((m, k), (k, n)), transposed, strict=True)]
    results, scales = [frames.Operand((m, n), dtypes[2])], []
    for (rows, columns), how, code in zip(shapes, copies, dtypes, strict=False):
        rows, columns = (columns, rows) if how == 2 else (rows, columns)
        results += [frames.Operand((parts, rows, -(-columns // depth) * depth), code)] if how else []
        scales += [frames.Operand((1, -(-rows // depth), -(-columns // depth)), 11)]
    results += [frames.Operand((splits, 1, m, n), 11)] if partials else []
    results += [*scales, frames.Operand((3 + scales[0].shape[2],), 4)] if arithmetic.in_parts else []
    numbers = {
        "activation": 0,
        "triangle": 0,
        "tile_rows": choices.rows_in_calls(tile) if tile else 0,
        "tile_columns": tile.columns if tile else 0,
        "band": tile.band if isinstance(tile, choices.Tile) else 1,
        "shared": choices.SHARED_OPERANDS.index(shared),
        "splits": splits,
        "promote": 1 if arithmetic.promoted else 0,
        "lhs_copy": copies[0],
        "rhs_copy": copies[1],
    }
    flags = {
        "lhs_transposed": transposed[0],
        "rhs_transposed": transposed[1],
        "has_scale": False,
        "has_preactivation": False,
        "has_partials": partials,
        "ping_pong": tile is not None and tile.ping_pong,
        "in_parts": arithmetic.in_parts,
    }
    attributes = {key: np.int32(value) for key, value in numbers.items()}
    operands = tuple(frames.Operand(shape, code) for shape, code in zip(shapes, dtypes, strict=False))
    return frames.Call(
        "matmul", operands, tuple(results), attributes | {key: np.bool_(value) for key, value in flags.items()}
    )


#: The codes for lhs, rhs and result, for each arithmetic in choices.ARITHMETICS.
TILE_DTYPES = {
    "16bit": (16, 16, 16),
    "tf32": (11, 11, 11),
    "f32": (11, 11, 11),
    "f8": (20, 19, 16),
    "f8 fast": (19, 20, 11),
}


def tile_calls() -> Iterator[frames.Call]:
    """A product for every arithmetic and tile, with two blocks a tile if clusters can sum their parts, and with two
    blocks that share an operand."""
    for name, dtypes in TILE_DTYPES.items():
        for tile, splits, odd in itertools.product(choices.TILES[name], (1, 2), (False, True)):
            if splits > tile.parts or (odd and not (tile.turned or tile.stores_any_rows)):
                continue
            size = (300, 520 - odd, 1000)
            # 16-bit operands, and an f32 rhs along n, are copied if their rows are not aligned. Turned tiles leave
            # results with such rows to the kernel for every GPU.
            copies = (0, int(odd)) if name == "16bit" or tile.turned else None
            for shared in choices.SHARED_OPERANDS if name == "16bit" and splits == 1 else (None,):
                yield matmul_call(name, tile, dtypes, size, splits=splits, shared=shared, copies=copies)
            if name == "16bit" and odd:  # rows aligned to 4 bytes, and to 8
                for n, k in ((518, 998), (516, 1004)):
                    yield matmul_call(name, tile, dtypes, (size[0], n, k), splits=splits, copies=(0, 0))
    for tile in choices.FEW_ROWS_TILES:
        for n, k in ((520, 1000), (300 * tile.columns - 8, 200)):  # few tiles, and more than blocks run at once
            size = (tile.rows - 3, n, k)
            yield matmul_call("16bit", tile, TILE_DTYPES["16bit"], size, transposed=(False, tile.rhs_transposed))


def gated_call(code: int, size: tuple[int, int, int], *, products: bool = False) -> frames.Call:
    """A gated MLP's forward call. size: m, n, k. products: they are results, too."""
    m, n, k = size
    x, weight, result = (frames.Operand(shape, code) for shape in ((m, k), (k, n), (m, n)))
    attributes = {"activation": np.int32(4), "has_products": np.bool_(products), "band": np.int32(2)}
    return frames.Call("gated_matmul", (x, weight, weight), (result,) * (3 if products else 1), attributes)


def gated_backward_call(code: int, size: tuple[int, int, int]) -> frames.Call:
    """Its backward call. size: m, n, and k, w_down's columns."""
    m, n, k = size
    dy, w_down, full = (frames.Operand(shape, code) for shape in ((m, k), (n, k), (m, n)))
    attributes = {"activation": np.int32(2), "band": np.int32(2)}
    return frames.Call("gated_matmul_bwd", (dy, w_down, full, full), (full, full), attributes)


def gated_calls() -> Iterator[frames.Call]:
    """For a part of a tile, and for more tiles than blocks run at once; by the kernels for every GPU, too."""
    for code, size in itertools.product((16, 10), ((72, 40, 72), (1032, 1992, 200), (45, 33, 27))):
        yield from (gated_call(code, size, products=products) for products in (False, True))
        yield gated_backward_call(code, size)


def linear_call(
    code: int, transposed: bool, has: Sequence[str] = (), size: tuple[int, int, int] = (300, 1000, 200)
) -> frames.Call:
    """A call of the linear cross entropy's forward pass on [tokens, columns, width]. has: "bias", "cap", "sum"."""
    (m, n, k), f32 = size, 11
    row = frames.Operand((m,), f32)
    operands = [frames.Operand((m, k), code), frames.Operand((n, k) if transposed else (k, n), code)]
    operands += [frames.Operand((m,), 4), *([frames.Operand((n,), code)] if "bias" in has else [])]
    tiles = -(-n // choices.LINEAR_LOSS_TILE.columns)
    summaries = frames.Operand((3 if "sum" in has else 2, tiles, m), f32)
    attributes = {
        "transposed": np.bool_(transposed),
        "columns": np.int64(n),
        "has_bias": np.bool_("bias" in has),
        "has_sum": np.bool_("sum" in has),
        "cap": np.float64(5 if "cap" in has else 0),
        "band": np.int32(2),
    }
    results = [row] * (4 if "sum" in has else 3)
    return frames.Call("linear_cross_entropy_fwd", tuple(operands), (*results, summaries), attributes)


def linear_calls() -> Iterator[frames.Call]:
    """On Hopper's kernel, and with sizes that only the general one takes."""
    for code, transposed, has in itertools.product((16, 10), (False, True), ((), ("bias", "cap", "sum"))):
        for size in ((300, 1000, 200), (257, 1001, 203)):
            yield linear_call(code, transposed, has, size)


# --- calls that XLA never sends ---


def _buffer_changes(index: int, operand: frames.Operand) -> Iterator[tuple[str, frames.Operand]]:
    shape = operand.shape
    for axis, size in enumerate(shape):
        for changed in (size - 1, size + 1, -1, 2**62):
            yield (
                f"size {changed} of axis {axis}",
                frames.Operand((*shape[:axis], changed, *shape[axis + 1 :]), operand.code),
            )
    for ranked in (shape[1:], (1, *shape), (*shape, 1), ()):
        if ranked != shape:
            yield f"shape {ranked}", frames.Operand(ranked, operand.code)
    for code in (*range(34), 63):
        if code != operand.code:
            yield f"dtype {code}", frames.Operand(shape, code)
    if operand.bytes:
        yield "no memory", frames.Operand(shape, operand.code, "null")
    if operand.dtype.itemsize > 1:
        yield "misaligned", frames.Operand(shape, operand.code, "odd")


_WRONG_TYPES = (np.bool_(True), np.int32(1), np.int64(1), 1.5, "text", np.zeros(2, np.int32), np.zeros(2, np.int64))


def _wrong_values(name: str, value, rank: int) -> list:
    """Values that have an attribute's type but that no call has."""
    axes = lambda *values: np.array(values, np.int64)  # noqa: E731
    int32 = lambda *values: [np.int32(v) for v in values]  # noqa: E731
    return {
        "axes": [axes(rank), axes(-1), axes(*value, value[0]), axes(2**62), axes(-(2**63)), axes(*range(rank + 1))]
        if name == "axes"
        else [],
        "query_axis": [np.int64(v) for v in (rank, 2**62)],
        "columns": [np.int64(v) for v in (-1, int(value) + 1, 2**62)] if name == "columns" else [],
        "activation": int32(-1, 5, 2**31 - 1, -(2**31)),
        "triangle": int32(-1, 3, 2**31 - 1),
        "band": int32(0, -1, 65, 2**31 - 1),
        "shared": int32(-1, 3, 2**31 - 1),
        "splits": int32(0, -1, -(2**31)),
        "promote": int32(-1, -(2**31)),
        "tile_rows": int32(-1, -(2**31), *([0] if value else [])),
        "tile_columns": int32(-1, -(2**31), *([0] if value else [])),
        "lhs_copy": int32(-1, 3, 2**31 - 1),
        "rhs_copy": int32(-1, 3, 2**31 - 1),
    }.get(name, [])


def malformed(call: frames.Call) -> Iterator[tuple[str, frames.Call]]:
    """The call with one thing wrong, and a description."""
    for field in ("operands", "results"):
        buffers = getattr(call, field)
        for i, buffer in enumerate(buffers):
            if call.handler != "matmul" or field == "results" or i < 2:  # there may be no bias
                yield f"{field[:-1]} {i} missing", call.replace(**{field: (*buffers[:i], *buffers[i + 1 :])})
            for what, changed in _buffer_changes(i, buffer):
                if i in call.workspaces and field == "results" and call.handler != "matmul":
                    # Into how many partial sums the rows are divided is the caller's, and into how many parts each is.
                    axis = 0 if len(buffer.shape) == 3 else len(buffer.shape) - 2
                    chunks = buffer.shape[axis]
                    if what in (f"size {n} of axis {axis}" for n in (chunks - 1, chunks + 1) if n > 0):
                        continue
                yield f"{field[:-1]} {i}: {what}", call.replace(**{field: (*buffers[:i], changed, *buffers[i + 1 :])})
        yield f"one of the {field} too many", call.replace(**{field: (*buffers, buffers[-1])})
        yield f"no {field}", call.replace(**{field: ()})
    attributes = dict(call.attributes)
    rank = len(call.operands[0].shape)
    for name, value in attributes.items():
        rest = {n: v for n, v in attributes.items() if n != name}
        yield f"{name} missing", call.replace(attributes=rest)
        yield f"{name} under another name", call.replace(attributes=rest | {name + "_": value})
        own = np.asarray(value)
        for wrong in _WRONG_TYPES:
            other = np.asarray(wrong)
            if isinstance(wrong, str) or other.dtype != own.dtype or other.ndim != own.ndim:
                yield f"{name} is {wrong!r}", call.replace(attributes=attributes | {name: wrong})
        for wrong in _wrong_values(name, value, rank):
            yield f"{name} is {wrong!r}", call.replace(attributes=attributes | {name: wrong})
        if name.startswith("has_") and (call.handler, name) != ("matmul", "has_scale"):  # a bias could be a scale
            yield f"{name} is {not value}", call.replace(attributes=attributes | {name: np.bool_(not value)})
    if attributes.get("in_parts"):
        for name in ("lhs_copy", "rhs_copy"):
            yield f"{name} lies the other way", call.replace(attributes=attributes | {name: 3 - attributes[name]})
    yield "an attribute too many", call.replace(attributes=attributes | {"more": np.int32(0)})
    if call.attributes.get("query_axis", -1) >= 0:
        query = call.attributes["query_axis"]
        for key in (-1, rank, query, 2**62):
            yield f"key_axis is {key}", call.replace(attributes=attributes | {"key_axis": np.int64(key)})

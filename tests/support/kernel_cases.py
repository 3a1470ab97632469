"""Call frames that reach every kernel of the CUDA half: dtypes, options and layouts, made without tracing anything.

tests/kernel_survey.py finds out which kernels they launch, and on how few rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxops import _kernel
from jaxops.ops import _attention_support as attention
from jaxops.ops import _matmul_choice as choices
from support import frames
from support.frame_cases import matmul_call
from support.ops import ROW_OPS
from support.row_cases import COLUMNS_ONCE

CODES = {"f32": 11, "bf16": 16, "f16": 10, "f64": 12}

#: The dtypes of an input and the result between which kernels exist: see `kernel_dtypes` in jaxops/_rows.py.
PAIRS = [(t, t) for t in CODES] + [("bf16", "f32"), ("f32", "bf16"), ("f16", "f32"), ("f32", "f16")]

#: At most so many elements and rows: enough for every block of a GPU to take several rows.
_ELEMENTS, _ROWS = 1 << 25, 1 << 19


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls that differ in their number of rows. path: the part of a kernel that they run, if not all of it.

    make: the call on a number of rows, from `least` to `most`.
    """

    make: Callable[[int], frames.Call]
    least: int = 4
    most: int = 4
    path: str = ""


def row_call(
    handler: str, pair: tuple[str, str], shape: Sequence[int], axes: Sequence[int], has: dict[str, Any], chunks: int = 8
) -> frames.Call:
    """A call of a row op, normalised over axes of x.

    has: the optional operands and results by name, with details. "scale", "bias", "where": the axes along
    which the operand has size 1. "dscale", "dbias": the axes of rows over which sums are not taken. "parts": how
    many. "causal", "masked", "residual", "dsum", "max": anything.
    """
    t, u = (CODES[name] for name in pair)
    wide = CODES["f64" if pair[0] == "f64" else "f32"]
    backward, logits = handler.endswith("_bwd"), "softmax" in handler
    row = tuple(1 if a in axes else d for a, d in enumerate(shape))

    def full(code: int) -> frames.Operand:
        return frames.Operand(tuple(shape), code)

    def broadcast(name: str, code: int) -> list[frames.Operand]:
        sizes = tuple(1 if a in has.get(name, ()) else d for a, d in enumerate(shape))
        return [frames.Operand(sizes, code)] if name in has else []

    def optional(name: str, code: int) -> list[frames.Operand]:
        return [full(code)] if name in has else []

    of_row = frames.Operand(row, wide)
    statistics = {"softmax": 0, "log_softmax": 2, "layer_norm": 2, "rms_norm": 1}[handler[:-4]]
    attributes: dict[str, Any] = {"axes": np.array(axes, np.int64)}
    operands = [full(t), *(optional("residual", t) if not logits else [])]
    operands += broadcast("scale", wide) + broadcast("bias", wide) + broadcast("where", 1)
    results = [full(u if not backward or handler == "softmax_bwd" else t)]
    if backward:
        operands += [of_row] * statistics + [full(t if handler == "softmax_bwd" else u)] + optional("dsum", t)
    elif not logits:
        results += optional("residual", t) + [of_row] * statistics
    elif "max" in has:
        results += [of_row] * statistics
    sums = [name for name in ("dscale", "dbias") if name in has]
    if sums:
        kept = has[sums[0]]
        summed = frames.Operand(tuple(d if a in axes or a in kept else 1 for a, d in enumerate(shape)), wide)
        groups, columns = (math.prod(shape[a] for a in named) for named in (kept, axes))
        results += [frames.Operand((len(sums), groups, chunks, columns), wide), *[summed] * len(sums)]
    names = ["scale", "where", "parts"]
    if "parts" in has:
        values = _kernel.KERNELS[handler].joined
        results += [frames.Operand((has["parts"], values, math.prod(row)), wide)]
    if logits:
        causal = has.get("causal", (-1, -1))
        attributes |= {"query_axis": np.int64(causal[0]), "key_axis": np.int64(causal[1])}
        names += ["bias", *(["max"] if handler == "log_softmax_fwd" else [])]
        if backward:
            attributes["masked"] = np.bool_("masked" in has)
    else:
        names += ["dsum", "dscale", "dbias"] if backward else ["residual", "bias"]
        attributes |= {} if backward else {"epsilon": 1e-5}
    attributes |= {f"has_{name}": np.bool_(name in has) for name in names}
    return frames.Call(handler, tuple(operands), tuple(results), attributes)


def _options(handler: str, rows: Sequence[int], columns: Sequence[int]) -> list[dict[str, Any]]:
    """What `row_call` may be given of a handler: operands that lie in packs as x does, and such that do not.

    rows, columns: the axes of x. A kernel reads operands in packs if they change along the columns. Operands that are
    the same along them take the kernels for any layout.
    """
    shared, alike, each = tuple(rows), tuple(columns), ()
    return {
        "softmax_fwd": [{}, {"scale": alike, "where": each}, {"bias": shared}, {"bias": shared, "where": alike}],
        "softmax_bwd": [{}, {"scale": alike, "masked": True}],
        "log_softmax_fwd": [
            {"max": True},
            {"scale": alike, "where": each, "max": True},
            {"bias": shared},
            {"bias": shared, "where": alike},
        ],
        "log_softmax_bwd": [
            {},
            {"bias": shared, "where": each},
            {"bias": shared, "where": alike},
        ],
        "layer_norm_fwd": [
            {"scale": shared, "bias": shared},
            {"scale": alike, "residual": True},
            {"scale": shared, "bias": shared, "where": each, "residual": True},
            {"where": alike},
        ],
        "layer_norm_bwd": [
            {"scale": shared, "dsum": True},
            {"scale": alike},
            {"scale": shared, "where": each, "dscale": (), "dbias": ()},
            {"where": alike},
            {"scale": each, "dscale": (), "dbias": ()},
            {"scale": shared, "dscale": (), "dbias": ()},
            {"scale": shared, "dscale": (), "dbias": (), "dsum": True},
            {"scale": alike, "dscale": (), "dbias": ()},
        ],
        "rms_norm_fwd": [{"scale": shared}, {"scale": alike, "residual": True}],
        "rms_norm_bwd": [
            {"scale": shared, "dsum": True},
            {"scale": alike},
            {"scale": each, "dscale": ()},
            {"scale": shared, "dscale": ()},
            {"scale": shared, "dscale": (), "dsum": True},
            {"scale": alike, "dscale": ()},
        ],
    }[handler]


HANDLERS = tuple(f"{op}_{way}" for op in ROW_OPS for way in ("fwd", "bwd"))

#: Lengths of rows of adjacent elements, with short ones of half packs and of single elements, and with the shortest and
#: the longest lengths that few tables have places for.
_COLUMNS = (*COLUMNS_ONCE, 12, 13, 28, 29, 55, 60, 524296)
#: Lengths of rows whose elements lie apart, and how many rows lie side by side: packs of four rows, or not.
_ACROSS = [(length, inner) for length in (3, 9, *(2**k for k in range(6, 15)), 65536) for inner in (32, 33)]
#: Rows of two column axes, the last one of so many elements.
_TWO_AXES = (33, 48, 501, 512, 4001, 4096)


def _sums(has: dict[str, Any]) -> tuple[int, ...]:
    """In how many chunks sums are taken: few make few blocks; unaligned rows take some kernels in eight only."""
    return (2, 8) if "dscale" in has or "dbias" in has else (0,)


def row_cases() -> Iterator[Case]:
    """Calls of the row ops."""
    for handler, pair in itertools.product(HANDLERS, PAIRS):

        def case(shape_of, axes, has, chunks, columns, *, grows=False, path="", handler=handler, pair=pair) -> Case:
            least = 4 if columns < 10000 else 2
            # As many rows as let every block of a GPU, or of the sums' chunks, take several at a time.
            several = chunks * 6 * (32 if columns <= 512 else 8) if chunks else _ROWS
            most = max(min(several, _ELEMENTS // columns), least) if grows else least
            return Case(lambda rows: row_call(handler, pair, shape_of(rows), axes, has, chunks), least, most, path)

        for has in _options(handler, (0,), (1,)):
            for columns, chunks in itertools.product(_COLUMNS, _sums(has)):
                yield case(lambda rows, n=columns: (rows, n), (1,), has, chunks, columns, grows=True)
            for columns in (40, 41) if "dscale" in has or "dbias" in has else ():  # sums over few rows
                yield case(lambda rows, n=columns: (rows, n), (1,), has, 1, columns)
        has, *_ = _options(handler, (0, 2), (1,))
        for length, inner in ((700, 32), (2100, 68), (2100, 3)):
            yield case(lambda _, n=length, i=inner: (2, n, i), (1,), has | {"parts": 3}, 1, length, path="parts")
        has, *_ = _options(handler, (0,), (1,))
        for columns in (12288, 12289):
            yield case(lambda _, n=columns: (2, n), (1,), has | {"parts": 3}, 1, columns, path="parts")
        has, *_ = _options(handler, (1,), (0, 2))
        yield case(lambda _: (100, 2, 91), (0, 2), has | {"parts": 3}, 1, 9100, path="parts")
        for has in _options(handler, (0, 2), (1,)):
            for (length, inner), chunks in itertools.product(_ACROSS, _sums(has)[:1]):
                yield case(lambda _, n=length, i=inner: (2, n, i), (1,), has, chunks, length)
        for has in _options(handler, (0, 2), (1, 3)):
            for last, chunks in itertools.product(_TWO_AXES, _sums(has)):
                yield case(lambda rows, n=last: (1, 2, rows, n), (1, 3), has, chunks, 2 * last, grows=chunks > 0)
        for has in _options(handler, (0, 2, 4), (1, 3)):
            for (last, inner), chunks in itertools.product([(33, 32), (33, 33), (600, 32), (600, 33)], _sums(has)[:1]):
                yield case(lambda _, n=last, i=inner: (1, 2, 2, n, i), (1, 3), has, chunks, 2 * last)
        if pair in (("f32", "f32"), ("bf16", "bf16")):
            for has in _options(handler, (1,), (2,)):
                grouped = has | {name: (0,) for name in ("dscale", "dbias") if name in has}
                for columns in (64, 127, 1000, 4096) if grouped != has else ():
                    yield case(lambda _, n=columns: (16, 24, n), (2,), grouped, 1, columns, path="groups")
        if handler in ("softmax_fwd", "log_softmax_bwd"):
            for has in _options(handler, (0,), (1,))[1:3]:
                yield case(lambda _: (300, 256), (1,), has | {"causal": (0, 1)}, 0, 256, path="causal")


def matmul_cases() -> Iterator[Case]:
    """Calls of matmul, of more tiles than a GPU has multiprocessors where blocks take several, and of its backward."""
    tiles = [(name, tile) for name, found in choices.TILES.items() for tile in found]
    operands = {
        "16bit": [(16, 16, 16), (10, 10, 10)],
        "tf32": [(11, 11, 11)],
        "f32": [(11, 11, 11)],
        "f8": [(a, b, 16) for a, b in itertools.product((19, 20), repeat=2)],
        "f8 fast": [(a, b, 11) for a, b in itertools.product((19, 20), repeat=2)],
    }

    def fixed(*args, path="", **options) -> Case:
        return Case(lambda _: matmul_call(*args, **options), path=path)

    for name, tile in tiles:
        m, n = 11 * tile.rows - 8, 30 * tile.columns - 8
        for dtypes in operands[name]:
            for transposed in itertools.product((False, True), repeat=2) if name == "16bit" else [(False, False)]:
                yield fixed(name, tile, dtypes, (m, n, 256), transposed=transposed)
                if name == "16bit" and tile.stores_any_rows:
                    yield fixed(
                        name, tile, dtypes, (298, 518, 250), transposed=transposed, copies=(0, 0), path="pieces"
                    )
                if tile.parts > 1:
                    yield fixed(name, tile, dtypes, (296, 520, 512), transposed=transposed, splits=2, path="split")
            if tile.stores_any_rows and not tile.turned:
                copies = (0, 1) if name == "16bit" else None
                yield fixed(name, tile, dtypes, (300, 519, 512), copies=copies, path="any rows")
        if tile == choices.TILES[name][0]:
            for dtypes in operands[name]:
                yield fixed(name, tile, dtypes, (32, 64, 2048), splits=4, partials=True, path="parts")
                if name != "f32":
                    wide = (*dtypes[:2], 11)
                    yield fixed(name, tile, wide, (32, 64, 2048), splits=4, partials=True, path="parts")
    for tile, dtypes in itertools.product(choices.FEW_ROWS_TILES, ((16, 16, 16), (10, 10, 10), (16, 16, 11))):
        size = (tile.rows, 150 * tile.columns - 8, 264)
        yield fixed("16bit", tile, dtypes, size, transposed=(False, tile.rhs_transposed), path="few rows")
    yield fixed("16bit", choices.TILES["16bit"][1], (16, 16, 16), (65, 127, 129), path="copy", copies=(1, 1))
    general = [(16, 16, 16), (16, 16, 11), (10, 10, 10), (10, 10, 11), (11, 11, 11)]
    for dtypes, transposed in itertools.product(general, itertools.product((False, True), repeat=2)):
        for size in ((296, 264, 200), (299, 263, 201)):
            yield fixed("16bit", None, dtypes, size, transposed=transposed, copies=(0, 0))
    for dtype, columns, dbias in itertools.product(("f32", "bf16", "f16"), (264, 263), (False, True)):
        yield Case(lambda _, code=CODES[dtype], n=columns, dbias=dbias: epilogue_call(code, (2, 300, n), dbias))


def epilogue_call(code: int, shape: tuple[int, int, int], dbias: bool) -> frames.Call:
    """A call of matmul's backward epilogue."""
    full, (groups, _, columns) = frames.Operand(shape, code), shape
    sums = [frames.Operand((groups, 4, columns), 11), frames.Operand((groups, columns), 11)] if dbias else []
    attributes = {"activation": np.int32(2), "has_dz": np.bool_(True), "has_dbias": np.bool_(dbias)}
    return frames.Call("epilogue_bwd", (full, full), (full, *sums), attributes)


def attention_call(
    handler: str, code: int, depth: int, has: Sequence[str] = (), tokens: tuple[int, int] = (328, 392)
) -> frames.Call:
    """A call of attention. has: optional operands by name, with "segments", "dbias", "causal", "cap"."""
    batch, (queries, keys), heads, groups, wide, int32 = 2, tokens, 4, 2, 11, 4
    of_query, of_key = (batch, queries, heads, depth), (batch, keys, groups, depth)
    lse = frames.Operand((batch, heads, queries), wide)
    query, key = frames.Operand(of_query, code), frames.Operand(of_key, code)
    backward = handler == "attention_bwd"
    optional = {
        "bias": [((batch, heads, queries, keys), code)],
        "mask": [((1, 1, queries, keys), 1)],
        "query_lengths": [((batch,), int32)],
        "key_value_lengths": [((batch,), int32)],
        "segments": [((batch, queries), int32), ((batch, keys), int32)],
        "sinks": [((1, heads), wide)],
        "query_offset": [((1,), int32)],
    }
    operands = [query, key, key, *([query, lse, query] if backward else [])]
    operands += [frames.Operand(*operand) for name, found in optional.items() if name in has for operand in found]
    results = [query, key, key] if backward else [query, lse]
    results += [frames.Operand((batch, heads, queries, keys), wide)] if "dbias" in has else []
    lines = batch if "segments" in has else int("mask" in has)
    if backward:
        words = attention.backward_workspace(batch, heads, queries, keys, depth, lines)
    else:
        words = attention.forward_workspace(batch, queries, keys, groups, heads // groups, depth, lines)
    attributes = {
        "scale": np.float32(depth**-0.5),
        "causal": np.bool_("causal" in has),
        **{name: np.int64(value) for name, value in (("causal_offset", 0), ("window_left", -1), ("window_right", -1))},
        "soft_cap": np.float32(5 if "cap" in has else 0),
        **{f"has_{name}": np.bool_(name in has) for name in optional},
        **({"has_dlse": np.bool_(False), "wants_dbias": np.bool_("dbias" in has)} if backward else {}),
    }
    return frames.Call(handler, tuple(operands), (*results, frames.Operand((words,), int32)), attributes)


def attention_cases() -> Iterator[Case]:
    """Calls of attention: of every tile, with general scores and without, and of few queries."""
    for handler, name, depth in itertools.product(
        ("attention_fwd", "attention_bwd"), ("bf16", "f16"), (64, 128, 192, 256)
    ):
        code = CODES[name]
        bias = ("bias", *(["dbias"] if handler == "attention_bwd" else []))
        for has in ((), ("causal", "mask"), ("segments", "sinks"), ("causal", "cap", *bias), ("key_value_lengths",)):
            yield Case(lambda _, h=handler, c=code, d=depth, o=has: attention_call(h, c, d, o), path=" ".join(has))
        if handler == "attention_fwd":
            few = functools.partial(attention_call, handler, code, depth, ("key_value_lengths",), (3, 1000))
            yield Case(lambda _, few=few: few(), path="few queries")
            if depth == 64:
                many = functools.partial(attention_call, handler, code, depth, (), (2056, 392))
                yield Case(lambda _, many=many: many(), path="many queries")


def every_case() -> list[Case]:
    return [*matmul_cases(), *attention_cases(), *row_cases()]

"""Call frames for every plan of every row kernel, for every matmul and attention tile, gated MLPs and linear losses.

`python tests/plan_cases.py --part 3 --parts 30` makes the calls on a GPU, split evenly: for tools/sanitize_gpu.py. A
row's plan (ffi/rows/plan.h) says which kernel a call launches, so that one call for each plan is enough.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from support import frames
from support.frame_cases import gated_calls, linear_calls, matmul_call, planned
from support.ops import CASES, ROW_OPS
from support.row_cases import COLUMNS_ONCE

from jaxops import _kernel
from jaxops.ops import _attention_support as attention
from jaxops.ops import _matmul_choice as choices

CODES = {"f32": 11, "bf16": 16, "f16": 10, "f64": 12}

#: The pairs of input and result dtypes that have kernels: see `kernel_dtypes` in jaxops/_rows.py.
PAIRS = [(t, t) for t in CODES] + [("bf16", "f32"), ("f32", "bf16"), ("f16", "f32"), ("f32", "f16")]


def row_call(
    handler: str, pair: tuple[str, str], shape: Sequence[int], axes: Sequence[int], has: dict[str, Any], chunks: int = 8
) -> frames.Call:
    """A call of a row op, normalised over some axes of x.

    has: the optional operands and results by name, with their unusual properties. "scale", "bias", "where": the axes
    along which the operand has size 1. "dscale", "dbias": the row axes over which sums are not taken. "parts": how
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
    """The options with which `row_call` may call a handler: operands that lie in packs as x does, and operands that do
    not.

    rows, columns: x's axes. A kernel reads operands in packs if they change along the columns. Operands that are the
    same along them take the kernels for any layout.
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


HANDLERS = tuple(f"{op}_{way}" for op in ROW_OPS if CASES[op].family != "rows" for way in ("fwd", "bwd"))

#: Lengths for rows with adjacent elements: short ones with half packs and single elements, and the shortest and longest
#: that fit few tables.
_COLUMNS = (*COLUMNS_ONCE, 12, 13, 28, 29, 55, 60, 524296)
#: Lengths for rows whose elements lie apart, and how many rows lie side by side: in packs of four, or not.
_ACROSS = [(length, inner) for length in (3, 9, *(2**k for k in range(6, 15)), 65536) for inner in (32, 33)]
#: Rows with two column axes, the last one with so many elements.
_TWO_AXES = (33, 48, 501, 512, 4001, 4096)


def row_calls() -> Iterator[frames.Call]:
    """Row ops on few rows: all pairs of dtypes, options that lie as x does and others, several axes."""
    for handler, pair in itertools.product(HANDLERS, PAIRS):

        def call(shape, axes, has, chunks=0, handler=handler, pair=pair) -> frames.Call:
            return row_call(handler, pair, shape, axes, has, chunks)

        def sums(has) -> tuple[int, ...]:
            return (2,) if "dscale" in has or "dbias" in has else (0,)

        for has in _options(handler, (0,), (1,)):
            for columns, chunks in itertools.product(_COLUMNS, sums(has)):
                yield call((4 if columns < 10000 else 2, columns), (1,), has, chunks)
            for columns in (40, 41) if sums(has)[0] else ():  # sums over few rows
                yield call((4, columns), (1,), has, 1)
        has, *_ = _options(handler, (0, 2), (1,))
        for length, inner in ((700, 32), (2100, 68), (2100, 3)):
            yield call((2, length, inner), (1,), has | {"parts": 3}, 1)
        has, *_ = _options(handler, (0,), (1,))
        for columns in (12288, 12289):
            yield call((2, columns), (1,), has | {"parts": 3}, 1)
        has, *_ = _options(handler, (1,), (0, 2))
        yield call((100, 2, 91), (0, 2), has | {"parts": 3}, 1)
        for has in _options(handler, (0, 2), (1,)):
            for (length, inner), chunks in itertools.product(_ACROSS, sums(has)):
                yield call((2, length, inner), (1,), has, chunks)
        for has in _options(handler, (0, 2), (1, 3)):
            for last, chunks in itertools.product(_TWO_AXES, sums(has)):
                yield call((1, 2, 4, last), (1, 3), has, chunks)
        for has in _options(handler, (0, 2, 4), (1, 3)):
            for (last, inner), chunks in itertools.product([(33, 32), (33, 33), (600, 32), (600, 33)], sums(has)):
                yield call((1, 2, 2, last, inner), (1, 3), has, chunks)
        if pair in (("f32", "f32"), ("bf16", "bf16")):
            for has in _options(handler, (1,), (2,)):
                grouped = has | {name: (0,) for name in ("dscale", "dbias") if name in has}
                for columns in (64, 127, 1000, 4096) if grouped != has else ():
                    yield call((16, 24, columns), (2,), grouped, 1)
        if handler in ("softmax_fwd", "log_softmax_bwd"):
            for has in _options(handler, (0,), (1,))[1:3]:
                yield call((300, 256), (1,), has | {"causal": (0, 1)}, 0)


def plan_of(call: frames.Call) -> tuple[str, ...]:
    """The key that distinguishes a row call's kernels: its handler, dtypes, options and plan."""
    kernel, arguments = planned(call)
    first, last = call.operands[0], call.results[0]
    avals = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in call.operands]
    plan = kernel.plan(*avals, **arguments)
    has = arguments["has"]
    numbers = {name: value for name, value in arguments.items() if name not in ("axes", "kept", "has", "dtype")}
    dtypes = sorted({str(b.dtype) for b in (first, last)})
    kind = "any" if len(dtypes) > 1 or plan["any_dtype"] else dtypes[0]
    split = "parts" if call.attributes.get("has_parts") else ""
    # Threads and blocks are numbers that a kernel is told: any will do.
    of_kernel = (plan["kernel"], plan["packs"], plan["elements"], plan["layout"], plan["cluster"] > 1)
    return (call.handler, kind, " ".join(sorted(has)), str(numbers), *map(str, of_kernel), split)


def distinct_calls() -> list[frames.Call]:
    """One call for each row kernel, plan and set of options, on as few rows as `row_calls` has."""
    found: dict[tuple[str, ...], frames.Call] = {}
    for call in row_calls():
        found.setdefault(plan_of(call), call)
    return [*found.values()]


def matmul_calls() -> Iterator[frames.Call]:
    """Matmul calls, with more tiles than a GPU has multiprocessors if blocks take several, and its backward calls."""
    tiles = [(name, tile) for name, found in choices.TILES.items() for tile in found]
    operands = {
        "16bit": [(16, 16, 16), (10, 10, 10)],
        "tf32": [(11, 11, 11)],
        "f32": [(11, 11, 11)],
        "f8": [(a, b, 16) for a, b in itertools.product((19, 20), repeat=2)],
        "f8 fast": [(a, b, 11) for a, b in itertools.product((19, 20), repeat=2)],
    }

    fixed = matmul_call

    for name, tile in tiles:
        m, n = 11 * tile.rows - 8, 30 * tile.columns - 8
        for dtypes in operands[name]:
            for transposed in itertools.product((False, True), repeat=2) if name == "16bit" else [(False, False)]:
                yield fixed(name, tile, dtypes, (m, n, 256), transposed=transposed)
                if name == "16bit" and tile.stores_any_rows:
                    yield fixed(name, tile, dtypes, (298, 518, 250), transposed=transposed, copies=(0, 0))
                if tile.parts > 1:
                    yield fixed(name, tile, dtypes, (296, 520, 512), transposed=transposed, splits=2)
            if tile.stores_any_rows and not tile.turned:
                copies = (0, 1) if name == "16bit" else None
                yield fixed(name, tile, dtypes, (300, 519, 512), copies=copies)
        if tile == choices.TILES[name][0]:
            for dtypes in operands[name]:
                yield fixed(name, tile, dtypes, (32, 64, 2048), splits=4, partials=True)
                if name != "f32":
                    wide = (*dtypes[:2], 11)
                    yield fixed(name, tile, wide, (32, 64, 2048), splits=4, partials=True)
    for tile, dtypes in itertools.product(choices.FEW_ROWS_TILES, ((16, 16, 16), (10, 10, 10), (16, 16, 11))):
        size = (tile.rows, 150 * tile.columns - 8, 264)
        yield fixed("16bit", tile, dtypes, size, transposed=(False, tile.rhs_transposed))
    yield fixed("16bit", choices.TILES["16bit"][1], (16, 16, 16), (65, 127, 129), copies=(1, 1))
    general = [(16, 16, 16), (16, 16, 11), (10, 10, 10), (10, 10, 11), (11, 11, 11)]
    for dtypes, transposed in itertools.product(general, itertools.product((False, True), repeat=2)):
        for size in ((296, 264, 200), (299, 263, 201)):
            yield fixed("16bit", None, dtypes, size, transposed=transposed, copies=(0, 0))
    for dtype, columns, dbias in itertools.product(("f32", "bf16", "f16"), (264, 263), (False, True)):
        yield epilogue_call(CODES[dtype], (2, 300, columns), dbias)


def epilogue_call(code: int, shape: tuple[int, int, int], dbias: bool) -> frames.Call:
    """A call of matmul's backward epilogue."""
    full, (groups, _, columns) = frames.Operand(shape, code), shape
    sums = [frames.Operand((groups, 4, columns), 11), frames.Operand((groups, columns), 11)] if dbias else []
    attributes = {"activation": np.int32(2), "has_dz": np.bool_(True), "has_dbias": np.bool_(dbias)}
    return frames.Call("epilogue_bwd", (full, full), (full, *sums), attributes)


def attention_call(
    handler: str, code: int, depth: int, has: Sequence[str] = (), tokens: tuple[int, int] = (328, 392)
) -> frames.Call:
    """An attention call. has: optional operands by name, with "segments", "dbias", "rounded", "causal", "cap"."""
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
        "parts": [((batch, heads, queries), wide)] * 2,  # of lse: results of the forward pass
    }
    parts = [frames.Operand(*part) for part in optional["parts"] if "bias" in has]
    has = (*has, *(["parts"] if parts else []))
    operands = [query, key, key, *([query, lse, query] if backward else [])]
    taken = [name for name in optional if name in has and (backward or name != "parts")]
    operands += [frames.Operand(*operand) for name in taken for operand in optional[name]]
    results = [query, key, key] if backward else [query, lse, *parts]
    dbias = frames.Operand((batch, heads, queries, keys), code if "rounded" in has else wide)
    results += [dbias] if "dbias" in has else []
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
        "unseen_mean": np.bool_(
            bool({"mask", "bias", "key_value_lengths"} & {*has}) and not {"segments", "sinks"} & {*has}
        ),
        **({"has_dlse": np.bool_(False), "wants_dbias": np.bool_("dbias" in has)} if backward else {}),
    }
    return frames.Call(handler, tuple(operands), (*results, frames.Operand((words,), int32)), attributes)


def attention_calls() -> Iterator[frames.Call]:
    """Attention calls: every tile, with general scores and without, and few queries."""
    for handler, name, depth in itertools.product(
        ("attention_fwd", "attention_bwd"), ("bf16", "f16"), (64, 128, 192, 256)
    ):
        code = CODES[name]
        bias = ("bias", *(["dbias"] if handler == "attention_bwd" else []))
        for has in ((), ("causal", "mask"), ("segments", "sinks"), ("causal", "cap", *bias), ("key_value_lengths",)):
            yield attention_call(handler, code, depth, has)
            if "dbias" in has:
                yield attention_call(handler, code, depth, (*has, "rounded"))
        if handler == "attention_fwd":
            yield attention_call(handler, code, depth, ("key_value_lengths",), (3, 1000))  # few queries
            if depth == 64:
                yield attention_call(handler, code, depth, (), (2056, 1032))  # many queries and keys


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes some calls on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e6, help="begin no more calls when they are over")
    parser.add_argument("--only", default="", metavar="PATTERN", help="calls of handlers whose names match the pattern")
    options = parser.parse_args(arguments)
    calls = [*distinct_calls(), *attention_calls(), *matmul_calls(), *gated_calls(), *linear_calls()]
    calls = [call for call in calls if re.search(options.only, call.handler)][options.part :: options.parts]
    memory, rng = frames.Device(), np.random.default_rng(0)
    start, done = time.monotonic(), 0
    for call in calls:
        if time.monotonic() - start > options.seconds:
            break
        frames.run("cuda", memory, call, frames.draw(call, rng), fill=None)
        done += 1
    print(f"ran {done} of {len(calls)} calls", flush=True)


if __name__ == "__main__":
    main()

"""The handlers on call frames made here: their reads' and writes' bounds, and frames that XLA never sends."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import plan_cases
import pytest
from support import frames
from support.frame_cases import (
    LOGITS,
    NORMS,
    TILE_DTYPES,
    gated_call,
    gated_calls,
    linear_call,
    linear_calls,
    malformed,
    matmul_call,
    matmul_calls,
    resized,
    row_calls,
    tile_calls,
)
from support.frames import memory_of
from support.row_cases import COLUMNS, COLUMNS_ONCE, STRIDED, STRIDED_ONCE, beyond_few, crowds

from jaxops.ops import _matmul_choice as choices

ROW_OPS = (*LOGITS, *NORMS)
DTYPES = ("float32", "bfloat16", "float16", "float64")
every_options = pytest.mark.parametrize("options", [False, True], ids=["alone", "every option"])
every_half = pytest.mark.parametrize("half", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


# --- red zones, poisoned results ---


def check_rows(half, memory, op, dtype, options, rng, columns, strided):
    for call in row_calls(op, dtype, options, False, half):
        for n in columns:
            frames.check_memory(half, memory, resized(call, 3 if n < 10000 else 2, n), rng)
            if half == "cuda" and n < 10000 and dtype in ("float32", "bfloat16") and not call.workspaces:
                frames.check_memory(half, memory, resized(call, beyond_few(n, call.operands[0].dtype), n), rng)
            if call.workspaces:  # more chunks than such calls have: the kernels for many rows
                frames.check_memory(half, memory, resized(call, 3 if n < 10000 else 2, n, chunks=2), rng)
    for call in row_calls(op, dtype, options, True, half):
        for outer, length, inner in strided:
            split = resized(call, outer, inner, length)
            frames.check_memory(half, memory, split, rng)
            if split.attributes.get("has_parts"):
                frames.check_memory(half, memory, resized(call, outer, inner, length, split=False), rng)


@every_half
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ROW_OPS)
@every_options
def test_memory_of_some_rows(half, op, dtype, options, memory, rng):
    """Each result is written whole, and nothing beside the buffers; the memory beside them does not count either."""
    there = memory_of(memory, half)
    part = DTYPES.index(dtype)
    check_rows(half, there, op, dtype, options, rng, COLUMNS[part:-20:11], STRIDED[part::6])


@pytest.mark.slow
@every_half
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ROW_OPS)
@every_options
@pytest.mark.parametrize("quarter", range(4))
def test_memory_of_rows_of_every_length(half, op, dtype, options, quarter, memory, rng):
    """Fewer under tools that watch memory, but every placement."""
    every = (COLUMNS_ONCE, STRIDED_ONCE) if frames.BARE else (COLUMNS, STRIDED)
    columns, strided = (lengths[quarter * len(lengths) // 4 : (quarter + 1) * len(lengths) // 4] for lengths in every)
    check_rows(half, memory_of(memory, half), op, dtype, options, rng, columns, strided)


@pytest.mark.slow
@every_half
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ROW_OPS)
@every_options
def test_memory_of_many_rows(half, op, dtype, options, memory, rng):
    """Several blocks on a GPU. Sums over rows in the best number of chunks, and in eight, with more rows each."""
    there = memory_of(memory, half)
    for rows, columns in crowds(np.dtype(getattr(ml_dtypes, dtype, dtype)), half == "cuda", frames.BARE):
        for call in row_calls(op, dtype, options, False, half):
            for chunks in (None, 8) if call.workspaces else (8,):
                frames.check_memory(half, there, resized(call, rows, columns, chunks=chunks), rng)


@every_half
@pytest.mark.parametrize("handler", plan_cases.HANDLERS)
def test_memory_of_every_layout(half, handler, memory, rng):
    """All pairs of dtypes, options that lie as x does and others, rows with several axes: some short rows."""
    there = memory_of(memory, half)
    short = [
        c
        for c in plan_cases.row_calls()
        if c.handler == handler and sum(b.bytes for b in (*c.operands, *c.results)) < 1 << 16
    ]
    for call in short[:: 11 if half == "cuda" else 23]:
        frames.check_memory(half, there, call, rng)


@pytest.mark.cuda
@pytest.mark.parametrize("calls", [matmul_calls, tile_calls, gated_calls, linear_calls])
def test_memory_of_matmul_on_cuda(calls, memory, rng):
    there = memory_of(memory, "cuda")
    for call in calls():
        frames.check_memory("cuda", there, call, rng)


@every_half
@pytest.mark.parametrize("op", ROW_OPS)
def test_results_do_not_depend_on_threads_or_streams(half, op, memory, rng):
    """To the bit, with as many threads as tasks at most."""
    there = memory_of(memory, half)
    for dtype in DTYPES:
        along = [resized(call, 700, 257) for call in row_calls(op, dtype, True, False, half)]
        calls = row_calls(op, dtype, False, True, half)
        across = [resized(call, 2, 1500, length) for call in calls for length in (40, 300)]
        for call in (*along, *across):
            values = frames.draw(call, rng)
            wanted = frames.run(half, there, call, values, fill=0, threads=1)
            for threads in (2, 5):
                for a, b in zip(wanted, frames.run(half, there, call, values, fill=0, threads=threads), strict=True):
                    np.testing.assert_array_equal(a, b)


# --- frames that XLA never sends ---


def refusal(half, call, operands, results):
    """A call's error code; it may get more buffers than it takes; None if there was no error."""
    try:
        frames.call_handler(half, call, operands[: len(call.operands)], results[: len(call.results)])
    except frames.HandlerError as error:
        return error.code
    return None


def check_malformed(half, memory, call):
    # Twice as much memory as the buffers need, so that a wider dtype fits, and a buffer more.
    where = [
        [memory.allocate(max(2 * buffer.bytes, 64)) for buffer in (*buffers, buffers[-1])]
        for buffers in (call.operands, call.results)
    ]
    expected = None if memory.half == half else frames.INTERNAL  # a GPU's handler without a GPU
    assert refusal(half, call, *where) == expected
    workspaces = {f"result {i}" for i in call.workspaces}
    count = 0
    for what, wrong in malformed(call):
        code = refusal(half, wrong, *where)
        count += 1
        if "dtype" in what and code in (expected, frames.UNIMPLEMENTED):
            continue  # another combination of dtypes that has a kernel, or could have one
        # A flag and a sum may have any rank, and there may be any number of chunks.
        chunks = call.handler == "epilogue_bwd" and what[:8] in workspaces
        if ("shape" in what or chunks) and code == expected and call.handler in ("matmul", "epilogue_bwd"):
            continue
        # w's rows may be longer than the vocabulary.
        longer = call.handler == "linear_cross_entropy_fwd" and what.endswith("of axis 1")
        if longer and what.startswith("operand 1: size") and not call.attributes["transposed"] and code == expected:
            continue
        assert code == frames.INVALID_ARGUMENT, f"{call.handler}, {what}: error {code}"
    for pointer in (*where[0], *where[1]):
        memory.free(pointer)
    return count


@every_half
@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("across", [False, True], ids=["along", "across"])
@every_options
def test_malformed_frames_are_refused(half, op, across, options, memory):
    """Buffers with a wrong number, rank, size, dtype or memory; attributes missing, with a wrong type, out of range."""
    for call in row_calls(op, "float32", options, across, half):
        assert check_malformed(half, memory.get(half, memory["cpu"]), call) > 100


@every_half
@pytest.mark.parametrize("op", LOGITS)
def test_malformed_frames_of_split_rows_are_refused(half, op, memory):
    for call in row_calls(op, "float32", False, True, half):
        split = resized(call, 2, 4, 16385)  # kLongestAcross in ffi/rows/tuning.h
        assert split.workspaces == {len(call.results)}
        assert check_malformed(half, memory.get(half, memory["cpu"]), split) > 100


@pytest.mark.cuda
@pytest.mark.parametrize("index", range(4))
def test_malformed_frames_of_matmul_are_refused(index, memory):
    for call in matmul_calls()[index::4]:
        assert check_malformed("cuda", memory.get("cuda", memory["cpu"]), call) > 100


@pytest.mark.cuda
@pytest.mark.parametrize("calls", [gated_calls, linear_calls])
def test_malformed_frames_of_fused_products_are_refused(calls, memory):
    for call in calls():
        assert check_malformed("cuda", memory.get("cuda", memory["cpu"]), call) > 100


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_linear_losses_by_the_general_kernel(transposed, memory, rng):
    """It takes sizes that Hopper's kernel refuses. Whole numbers make the logits exact."""
    size = (257, 1001, 203)
    call = linear_call(16, transposed, ("bias", "sum"), size)
    x, w, labels, bias = (rng.integers(-1, 2, b.shape).astype(b.dtype) for b in call.operands)
    labels = rng.integers(-1001, 1001, 257).astype(np.int32)
    found = frames.run("cuda", memory_of(memory, "cuda"), call, [x, w, labels, bias], fill=0xFF)
    x, w, bias = (a.astype(np.float64) for a in (x, w, bias))
    z = x @ (w.T if transposed else w) + bias
    origin = z.max(-1)
    wanted = [origin, np.exp(z - origin[:, None]).sum(-1), z[np.arange(257), labels], z.sum(-1)]
    for got, values in zip(found, wanted, strict=False):
        np.testing.assert_allclose(got.view(np.float32), values, rtol=1e-5)


@pytest.mark.cuda
def test_gated_mlps_without_terms(memory):
    """k = 0: zeros."""
    call = gated_call(16, (300, 520, 0), products=True)
    values = [np.ones(b.shape, b.dtype) for b in call.operands]
    assert not any(out.any() for out in frames.run("cuda", memory_of(memory, "cuda"), call, values, fill=0xFF))


@every_half
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("shape", [(0, 11), (5, 0), (0, 0)])
def test_empty_buffers_need_no_memory(half, dtype, shape, memory):
    """Sums over no rows are 0."""
    for op, options, across in itertools.product(ROW_OPS, (False, True), (False, True)):
        for call in row_calls(op, dtype, options, across, half):
            empty = resized(call, *shape)
            nowhere = [
                dataclasses.replace(b, data="own" if b.bytes else "null") for b in (*empty.operands, *empty.results)
            ]
            split = len(empty.operands)
            empty = empty.replace(operands=tuple(nowhere[:split]), results=tuple(nowhere[split:]))
            values = [np.ones(b.shape, b.dtype) for b in empty.operands]
            there = memory.get(half)
            if there is not None:
                results = frames.run(half, there, empty, values, fill=0xFF)
                for sums in results[min(call.workspaces, default=len(results)) + 1 :]:
                    assert not sums.any(), f"{call.handler}, {shape}"


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(0, 5, 11), (3, 0, 11), (3, 5, 0)])
def test_empty_epilogues(shape, memory):
    there = memory_of(memory, "cuda")
    full, sums, dbias = (frames.Operand(s, 11) for s in (shape, (shape[0], 2, shape[2]), (shape[0], shape[2])))
    attributes = {"activation": np.int32(1), "has_dz": np.bool_(True), "has_dbias": np.bool_(True)}
    call = frames.Call("epilogue_bwd", (full, full), (full, sums, dbias), attributes)
    values = [np.ones(shape, np.float32)] * 2
    assert not frames.run("cuda", there, call, values, fill=0xFF)[2].any()


@pytest.mark.cuda
@pytest.mark.parametrize("name", TILE_DTYPES)
def test_products_without_terms(name, memory):
    """k = 0 gives zeros in every kind of kernel; no operand has memory."""
    there = memory_of(memory, "cuda")
    for tile in choices.TILES[name]:
        call = matmul_call(name, tile, TILE_DTYPES[name], (300, 520, 0))
        out = frames.run("cuda", there, call, [np.ones(b.shape, b.dtype) for b in call.operands], fill=0xFF)[0]
        assert not out.any()


@pytest.mark.cuda
def test_matmul_results_beside_a_pack_are_refused(memory):
    there = memory.get("cuda", memory["cpu"])
    for call in matmul_calls():
        if call.handler != "matmul":
            continue
        where = [[there.allocate(b.bytes + 16) for b in buffers] for buffers in (call.operands, call.results)]
        for i in range(1 + bool(call.attributes["has_preactivation"])):
            beside = [pointer + 8 * (i == k) for k, pointer in enumerate(where[1])]
            assert refusal("cuda", call, where[0], beside) == frames.INVALID_ARGUMENT
        for pointer in (*where[0], *where[1]):
            there.free(pointer)


@pytest.mark.cuda
def test_more_parts_than_tiles_along_k_are_refused(memory):
    there = memory.get("cuda", memory["cpu"])
    for call in tile_calls():
        if call.attributes["splits"] == 1 or len(call.results) > 1:
            continue
        (m, _), (_, n) = (operand.shape for operand in call.operands)
        pointers = [there.allocate(2000 * 2000) for _ in range(3)]
        line = 128 // call.operands[0].dtype.itemsize  # in a k tile
        for k, allowed in ((line, False), (line + 8, True)):
            shapes = zip(((m, k), (k, n)), call.operands, strict=True)
            short = call.replace(operands=tuple(frames.Operand(shape, old.code) for shape, old in shapes))
            code = refusal("cuda", short, pointers[:2], pointers[2:])
            assert (code != frames.INVALID_ARGUMENT) == allowed
        for pointer in pointers:
            there.free(pointer)


@pytest.mark.cuda
@pytest.mark.parametrize("op", LOGITS)
def test_causal_of_too_many_queries_is_refused(op, memory):
    """Kernels count from a query to its keys in 32 bits."""
    there = memory.get("cuda", memory["cpu"])
    for queries, allowed in ((2**31 - 2, True), (2**31 - 1, False)):
        x = frames.Operand((0, queries, 4), 11)
        attributes = {"axes": np.array([2]), "query_axis": np.int64(1), "key_axis": np.int64(2)}
        names = ["has_scale", "has_bias", "has_where", "has_parts"] + ["has_max"] * (op == "log_softmax")
        call = frames.Call(f"{op}_fwd", (x,), (x,), attributes | dict.fromkeys(names, np.bool_(False)))
        pointer = there.allocate(64)
        assert (refusal("cuda", call, [pointer], [pointer]) is None) == allowed
        there.free(pointer)

"""Row lengths around every row kernel's capacities, and the comparison of results that hold NaN or infinities."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from support import contract

# Capacities are 1, 3 or 5 times a power of two, counted in packs of V = 8, 4 or 2 elements. If V does not divide a
# row's length, the row may begin anywhere in a pack, which costs up to 2 V - 1 elements of the capacity. Staged rows
# are counted in elements; some placements for 16 and for 32 bits differ.
_AROUND = (-7, -6, -3, -2, -1, 0, 1, 8)
_NEAR = (-7, 0, 1, 8)
_STAGED = (1056, 2112, 4224, 8448, 12800, 16896, 20480, 33792, 51200, 67584, 102400, 135168)

#: Lengths for rows with adjacent elements, aligned and unaligned, on both sides of every capacity.
COLUMNS = sorted(
    {2**k + d for k in range(3, 16) for d in _AROUND}
    | {n * 2**k + d for n in (3, 5) for k in range(5, 13) for d in _NEAR}
    | {1, 2, 3, 4, 5, 6, 65536, 69999, 70000, 131065, 131072, 131073, 262144, 262145, 524288, 524297}
    | {n + 1 for n in _STAGED}
)


#: The part of the cases that the CPU gets in each dtype.
_SHARES = {"float32": slice(None), "bfloat16": slice(0, None, 2), "float64": slice(1, None, 2)}


def lengths(on_gpu: bool, dtype="float32") -> list[int]:
    """COLUMNS on a GPU, fewer on the CPU, whose loops have no capacities and are the same for all dtypes."""
    return COLUMNS if on_gpu else COLUMNS[::4][_SHARES[dtype]]


#: Fewer, for tools that make a call slow: for aligned rows each capacity, for unaligned rows the longest row in each of
#: their placements (rows/tuning.h), and the streamed rows.
_UNALIGNED = (96, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 4096, 5120, 10240, 16384)
_UNALIGNED += (20480, 28672, 32768, 40960, 57344)
COLUMNS_ONCE = sorted(
    {1, 3, 6, 127, 129, 524297, *(n * 2**k for n in (1, 3, 5) for k in range(3, 13)), *(2**k for k in range(13, 20))}
    | {n - 7 for n in (*_UNALIGNED, *(2**k for k in range(16, 20)))}
    | {n - 1 for n in _STAGED}
)


def beyond_few(columns: int, dtype, summed: bool = False) -> int:
    """The fewest rows with adjacent elements that a GPU does not count as few: the kernels for few rows are others.

    kFewThreads in rows/tuning.h; summed: with sums over the rows, HasFewRows in rows/column_sums.cuh.
    """
    threads, pack = 1024 * 132, 16 // np.dtype(dtype).itemsize
    rows = min(threads // 32, threads * pack // columns) + 1
    return max(rows, min(128 + columns // 16, 512, 2**22 // columns) + 1) if summed else rows


# Shapes [outer, length, inner]: lengths around the placements' capacities, inner sizes that fill packs or do not; and
# rows that several blocks share on a GPU, with sizes that nothing divides.
_AT_CAPACITIES = [
    (outer, length, inner)
    for length in (1, 2, 3, 7, 8, 9, 127, 128, 129, 500, 1023, 1024, 1025, 1500)
    for outer, inner in ((2, 3), (1, 33))
]
_AT_CAPACITIES += [(1, 2**k + d, 8) for k in range(6, 17) for d in (0, 1)]
_AT_CAPACITIES += [(1, 9001, 68), (3, 8205, 20), (3, 16389, 28)]
_ANYWHERE = [(2, 130, 2), (3, 40, 31), (1, 40, 32), (2, 5, 100), (1, 2000, 2), (3, 65, 72), (2, 513, 40)]
_ANYWHERE += [(1, 1024, 136), (1, 200, 40), (3, 4, 40), (2, 3, 520), (2, 16, 132)]
_ANYWHERE += [(1, 300, 1200)]  # on the CPU threads share the columns if rows lie side by side

#: Shapes for rows whose elements lie `inner` apart; normalised over axis 1.
STRIDED = _AT_CAPACITIES + _ANYWHERE


def strided(on_gpu: bool, dtype="float32") -> list[tuple[int, int, int]]:
    """STRIDED on a GPU, fewer on the CPU."""
    return STRIDED if on_gpu else (_AT_CAPACITIES[::3] + _ANYWHERE)[_SHARES[dtype]]


#: One shape for each placement of such rows.
STRIDED_ONCE = [
    (2, 9, 3),
    (1, 129, 33),
    (1, 1500, 33),
    (1, 4097, 33),
    (2, 4, 40),
    (2, 16, 40),
    (3, 40, 31),
    (3, 65, 72),
    (1, 65536, 8),
]
STRIDED_ONCE += [(1, 2**k, 8) for k in range(6, 15)] + [(3, 8205, 20), (3, 16389, 28)]


def crowds(dtype, on_gpu: bool, tool: str = "") -> list[tuple[int, int]]:
    """Shapes with more rows than a GPU takes at once: threads take several rows each, or blocks one after the other.

    None are few as `beyond_few` defines it.

    tool: the compute-sanitizer tool that runs, if any. Under synccheck there are two rows if clusters of 16 blocks take
    them (tools/sanitize_gpu.py).
    """
    pack = 16 // np.dtype(dtype).itemsize
    shapes = [
        (70001, 3),
        (34001, 7),
        (34001, pack),
        (9001, 8 * pack),
        (4301, 16 * pack),
        (4301, 32 * pack),
        (1101, 64 * pack),
    ]
    shapes += [(1041, 1024 * pack), (541, 2048 * pack), (281, 4096 * pack), (141, 8192 * pack), (71, 16384 * pack)]
    shapes += [(35, 32768 * pack), (19, 65536 * pack)]
    shapes += [(17001, 127), (8501, 255), (6501, 511), (3301, 1001), (1701, 2047), (1501, 4097)]
    shapes += [(521, 8193), (361, 12289), (221, 20001), (131, 33001), (91, 50257), (67, 65537), (43, 100001)]
    shapes += [(35, 131071), (23, 200003), (17, 262143)]
    if tool == "synccheck":
        shapes = [(rows if columns <= 8192 * pack else 2, columns) for rows, columns in shapes]
    return shapes if on_gpu else [(min(rows, 100), columns) for rows, columns in shapes if columns < 5000]


def some_rows(rng, rows: int) -> np.ndarray:
    """The rows to compare: the first and the last ones, and some between."""
    return np.unique([*range(min(rows, 3)), *range(max(rows - 3, 0), rows), *rng.integers(rows, size=24)])


def edged(rng, shape, dtype, axis, edge):
    """Normal values whose first and last entries along `axis` are `edge` larger: a row cut short shows at once."""
    values = rng.standard_normal(shape)
    edges = np.moveaxis(values, axis, -1)
    edges[..., 0] += edge
    edges[..., -1] += edge
    return jnp.asarray(values.astype(dtype))


def assert_matches(got, wanted, what="result", rounding=contract.ROUNDING, reference=None, terms=None):
    """contract.assert_close for the finite wanted values; NaN and infinities are equal.

    terms: the sizes of terms that cancel in `wanted`; rounding then counts in ulp of the largest term.
    """
    got, wanted = np.array(got), np.array(wanted, np.float64)
    assert got.shape == wanted.shape, f"{what}: shape {got.shape} instead of {wanted.shape}"
    with np.errstate(over="ignore"):
        rounded = wanted.astype(got.dtype).astype(np.float64)
    special = ~np.isfinite(rounded)
    np.testing.assert_array_equal(got[special].astype(np.float64), rounded[special], err_msg=what)
    got[special], wanted[special] = 0, 0

    def finite_reference():
        values = np.array(reference())
        values[special] = 0
        return values if np.isfinite(values.astype(np.float64)).all() else wanted.astype(values.dtype)

    if terms is not None and got.size:
        tiny = float(jnp.finfo(got.dtype).tiny)
        terms = np.broadcast_to(terms, got.shape)
        largest, cancelled = (max(float(np.max(np.abs(x[~special]), initial=0)), tiny) for x in (wanted, terms))
        rounding *= max(1, cancelled / largest)
    contract.assert_close(got, wanted, reference and finite_reference, what, rounding)


def coarsest(*dtypes) -> float:
    """The largest eps among floating dtypes."""
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes)

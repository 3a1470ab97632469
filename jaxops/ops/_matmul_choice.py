"""Which kernel computes a matmul on a GPU: a pure function of the product and the device, from the tables below.

Nothing is timed at run time: the contents of a command buffer must not depend on timing. The rates were measured on an
H200; `jaxops.explain` shows which kernel a call gets.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxops._device import H200, Device
from jaxops._limits import MAX_MATRIX_SIZE, MAX_PIECES

#: The operand whose tiles two blocks share: each block loads half a tile for both. In the calling convention's order.
SHARED_OPERANDS = (None, "lhs", "rhs")

#: The products that a kernel may skip, in the calling convention's order: see Spec in _matmul_kernel.py.
TRIANGLES = (None, "result", "lhs")


@dataclasses.dataclass(frozen=True)
class Product:
    """A matmul: `batches` products [m, k] @ [k, n].

    arithmetic: one of ARITHMETICS. lhs_transposed: lhs lies as [k, m]; rhs_transposed: rhs as [n, k]. triangle: one of
    TRIANGLES.
    """

    m: int
    n: int
    k: int
    arithmetic: str
    lhs_transposed: bool = False
    rhs_transposed: bool = False
    batches: int = 1
    result_bytes: int = 2  # an element
    triangle: str | None = None


class Tile(NamedTuple):
    """The tile that a block computes at a time, and the share of the tensor cores' peak that it reaches.

    turned: for TF32 with rhs along n: the kernel multiplies its transpose. Other f32 tiles are for rhs along k.
    """

    rows: int
    columns: int
    ping_pong: bool
    efficiency: float
    band: int = 8  # tile rows that run side by side in a narrow result, see band()
    parts: int = 1  # how many parts of a split a cluster can sum, at most: the others' sums fit into a block's memory
    turned: bool = False

    def holds(self, product: Product) -> bool:
        """Whether it can compute a product, if its results' rows are aligned."""
        return self.turned == _is_turned(product)

    @property
    def stores_any_rows(self) -> bool:
        """If False, it stores only results whose rows are aligned to 16 bytes."""
        return not self.ping_pong


class FewRowsTile(NamedTuple):
    """The part of a result with few rows that a block computes at a time while the weights stream past (few_rows.cuh).

    rhs_transposed: for weights that lie transposed. rate: the bytes of weights that a multiprocessor loads per
    microsecond. memory: the share of the memory's rate that is left if the kernel loads much else, or scattered pieces
    of 64 bytes.
    """

    rows: int
    columns: int
    rhs_transposed: bool
    rate: float
    memory: float = 1
    ping_pong: bool = False

    def holds(self, product: Product) -> bool:
        """Whether it can compute a product."""
        few = self.rows - 16 < product.m <= self.rows and not product.lhs_transposed and not product.triangle
        alike = product.arithmetic == "16bit" and product.rhs_transposed == self.rhs_transposed
        return few and alike and not any(_copies(product))


class Arithmetic(NamedTuple):
    """How elements are multiplied: their bytes, TFLOP/s at best, whether in parts, and whether sums are promoted.

    In parts: an f32 number in full precision becomes a high and a low part in f16, and the tensor cores multiply high
    high, high low and low high. Promoted sums are added to f32 registers after every k tile, because the tensor cores'
    own are truncated (to 14 bits for 8-bit operands); the sums of products in parts are always promoted.
    """

    itemsize: int
    peak: float
    in_parts: bool
    promoted: bool

    @property
    def depth(self) -> int:
        """Elements in a k tile."""
        return 128 // self.itemsize * (2 if self.in_parts else 1)


ARITHMETICS = {
    "16bit": Arithmetic(2, 820, False, False),
    "tf32": Arithmetic(4, 415, False, False),
    "f32": Arithmetic(4, 820 / 3, True, False),
    "f8": Arithmetic(1, 1530, False, True),
    "f8 fast": Arithmetic(1, 1530, False, False),
}

_16BIT_TILES = (
    Tile(64, 64, False, 0.73, parts=8),
    Tile(64, 128, False, 0.77, parts=7),
    Tile(64, 192, False, 0.85),
    Tile(128, 128, False, 0.83, parts=4),
    Tile(128, 128, True, 0.96, band=2),
    Tile(128, 192, True, 0.99),
    Tile(128, 256, False, 0.97),
)
_TF32_TILES = (
    Tile(64, 64, False, 0.73, parts=8),
    Tile(64, 192, False, 0.85),
    Tile(128, 128, True, 0.96, band=2),
    Tile(128, 192, True, 0.99),
    Tile(128, 256, False, 0.97),
    Tile(64, 64, False, 0.45, parts=8, turned=True),
    Tile(128, 64, False, 0.64, parts=7, turned=True),
    Tile(128, 128, False, 0.84, parts=4, turned=True),
    Tile(192, 128, False, 0.92, turned=True),
    Tile(256, 128, False, 0.97, turned=True),
)
_PARTS_TILES = (
    Tile(64, 128, False, 0.63, parts=7),
    Tile(128, 128, False, 0.84, parts=4),
)
_PROMOTED_TILES = (
    Tile(64, 128, False, 0.65, parts=7),
    Tile(128, 128, False, 0.85, parts=4),
    Tile(128, 192, False, 0.9),
)
_FAST_F8_TILES = (
    Tile(64, 128, False, 0.77, parts=7),
    Tile(128, 128, True, 1.01, band=2),
    Tile(128, 256, False, 0.97),
)
TILES = {
    "16bit": _16BIT_TILES,
    "tf32": _TF32_TILES,
    "f32": _PARTS_TILES,
    "f8": _PROMOTED_TILES,
    "f8 fast": _FAST_F8_TILES,
}

FEW_ROWS_TILES = (
    FewRowsTile(16, 16, True, 50e3),
    FewRowsTile(16, 32, True, 68e3),
    FewRowsTile(16, 32, False, 68e3, memory=0.85),
    FewRowsTile(16, 64, False, 73e3),
    FewRowsTile(32, 16, True, 37e3, memory=0.8),
    FewRowsTile(32, 32, True, 50e3, memory=0.92),
    FewRowsTile(32, 32, False, 50e3, memory=0.75),
)


#: Tiles for a gated MLP (gated.cuh), which hold both products, half the columns w_gate's and half w_up's; and for its
#: backward pass.
GATED_TILE = Tile(128, 128, True, 0.96, band=2)
GATED_BACKWARD_TILE = Tile(128, 192, True, 0.99)
#: The tile for the linear cross entropy's forward pass (linear_cross_entropy.cu).
LINEAR_LOSS_TILE = Tile(128, 192, True, 0.99)


def rows_in_calls(tile: Tile | FewRowsTile) -> int:
    """A tile's rows in the calling convention, by which 16 names the kernel for few rows."""
    return 16 if isinstance(tile, FewRowsTile) else tile.rows


#: Bytes a microsecond from memory, to memory and from the L2 cache, and the exponent of the norm that combines their
#: times and the products' time: they hide each other, but not wholly if they take equally long.
_MEMORY, _WRITTEN, _L2, _NORM = 4.2e6, 3.4e6, 23e6, 4
#: If a smaller share of the multiprocessors loads, the memory is slower, by the root of that share.
_BUSY = 0.4
#: Bytes in a line of the L2 cache, and how much longer it takes to load rows that lie across lines.
_LINE, _STRADDLING = 128, 3.1
#: Microseconds that a further kernel costs, and that a block needs to begin.
_KERNEL, _FILL = 2.5, 2.2
#: Microseconds that a cluster needs to sum a tile's parts, and the further ones for each 64 x 64 sums in a further
#: part.
_CLUSTER, _CLUSTER_SUMS = 2.2, 0.7
#: Microseconds that the kernel for few rows needs besides loading the weights; the share of the rate that is left if
#: rows lie across lines.
_FEW_ROWS_FILL, _ACROSS = 2.6, 0.6
#: Microseconds that a block's threads need to load a piece each; and the share that shows if two warpgroups multiply a
#: tile together, which hides the rest.
_PIECE, _SHOWN = 0.029, 0.6
#: Microseconds that a copy with padded rows takes, beside its bytes a microsecond.
_COPY, _COPY_RATE = 2.5, 3.8e6
#: Microseconds that partial results cost, including the kernel that sums them, and how many of their bytes a further
#: microsecond moves.
_PARTIALS, _PARTIALS_RATE = 5.0, 0.85e6
#: Microseconds that a warpgroup needs to store 64 x 256 results that are only rounded, to rows that are aligned to 16
#: bytes or not, and others, with a bias or an activation. Tiles in ping-pong hide them behind the next tile.
_PLAIN_STORE, _ROWS_STORE, _STORE = 1.0, 2.6, 5.0
#: How many blocks an H200 runs at once for each cluster size, with one block on each multiprocessor.
_CLUSTERED_BLOCKS = {2: 132, 3: 117, 4: 120, 5: 105, 6: 108, 7: 105, 8: 120}


class FewRows(NamedTuple):
    """A range of 16-bit products with few rows: the least and the most for each size.

    columns, depth: n and k. weights: elements of rhs, n k. The operands' rows lie within lines of the L2 cache.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    depth: tuple[int, int]
    weights: tuple[float, float]
    layouts: tuple[bool, ...] = (False, True)  # whether rhs is transposed

    def holds(self, product: Product) -> bool:
        """Whether a product is in the range."""
        sizes = product.m, product.n, product.k, product.n * product.k
        limits = self.rows, self.columns, self.depth, self.weights
        within = all(least <= size <= most for size, (least, most) in zip(sizes, limits, strict=True))
        return within and not product.lhs_transposed and product.rhs_transposed in self.layouts


#: XLA computes one row times fewer weights, and an outer product with fewer results, element by element, without the
#: tensor cores.
_XLA_MULTIPLIES = 10_000_000

#: Decoding and small batches, where jaxops' kernel was faster than XLA's (benchmarks/results/matmul_own.csv; in
#: brackets the speeds' geometric mean). XLA's kernels, too, read more weights than these at the memory's rate.
_FEW_ROWS = (
    FewRows((1, 1), (1024, 8192), (1024, 4096), (1e6, _XLA_MULTIPLIES - 1), layouts=(False,)),  # 2.3
    FewRows((1, 1), (3072, 6144), (4096, 14336), (_XLA_MULTIPLIES, 7e7)),  # 1.07
    FewRows((2, 128), (2048, 14336), (1024, 14336), (4e6, 7e7)),  # 1.17
    FewRows((2, 128), (1024, 4095), (1024, 1536), (1e6, 8e6)),  # 1.24
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a product is computed.

    kernel: "wgmma" (Hopper's tensor cores), "few rows" (up to 32, on Hopper), "general" (a kernel for every GPU) or
    "xla". why: in words. Only wgmma has the other fields, except the tile, which few rows has too. lhs_copy, rhs_copy:
    0 none; 1 with padded rows; 2 transposed.
    """

    kernel: str
    why: str
    tile: Tile | FewRowsTile | None = None
    band: int = 1  # tile rows that run side by side
    splits: int = 1
    partials: bool = False  # another kernel sums a split's parts, from memory; else clusters of blocks sum them
    shared: str | None = None  # a name in SHARED_OPERANDS
    in_pieces: tuple[bool, bool] = (False, False)  # whether threads load lhs and rhs, instead of the copy engine
    promote: int = 0  # k tiles after which sums are promoted; 0: never, or as products in parts do
    lhs_copy: int = 0
    rhs_copy: int = 0
    padded: bool = False  # XLA's split: k = 1 to 2

    def __str__(self):
        if self.tile is None:
            return f"{self.kernel}{' (k padded to 2)' * self.padded}: {self.why}"
        kind = " ping-pong" if self.tile.ping_pong else ""
        parts = [f"tile {self.tile.rows}x{self.tile.columns}{kind}"]
        if self.splits > 1:
            where = "partial results" if self.partials else "clusters"
            parts.append(f"k split in {self.splits} {where}")
        if self.shared:
            parts.append(f"{self.shared} loaded by two blocks for both")
        for name, copy, in_pieces in zip(("lhs", "rhs"), (self.lhs_copy, self.rhs_copy), self.in_pieces, strict=True):
            if copy:
                parts.append(f"{name} copied {('', 'with padded rows', 'transposed')[copy]}")
            if in_pieces:
                parts.append(f"{name} loaded in pieces of 4 or 8 bytes")
        return f"{self.kernel} ({', '.join(parts)}): {self.why}"


def _columns(product: Product) -> tuple[int, int]:
    """The adjacent elements in a row of lhs and of rhs, as they lie in memory."""
    return product.m if product.lhs_transposed else product.k, product.k if product.rhs_transposed else product.n


def _copies(product: Product, in_pieces: tuple[bool, bool] = (False, False)) -> tuple[int, int]:
    """The copies that the copy engine needs before it can read the operands, unless threads load them in pieces."""
    arithmetic = ARITHMETICS[product.arithmetic]
    wide = arithmetic.itemsize != 2
    # 16-bit operands may lie along either axis, and so may a TF32 rhs: the kernel multiplies its transpose. Other
    # operands lie along k.
    along_k = not product.lhs_transposed, product.rhs_transposed
    either = not wide, not wide or product.arithmetic == "tf32"
    found = []
    for columns, along, any_way, by_threads in zip(_columns(product), along_k, either, in_pieces, strict=True):
        as_it_lies = (along or any_way) and columns * arithmetic.itemsize % 16 == 0 and not arithmetic.in_parts
        found.append(0 if by_threads or as_it_lies else 2 if wide and not along else 1)
    return found[0], found[1]


def _is_turned(product: Product) -> bool:
    """Whether rhs^T lhs^T is computed, see Tile."""
    return product.arithmetic == "tf32" and not product.rhs_transposed and not _copies(product)[1]


def _pieces(product: Product) -> tuple[int, int]:
    """The bytes at a time in which threads can load each operand; 0: not, or it need not be copied for the copy engine.

    Rows must be aligned to 4 bytes; a kernel counts them in 32 bits.
    """
    if product.arithmetic != "16bit":
        return 0, 0
    of_rows = (next((n for n in (16, 8, 4) if 2 * columns % n == 0), 0) for columns in _columns(product))
    lhs, rhs = (
        0 if n == 16 or columns > MAX_PIECES else n for n, columns in zip(of_rows, _columns(product), strict=True)
    )
    return lhs, rhs


#: Blocks that run together load the least if their tiles make a square; a narrow result they cover in its whole width.
_BAND, _WIDE = 8, 32


def band(product: Product, tile: Tile) -> int:
    """How many tile rows run side by side, column by column, before those below them."""
    return _BAND if product.n >= _WIDE * tile.columns else tile.band


class Plan(NamedTuple):
    """How the tensor cores' kernel computes a product: the fields of Choice."""

    tile: Tile | FewRowsTile
    splits: int = 1
    partials: bool = False
    shared: str | None = None
    in_pieces: tuple[bool, bool] = (False, False)


def _tiles(product: Product, plan: Plan) -> int:
    """The result's tiles, including the ones beyond its edge that blocks have if they share an operand."""
    rows, columns = math.ceil(product.m / plan.tile.rows), math.ceil(product.n / plan.tile.columns)
    if plan.shared:
        rows, columns = (rows + rows % 2, columns) if plan.shared == "rhs" else (rows, columns + columns % 2)
    return rows * columns * product.batches


def _straddling(product: Product) -> list[str]:
    """The operands whose rows, as the kernel reads them, lie across lines of the L2 cache."""
    itemsize = ARITHMETICS[product.arithmetic].itemsize
    rows = (size * itemsize for size in _columns(product))  # in bytes
    read = zip(("lhs", "rhs"), rows, _copies(product), strict=True)
    return [name for name, row, copy in read if not copy and row % _LINE != 0 and _LINE % row != 0]


def _few_rows_microseconds(product: Product, tile: FewRowsTile, device: Device) -> float:
    """The time that the kernel for few rows is expected to take."""
    weights = product.k * tile.columns * 2  # a tile's bytes
    rounds, last = divmod(_tiles(product, Plan(tile)), device.multiprocessors)

    def one(blocks: int) -> float:
        return max(blocks * weights / (_MEMORY * tile.memory), weights / tile.rate) if blocks else 0

    time = rounds * one(device.multiprocessors) + one(last)
    return _FEW_ROWS_FILL + time / (_ACROSS if "rhs" in _straddling(product) else 1)


def _microseconds(product: Product, plan: Plan, device: Device, finished: bool = False) -> float:
    """The time that a plan is expected to take."""
    if isinstance(plan.tile, FewRowsTile):
        return _few_rows_microseconds(product, plan.tile, device)
    arithmetic = ARITHMETICS[product.arithmetic]
    itemsize = arithmetic.itemsize
    tile, splits = plan.tile, plan.splits
    m, n, k, batches = product.m, product.n, product.k, product.batches
    blocks = _tiles(product, plan) * splits
    depth = math.ceil(math.ceil(k / arithmetic.depth) / splits) * arithmetic.depth
    rate = arithmetic.peak * 1e6 / device.multiprocessors * tile.efficiency
    waves = math.ceil(blocks / device.multiprocessors)
    aligned = n * product.result_bytes % 16 == 0
    store = _STORE if finished else _PLAIN_STORE if aligned else _ROWS_STORE
    store *= tile.rows * tile.columns / (128 * 256)
    store *= 2 if tile.ping_pong else waves  # a warpgroup has the whole tile, but only the last one shows
    compute = waves * (2 * tile.rows * tile.columns * depth / rate) + store
    read = batches * (m * k + k * n) * itemsize
    straddling = _straddling(product)
    loads = [
        min(size, most) * (_STRADDLING if name in straddling else 1) / (2 if name == plan.shared else 1)
        for name, size, most in (("lhs", tile.rows, m), ("rhs", tile.columns, n))
    ]
    loaded = blocks / splits * sum(loads) * k * itemsize
    written = batches * m * n * (4 * splits if plan.partials else product.result_bytes)
    busy = min(1, blocks / device.multiprocessors)  # the multiprocessors that load, as a share
    memory = (read / _MEMORY + written / _WRITTEN) / min(1, busy / _BUSY) ** 0.5
    pieces = sum(  # for each thread
        waves * depth / arithmetic.depth * size / piece
        for size, piece, in_pieces in zip((tile.rows, tile.columns), _pieces(product), plan.in_pieces, strict=True)
        if in_pieces
    )
    hidden = tile.rows == 128 and not tile.ping_pong
    overlapping = compute, memory, loaded / _L2 / busy, pieces * _PIECE * hidden
    time = sum(t**_NORM for t in overlapping) ** (1 / _NORM) + _FILL
    time += 0 if hidden else pieces * _PIECE * _SHOWN
    if itemsize == 2:
        copies = _copies(product, plan.in_pieces)
        copied = [batches * size for size, copy in zip((m * k, k * n), copies, strict=True) if copy]
        time += _COPY * len(copied) + 2 * sum(copied) * itemsize / _COPY_RATE
    if plan.partials:
        time += _PARTIALS + batches * m * n * 4 * splits / _PARTIALS_RATE
    elif splits > 1:
        sums = (splits - 1) * tile.rows * tile.columns / (64 * 64)
        time += _CLUSTER + _CLUSTER_SUMS * sums
    return time


def _plans(product: Product, device: Device) -> Iterator[Plan]:
    """The plans that could compute a product."""
    yield from (Plan(tile) for tile in FEW_ROWS_TILES if tile.holds(product))
    arithmetic = ARITHMETICS[product.arithmetic]
    aligned = product.n * product.result_bytes % 16 == 0
    depth = math.ceil(product.k / arithmetic.depth)
    can_share = not arithmetic.in_parts and not product.triangle
    shared = _straddling(product) if can_share else []
    in_pieces = [*itertools.product(*((False, True) if piece else (False,) for piece in _pieces(product)))]
    for tile in TILES[product.arithmetic]:
        if not (aligned or tile.stores_any_rows) or not tile.holds(product):
            continue
        yield from (Plan(tile, in_pieces=which) for which in in_pieces)
        yield from (Plan(tile, shared=name) for name in shared)
        if tile.ping_pong:
            continue
        tiles = _tiles(product, Plan(tile))
        most = max(1, min(depth // 4, device.multiprocessors // tiles))
        for splits in range(2, most + 1):
            room = _CLUSTERED_BLOCKS.get(splits, 0) * device.multiprocessors // H200.multiprocessors
            for which in in_pieces:
                yield Plan(tile, splits, partials=True, in_pieces=which)
                if splits <= tile.parts and tiles * splits <= room:
                    yield Plan(tile, splits, in_pieces=which)


def _best_plan(product: Product, device: Device, finished: bool = False) -> Plan:
    """The plan that is expected to be the fastest.

    finished: whether sums are scaled, biased or activated, not only rounded.
    """
    if product.triangle and product.arithmetic == "16bit":  # larger tiles can skip fewer products
        side = 64 if product.n <= 64 else 128
        return Plan(next(t for t in TILES[product.arithmetic] if t[:3] == (side, side, False)))

    def order(plan: Plan):  # if several are equally fast, the one whose tiles reach least beyond the result
        area = plan.tile.rows * plan.tile.columns
        time = _microseconds(product, plan, device, finished)
        return time, _tiles(product, plan) * area, -area, plan.splits, plan.shared or ""

    return min(_plans(product, device), key=order)


def _parts_pay_off(product: Product, device: Device, finished: bool) -> bool:
    """Whether f32 in parts is expected to be faster than XLA, and hardly slower where f16 holds none of the parts."""
    m, n, k, batches = product.m, product.n, product.k, product.batches
    xla = 3 + 2 * m * n * k * batches / 45e6
    split = batches * (m + n) * math.ceil(k / 64) * 64 * 8 / 3.5e6  # 4 bytes read and 4 written; in TF32 4 and 8 more
    multiply = 1.3 * _microseconds(product, _best_plan(product, device, finished), device, finished)
    fixed = 2 * _KERNEL  # a flag cleared and two kernels that find nothing to do
    held, not_held = split + multiply + fixed, 2.5 * split + 1.5 * multiply + fixed
    return held < 0.95 * xla and not_held < 1.2 * xla


def _is_uneven(product: Product) -> bool:
    """Whether the product is small or long and its k is no multiple of XLA's 64-wide k tiles, or of equal parts."""
    m, n, k = product.m, product.n, product.k
    small = min(m, n) >= 64 and max(m, n) <= 2048 and m * n <= 8e5 and 288 <= k <= 16384
    long = min(m, n) >= 8 and m * n <= 1 << 17 and k >= 8192
    return (small and k % 64 != 0) or (long and k % 256 != 0)


def _is_small(product: Product, device: Device, finished: bool) -> bool:
    """Whether one warpgroup a block multiplies the whole product at once, each block one tile."""
    m, n = product.m, product.n
    if min(m, n) < 128 or m * n < 1 << 15 or not 384 <= product.k <= 4096:
        return False
    plan = _best_plan(product, device, finished)
    at_once = _tiles(product, plan) * plan.splits <= device.multiprocessors
    return plan.tile.rows == 64 and not plan.partials and at_once


def _tf32_slower_than_xla(product: Product, activation: bool) -> str | None:
    """Of f32 as TF32."""
    m, n, k = product.m, product.n, product.k
    operations, unaligned = 2 * m * n * k, _is_unaligned(product)
    if m < 32 or n < 100 or operations < (1e9 if unaligned else 1e8):
        return "few rows or columns, or a small product, in TF32"
    if product.lhs_transposed and (m * n < 1 << 20 or (not unaligned and (product.rhs_transposed or k < 704))):
        return "TF32: lhs would be copied to lie along k, XLA's dot reads it as it lies"
    if unaligned or product.lhs_transposed or activation or operations < 1e11:
        return None  # 1.3 to 2.2 times XLA's speed if unaligned or transposed, else 1.0 to 2.1
    return "a large product in TF32: XLA's own dot is as fast"


def _unaligned_slower_than_xla(product: Product) -> str | None:
    """Of 16 bits."""
    m, n, k = product.m, product.n, product.k
    operations = 2 * m * n * k
    if not any(_copies(product)):
        return "only the result's rows are not aligned to 16 bytes: XLA's own dot is ahead by 5 %"
    along_k = k % 8 != 0 and (not product.lhs_transposed or product.rhs_transposed)
    even = not any(x % 2 for x in (*_columns(product), n))
    if along_k and k % 2 == 0:  # threads load it in pieces: 1.2 to 2.7 times XLA's speed
        enough = min(m, n) >= 64 and k >= 96 and operations >= (5e7 if even and k >= 256 else 2e9)
        return None if enough else "a small product of rows that are not aligned to 16 bytes"
    if not along_k and even:
        return "rows along m or n that are aligned to 4 bytes: XLA's own dot is ahead"
    if operations >= 2e9 and min(m, n) > 128 and (k > 128 or not all(_copies(product))):
        return None  # copied: 1.5 to 3.7 times XLA's speed
    return "a small or narrow product of rows that are not aligned to 16 bytes"


def _aligned_slower_than_xla(product: Product, device: Device, finished: bool) -> str | None:
    """16-bit products. In brackets: the geometric mean of our speeds there, relative to XLA's."""
    m, n, k = product.m, product.n, product.k
    within_lines = not _straddling(product)
    if within_lines and any(few_rows.holds(product) for few_rows in _FEW_ROWS):
        return None
    if finished and min(m, n) >= 256:  # XLA writes f32 sums, and scales, biases and rounds them in a pass [1.2]
        return None
    if _is_uneven(product):  # [1.7]
        return None
    if within_lines and _is_small(product, device, finished):  # [1.3]
        return None
    if within_lines and 1 << 14 <= m * n <= 1 << 15 and min(m, n) >= 64 and k >= 1 << 15:  # k is split [1.2]
        return None
    few_columns = 40 <= n <= 128 and 6144 <= m <= 25600 and k >= 4096
    if few_columns and not (product.lhs_transposed or product.rhs_transposed):  # as in a low-rank adapter [1.2]
        return None
    return "16 bits, aligned: XLA's own dot is ahead by 1 to 5 %, and by more for few rows and some small products"


def _is_unaligned(product: Product) -> bool:
    """Whether a row of an operand or of the result is not aligned to 16 bytes."""
    itemsize = ARITHMETICS[product.arithmetic].itemsize
    return any(size * itemsize % 16 for size in (*_columns(product), product.n))


def slower_than_xla(product: Product, device: Device, activation: bool, bias: bool) -> str | None:
    """Why XLA's dot is chosen, for products where it was measured to be faster."""
    side = min(product.m, product.n if product.triangle == "result" else product.k)
    if product.triangle and product.arithmetic == "16bit" and side >= 512 and not any(_copies(product)):
        return None  # XLA multiplies the other half as well
    if product.arithmetic == "f32":
        if product.k < 64:
            return "sums of less than 64 products: XLA's have no larger an error"
        return None if _parts_pay_off(product, device, activation or bias) else "splitting the operands takes too long"
    if product.batches > 1:
        return "batches: XLA's own dot was faster in 16 bits, and nothing else was compared"
    if product.arithmetic == "tf32":
        return _tf32_slower_than_xla(product, activation)
    if product.arithmetic != "16bit":
        if 2 * product.m * product.n * product.k < 1.5e10:
            return "a small product of 8-bit floats"
        return None if any(_copies(product)) else "XLA's own dot is ahead where both operands lie along k"
    if _is_unaligned(product):
        return _unaligned_slower_than_xla(product)
    return _aligned_slower_than_xla(product, device, activation or bias)


def _is_large_outer(product: Product) -> bool:
    """Whether it is an outer product that XLA computes faster as sums of two products, one being 0.

    Of a smaller one, a weight's gradient for one row, XLA may compute the other gradient in the same kernel.
    """
    m, n, k = product.m, product.n, product.k
    large = m * n * product.batches >= _XLA_MULTIPLIES
    return k == 1 and large and min(m, n) >= 64 and product.arithmetic == "16bit" and product.result_bytes == 2


def planned(product: Product, plan: Plan) -> Choice:
    """Hopper's kernel by a plan."""
    if isinstance(plan.tile, FewRowsTile):
        return Choice("few rows", "the weights stream from memory", plan.tile)
    promote = int(ARITHMETICS[product.arithmetic].promoted)
    in_pieces = tuple(wanted and piece > 0 for wanted, piece in zip(plan.in_pieces, _pieces(product), strict=True))
    lhs_copy, rhs_copy = _copies(product, in_pieces)
    return Choice(
        "wgmma",
        "Hopper's tensor cores",
        band=band(product, plan.tile),
        **plan._replace(in_pieces=in_pieces)._asdict(),
        promote=promote,
        lhs_copy=lhs_copy,
        rhs_copy=rhs_copy,
    )


def choose(product: Product, device: Device, activation: bool = False, bias: bool = False) -> Choice:
    """The kernel for a product on a device; activation, bias: the epilogue of the sums (bias may also be a scale)."""
    if not all(isinstance(size, int | np.integer) for size in (product.m, product.n, product.k, product.batches)):
        return Choice("xla", "the shape is symbolic")
    if 0 in (product.m, product.n, product.k, product.batches):
        return Choice("xla", "there is nothing to multiply")
    if why := device.why_not_hopper():
        if product.arithmetic == "16bit" and any(_copies(product)):
            return Choice("general", f"rows that are not aligned to 16 bytes; {why}")
        return Choice("xla", why)
    if max(product.m, product.n, product.k) > MAX_MATRIX_SIZE:
        return Choice("xla", "a size beyond the 31 bits in which Hopper's kernel counts")
    if _is_large_outer(product):
        return Choice("xla", "alone, its multiplication of elements runs at half of the memory's rate", padded=True)
    if product.arithmetic == "16bit" and product.lhs_transposed and product.rhs_transposed:
        return Choice("xla", "both operands of 16 bits are transposed: there is no kernel")
    if why := slower_than_xla(product, device, activation, bias):
        return Choice("xla", why)
    return planned(product, _best_plan(product, device, activation or bias))


#: XLA computes plain 16-bit products in this share of our kernels' time.
_XLA_16BIT = 0.97
#: Bytes a microsecond in a pass over arrays.
_PASS_RATE = 3.8e6
#: The fewest products per element, and tiles per multiprocessor, that hide the two arrays which the kernel for both
#: cotangents reads and writes. An H200 took 1270 us for 8192 x 14336 x 4096, the composition 1433; but 122 and 113 us
#: for 8192 x 2816 x 1024, 117 and 102 us for 512 x 14336 x 4096.
_GATED_BACKWARD_K, _GATED_BACKWARD_TILES = 2048, 8


def _choose_one_pass(tile: Tile, all_columns: int, count: int, product: Product, device: Device) -> Choice:
    """The choice between a kernel that computes `count` products and the ops after them at once, and `product` as
    often, then a pass."""
    sizes = product.m, product.n, product.k
    if not all(isinstance(size, int | np.integer) for size in sizes):
        return Choice("xla", "the shape is symbolic")
    if why := device.why_not_hopper():
        return Choice("xla", why)
    if any(_copies(product)) or product.n * product.result_bytes % 16:
        return Choice("xla", "rows that are not aligned to 16 bytes")
    if max(product.m, count * product.n, product.k) > MAX_MATRIX_SIZE:
        return Choice("xla", "a size beyond the 31 bits in which Hopper's kernel counts")
    whole = dataclasses.replace(product, n=count * product.n)
    once = _microseconds(whole, Plan(tile), device, finished=True)
    each = _XLA_16BIT * _microseconds(product, _best_plan(product, device), device)
    passes = _KERNEL + all_columns * product.m * product.result_bytes / _PASS_RATE
    if once >= count * each + passes:
        return Choice("xla", "products and a pass after them are expected to be as fast")
    return Choice("wgmma", "one pass on Hopper's tensor cores", tile, band(whole, tile))


def choose_gated(product: Product, device: Device) -> Choice:
    """The kernel for 16-bit activation(x w_gate) * (x w_up); `product` is one factor's."""
    return _choose_one_pass(GATED_TILE, 3 * product.n, 2, product, device)


def choose_gated_backward(product: Product, device: Device) -> Choice:
    """The kernel for the cotangents of both factors' products; `product` is the product of activation(gate) * up."""
    sizes = product.m, product.n, product.k
    if all(isinstance(size, int | np.integer) for size in sizes):
        tiles = -(-product.m // GATED_BACKWARD_TILE.rows) * -(-product.n // GATED_BACKWARD_TILE.columns)
        few = tiles < _GATED_BACKWARD_TILES * device.multiprocessors
        if product.k < _GATED_BACKWARD_K or few:
            return Choice("xla", "a product that is too small to hide a pass over two arrays")
    return _choose_one_pass(GATED_BACKWARD_TILE, 5 * product.n, 1, product, device)

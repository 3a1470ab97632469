"""Every tile in matmul's Hopper kernels, whichever the table would choose: values against float64, and the same bits at
every launch."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracle
from support.row_cases import assert_matches

from jaxops._rows import accumulator
from jaxops.ops import _matmul_choice as choices
from jaxops.ops import _matmul_kernel as ops

pytestmark = [pytest.mark.gpu("9.0"), pytest.mark.cuda]


class Operands(NamedTuple):
    """The operands' dtypes, the precision that gives an arithmetic, the results' dtypes, and its error.

    product, total: the rounding errors of a product, and of a sum after every 32 products, which is truncated.
    """

    arithmetic: str
    lhs: str
    rhs: str
    results: tuple[str, ...]
    precision: str
    product: float
    total: float


OPERANDS = [
    Operands("16bit", "bfloat16", "bfloat16", ("bfloat16", "float32"), "default", 0, 2**-23),
    Operands("16bit", "float16", "float16", ("float16", "float32"), "default", 0, 2**-23),
    Operands("tf32", "float32", "float32", ("float32",), "default", 2**-10, 2**-23),
    Operands("f32", "float32", "float32", ("float32",), "highest", 2**-23, 2**-24),
    # The tensor cores keep 14 bits when they sum 8-bit products, and add four times before it is promoted.
    Operands("f8", "float8_e4m3fn", "float8_e4m3fn", ("bfloat16", "float32"), "highest", 2**-12, 2**-23),
    Operands("f8", "float8_e5m2", "float8_e4m3fn", ("bfloat16",), "highest", 2**-12, 2**-23),
    Operands("f8 fast", "float8_e4m3fn", "float8_e5m2", ("bfloat16", "float32"), "default", 0, 2**-13),
    Operands("f8 fast", "float8_e5m2", "float8_e5m2", ("float32",), "default", 0, 2**-13),
]


def plans(operands: Operands, tile: choices.Tile) -> Iterator[choices.Plan]:
    """The ways in which a tile can be used: k split, an operand shared by two blocks, and operands in pieces."""
    yield choices.Plan(tile)
    if not tile.ping_pong:
        yield choices.Plan(tile, 3, partials=True)
    if tile.parts > 1:
        most = tile.parts if operands.arithmetic == "16bit" else min(5, tile.parts)  # all that fit, with k tiles enough
        yield from (choices.Plan(tile, splits) for splits in (2, most))
    if operands.lhs == "bfloat16" or (operands.arithmetic == "f8" and tile.rows == 128) or tile.turned:
        yield from (choices.Plan(tile, shared=name) for name in choices.SHARED_OPERANDS[1:])
    if operands.lhs == "bfloat16":
        yield choices.Plan(tile, in_pieces=(True, True))
        if tile.parts > 1:
            yield choices.Plan(tile, 2, in_pieces=(True, True))


CONFIGURATIONS = [
    (operands, plan)
    for operands in OPERANDS
    for tile in choices.TILES[operands.arithmetic]
    for plan in plans(operands, tile)
] + [
    (operands, choices.Plan(tile))
    for operands in OPERANDS
    if operands.arithmetic == "16bit"
    for tile in choices.FEW_ROWS_TILES
]


def layouts_of(operands: Operands) -> tuple[str, ...]:
    """In memory; there are no kernels for 16-bit operands that are both transposed."""
    return ("NN", "NT", "TN") if operands.arithmetic == "16bit" else ("NN", "NT", "TN", "TT")


def name_of(part) -> str:
    if isinstance(part, Operands):
        return f"{part.arithmetic} {part.lhs} {part.rhs}"
    split = f" {part.splits} {'partials' if part.partials else 'clusters'}" if part.splits > 1 else ""
    shared = f" {part.shared} shared" if part.shared else " in pieces" if any(part.in_pieces) else ""
    if isinstance(part.tile, choices.FewRowsTile):
        layout = "NT" if part.tile.rhs_transposed else "NN"
        return f"few rows {part.tile.rows}x{part.tile.columns} {layout}"
    return f"{part.tile.rows}x{part.tile.columns}{'pp' if part.tile.ping_pong else ''}{split}{shared}"


every_configuration = pytest.mark.parametrize("operands, plan", CONFIGURATIONS, ids=name_of)


class Case(NamedTuple):
    m: int
    n: int
    k: int
    layout: str = "NN"
    result: str = ""
    batches: tuple[int, int] = ()  # for lhs and for rhs
    bias: str = ""  # the axes that it does not broadcast along: "m", "n" or "mn"
    activation: str | None = None
    preactivation: bool = False
    scaled: bool = False
    triangle: str | None = None
    wide: bool = False  # every third k tile of full-precision f32 is multiplied in TF32

    def draw(self, rng, operands: Operands) -> list[np.ndarray]:
        """Lhs and rhs, then scale and bias if there are; on the host, where nothing is compiled for it."""
        left = (self.m, self.k)[:: -1 if self.layout[0] == "T" else 1]
        right = (self.k, self.n)[:: -1 if self.layout[1] == "T" else 1]
        shapes = [
            ((*self.batches[i : i + 1], *shape), d)
            for i, (shape, d) in enumerate([(left, operands.lhs), (right, operands.rhs)])
        ]
        drawn = [rng.standard_normal(s).astype(np.float32).astype(d) for s, d in shapes]
        if self.wide:
            for x, along_k in zip(drawn, (self.layout[0] == "N", self.layout[1] == "T"), strict=True):
                np.moveaxis(x, -1 if along_k else -2, 0)[::192, ..., 0] *= 2.0**-40
        if self.triangle == "lhs":
            drawn[0] *= np.tri(*left, dtype=drawn[0].dtype)
        wide, ones = accumulator(operands.lhs, operands.rhs, self.result), [1 for _ in self.batches[:1]]
        if self.scaled:
            drawn.append(np.full((*(max(self.batches) for _ in ones), 1, 1), 0.37, wide))
        if self.bias:
            own = (size if axis in self.bias else 1 for axis, size in (("m", self.m), ("n", self.n)))
            drawn.append(rng.standard_normal((*ones, *own)).astype(wide))
        return drawn

    def _rest(self, rest):
        """Scale and bias; None if absent."""
        rest = iter(rest)
        return [next(rest) if given else None for given in (self.scaled, self.bias != "")]

    def run(self, operands: Operands, lhs, rhs, *rest) -> list[jax.Array]:
        transposed = (self.layout[0] == "T", self.layout[1] == "T")
        precision = ops.precision_of(operands.precision)
        spec = ops.Spec(*transposed, np.dtype(self.result), self.activation, precision, triangle=self.triangle)
        return ops.kernel(lhs, rhs, *self._rest(rest), spec, self.preactivation)

    def exact(self, lhs, rhs, *rest) -> list[np.ndarray]:
        lhs, rhs = (
            np.swapaxes(wide, -1, -2) if transposed == "T" else wide
            for wide, transposed in zip((np.asarray(x, np.float64) for x in (lhs, rhs)), self.layout, strict=True)
        )
        scale, bias = (None if x is None else np.asarray(x, np.float64) for x in self._rest(rest))
        z = lhs @ rhs * (1 if scale is None else scale) + (0 if bias is None else bias)
        y = oracle.activate(self.activation, z)[0]
        return [y, z] if self.preactivation else [y]


@pytest.fixture
def force(monkeypatch):
    """Makes one plan the choice for every product; where it can not be, the call fails."""

    def force(plan):
        monkeypatch.setattr(choices, "choose", lambda product, *_: choices.planned(product, plan))

    return force


def fits(case: Case, operands: Operands, plan: choices.Plan) -> bool:
    """Whether the table could choose so."""
    tile = plan.tile
    layout = (side == "T" for side in case.layout)
    product = choices.Product(case.m, case.n, case.k, operands.arithmetic, *layout, triangle=case.triangle)
    if not tile.holds(product):
        return False
    if isinstance(tile, choices.FewRowsTile):
        return True
    if any(plan.in_pieces) and not any(choices._pieces(product)):
        return False
    aligned = case.n * np.dtype(case.result).itemsize % 16 == 0
    return (
        (aligned or plan.partials or tile.stores_any_rows)
        and math.ceil(case.k / choices.ARITHMETICS[operands.arithmetic].depth) >= plan.splits
        and not (plan.shared and case.triangle)
    )


def check(operands: Operands, cases: list[Case], rng):
    assert cases
    drawn = [case.draw(rng, operands) for case in cases]
    run = jax.jit(lambda drawn: [c.run(operands, *xs) for c, xs in zip(cases, drawn, strict=True)])
    results = jax.device_get(run(drawn))  # every copy begins before the first is awaited
    for case, xs, got in zip(cases, drawn, results, strict=True):
        for ours, wanted in zip(got, case.exact(*xs), strict=True):
            if case.triangle == "result":
                ours, wanted = (np.where(np.tri(case.m, case.n, dtype=bool), x, 0) for x in (ours, wanted))
            eps = float(jnp.finfo(ours.dtype).eps)
            rounding = 4 + (4 * operands.product + (4 + case.k / 32) * operands.total) / eps
            assert_matches(ours, wanted, str(case), rounding)


@every_configuration
def test_layouts(operands, plan, force, rng):
    force(plan)
    shapes = [(200, 328, 256), (333, 515, 1027), (1, 8, 96), (64, 1000, 640), (129, 257, 4100)]
    shapes += [(17, 400, 2048), (32, 65, 513)]
    shapes += [(16, 328, 1000), (7, 1032, 4104), (3, 40, 24), (9, 333, 520), (2, 20000, 72)]
    shapes += [(29, 1032, 520), (202, 264, 250), (132, 520, 100), (30, 330, 1002), (20, 136, 516)]
    cases = [
        Case(m, n, k, layout, result)
        for (m, n, k), layout, result in itertools.product(shapes, layouts_of(operands), operands.results)
    ]
    check(operands, [case for case in cases if fits(case, operands, plan)], rng)


@every_configuration
def test_epilogues(operands, plan, force, rng):
    force(plan)
    cases = [
        Case(m, n, k, layout, result, (), bias, activation, preactivation, scaled)
        for (m, n, k, layout) in (
            (200, 328, 256, "NN"),
            (333, 515, 640, "NT"),
            (30, 264, 512, "NN"),
            (13, 264, 512, "NN"),
            (6, 264, 512, "NT"),
            (24, 264, 512, "NT"),
            (30, 264, 300, "NN"),
        )
        for result in operands.results
        for bias, activation, preactivation, scaled in (
            ("n", None, False, False),
            ("n", "relu", True, False),
            ("n", "gelu", False, True),
            ("", "gelu", True, False),
            ("n", "gelu_exact", True, False),
            ("n", "silu", True, True),
            ("", None, False, True),
        )
    ]
    cases += [  # of rows
        Case(m, n, k, layout, operands.results[0], (), bias, activation, preactivation, scaled)
        for (m, n, k, layout) in (
            (200, 328, 256, "NN"),
            (333, 515, 640, "NT"),
            (13, 264, 512, "NN"),
            (6, 264, 512, "NT"),
        )
        for bias, activation, preactivation, scaled in (
            ("m", None, False, False),
            ("mn", None, False, False),
            ("mn", "silu", True, True),
        )
    ]
    check(operands, [case for case in cases if fits(case, operands, plan)], rng)


@every_configuration
def test_batches(operands, plan, force, rng):
    force(plan)
    cases = [
        Case(m, n, k, layout, result, batches, *(("n", "gelu", False, True) if finished else ()), wide=wide)
        for wide in {False, operands.arithmetic == "f32"}
        for m, n, k in ((130, 264, 704), (31, 129, 653), (13, 264, 1096), (30, 72, 518), (22, 264, 1096))
        for layout in layouts_of(operands)
        for result in operands.results[:1]
        for batches, finished in (((3, 3), False), ((3, 3), True), ((3, 1), False), ((1, 3), True))
    ]
    check(operands, [case for case in cases if fits(case, operands, plan)], rng)


@pytest.mark.parametrize(
    "operands, plan",
    [c for c in CONFIGURATIONS if not c[1].shared and not isinstance(c[1].tile, choices.FewRowsTile)],
    ids=name_of,
)
def test_triangles(operands, plan, force, rng):
    force(plan)
    cases = [
        Case(m, n, k, layout, result, batches, triangle=triangle)
        for m, n, k in ((300, 328, 704), (700, 264, 328), (31, 264, 520), (520, 64, 1096), (30, 328, 330))
        for layout in layouts_of(operands)
        for triangle in ("result", "lhs")
        for result, batches in ((operands.results[0], (5, 5)), (operands.results[-1], ()))
    ]
    check(operands, [case for case in cases if fits(case, operands, plan)], rng)


@pytest.mark.parametrize("operands", OPERANDS, ids=name_of)
@pytest.mark.parametrize("seed", range(4))
def test_random_shapes(operands, seed, monkeypatch):
    """Sizes from 1 to 5000, the tile that is expected to be the fastest."""

    def best(product, device, activation=False, bias=False):
        return choices.planned(product, choices._best_plan(product, device, activation or bias))

    monkeypatch.setattr(choices, "choose", best)
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(12):
        m, n, k = (int(5000 ** rng.uniform()) for _ in range(3))
        layout, result = rng.choice(layouts_of(operands)), rng.choice(operands.results)
        batches = ((), (), (2, 2), (3, 1))[rng.integers(4)]
        cases.append(Case(m, n, k, str(layout), str(result), batches))
    check(operands, cases, rng)


@pytest.mark.parametrize("tile", choices.TILES["tf32"], ids=lambda tile: name_of(choices.Plan(tile)))
def test_tf32_is_the_nearest(tile, force):
    """Ties to even, on either side of the product; an overflow is infinite, and NaN stays NaN."""
    force(choices.Plan(tile))
    bits = [0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F803000, 0xBF803000, 0x7F7FEFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000]
    bits = np.array([*bits, 0x007FFFFF, 0x7F800001, 0xFF800001, 0x7FC00000], np.uint32)
    values = bits.view(np.float32)
    nearest = ((bits + 0xFFF + (bits >> 13 & 1)) & ~np.uint32(0x1FFF)).view(np.float32)
    wanted = np.where(np.isnan(values), np.float32(np.nan), nearest)
    along_k, ones = np.zeros((2, 16, 64), np.float32)  # along one k alone
    along_k[: len(values), 5], ones[:, 5] = values, 1
    layout = "NN" if tile.turned else "NT"
    case = Case(16, 16, 64, layout, "float32")
    (operands,) = (o for o in OPERANDS if o.arithmetic == "tf32")
    for lhs, rhs, of in ((along_k, ones, np.s_[: len(values), 0]), (ones, along_k, np.s_[0, : len(values)])):
        rhs = rhs if layout == "NT" else np.ascontiguousarray(rhs.T)
        (got,) = jax.jit(functools.partial(case.run, operands))(lhs, rhs)
        np.testing.assert_array_equal(np.asarray(got)[of], wanted)


full_precision_configurations = pytest.mark.parametrize(
    "operands, plan", [c for c in CONFIGURATIONS if c[0].arithmetic == "f32"], ids=name_of
)


@full_precision_configurations
@pytest.mark.parametrize("layout", ["NN", "TT"])
def test_full_precision_whatever_the_exponents(operands, plan, layout, force, rng):
    """Error against |lhs| @ |rhs|, entry by entry, if f16 holds the parts of all blocks, some blocks, or none."""
    force(plan)
    case = Case(200, 328, 1000, layout, "float32")
    lhs, rhs = case.draw(rng, operands)
    along_k = (1 if layout[0] == "N" else 0, 0 if layout[1] == "N" else 1)
    exponents = rng.integers(-40, 40, lhs.shape), rng.integers(-40, 40, rhs.shape)
    rows = rng.integers(-60, 60, case.m)[:, None] if layout[0] == "N" else rng.integers(-60, 60, case.m)
    tiny = [np.where(rng.random(x.shape) < 1e-3, np.float32(2**-30), 1) * x for x in (lhs, rhs)]
    large, nothing = tiny[0].copy(), rhs.copy()
    np.moveaxis(large, along_k[0], 0)[5] *= 2.0**50
    np.moveaxis(nothing, along_k[1], 0)[5] = 0
    zeros = lhs.copy()
    zeros[:70, :130] = 0
    for what, a, b in (
        ("plain", lhs, rhs),
        ("each its own", np.ldexp(lhs, exponents[0]), np.ldexp(rhs, exponents[1])),
        ("one of lhs", np.ldexp(lhs, exponents[0]), rhs),
        ("rows", np.ldexp(lhs, rows), rhs),
        ("few tiny", *tiny),
        ("large by zero", large, nothing),
        ("zeros", zeros, tiny[1]),
        ("subnormal", np.ldexp(lhs, -130), np.ldexp(rhs, 90)),
        ("huge by tiny", np.ldexp(lhs, 124), np.ldexp(rhs, -110)),
        ("huge by plain", np.ldexp(lhs, 116), rhs),
        ("some huge", np.where(rng.random(lhs.shape) < 1e-3, np.ldexp(lhs, 115), lhs), rhs),
        ("huge beside tiny", np.ldexp(lhs, np.where(rows == rows.max(), 115, rows - 40)), np.ldexp(rhs, -10)),
    ):
        a, b = a.astype(np.float32), b.astype(np.float32)
        (got,) = jax.jit(functools.partial(case.run, operands))(a, b)
        (wanted,), (size,) = case.exact(a, b), case.exact(np.abs(a), np.abs(b))
        bound = (4 * 2**-24 + (4 + case.k / 32) * 2**-24) * size + 2**-149
        assert np.all(np.abs(np.asarray(got, np.float64) - wanted) <= bound), what


@full_precision_configurations
def test_full_precision_beyond_the_numbers(operands, plan, force, rng):
    """Infinities, NaN, and finite operands whose sums overflow: as IEEE says. With many tiles too."""
    force(plan)
    cases = [Case(200, 328, 640, "NN", "float32"), Case(130, 72, 300, "TT", "float32", (3, 1))]
    cases += [Case(3000, 3000, 64, "NN", "float32")] * (plan.splits == 1)
    for case in cases:
        lhs, rhs = case.draw(rng, operands)
        odd = lhs.copy()
        odd.reshape(-1)[rng.integers(odd.size, size=3)] = np.inf, -np.inf, np.nan
        positive = np.abs(lhs), np.abs(rhs)
        exponents = np.where(np.arange(case.m) % 2, 61, 40)
        exponents = exponents[:, None] if case.layout[0] == "N" else exponents
        for what, a, b in (
            ("not finite", odd, rhs),
            ("infinite by zero", np.where(lhs == lhs.max(), np.inf, lhs), np.zeros_like(rhs)),
            ("equal", np.full_like(lhs, 1e21), np.full_like(rhs, 1e21)),
            ("every second row", np.ldexp(positive[0], exponents), np.ldexp(positive[1], 61)),
            ("large", *(np.ldexp(x, 124) for x in positive)),
        ):
            a, b = a.astype(np.float32), b.astype(np.float32)
            got = np.asarray(jax.jit(functools.partial(case.run, operands))(a, b)[0])
            with np.errstate(invalid="ignore", over="ignore"):
                (wanted,), (size,) = case.exact(a, b), case.exact(np.abs(a), np.abs(b))
                beyond = ~np.isfinite(wanted.astype(np.float32))
                np.testing.assert_array_equal(got[beyond], wanted.astype(np.float32)[beyond], what)
                assert np.all((np.abs(got - wanted) <= case.k * 2.0**-24 * size) | beyond), what


@pytest.mark.slow
@every_configuration
def test_400_launches_give_the_same_bits(operands, plan, force, rng):
    """A race between a tile's stages shows in a few launches among hundreds."""
    force(plan)
    small = isinstance(plan.tile, choices.FewRowsTile)
    odd = 2 if any(plan.in_pieces) else 0
    m = plan.tile.rows if small else 1160 + odd
    layouts = ("NN", "NT" if small else layouts_of(operands)[-1])
    finished = ("", None, False) if plan.partials else ("n", "gelu", True)
    columns = 17000 if small else 1032  # more tiles than blocks run at once
    cases = [
        Case(m, columns, 1096 + odd, layout, result, (), *options, wide=wide)
        for wide in {False, operands.arithmetic == "f32"}
        for layout in layouts
        for result in operands.results
        for options in {("", None, False), finished}
    ]
    launch_400_times(operands, [case for case in cases if fits(case, operands, plan)], rng)


def launch_400_times(operands, cases, rng):
    drawn = jax.device_put([case.draw(rng, operands) for case in cases])

    @jax.jit
    def run(drawn):
        results = [x for case, xs in zip(cases, drawn, strict=True) for x in case.run(operands, *xs)]
        return [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in results]

    first = run(drawn)
    differ = jax.jit(lambda a, b: jnp.stack([jnp.any(x != y) for x, y in zip(a, b, strict=True)]).astype(jnp.int32))
    counts = sum(differ(run(drawn), first) for _ in range(400))
    assert not np.any(counts), f"{counts} of 400 launches differ: {cases}"

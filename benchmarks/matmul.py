"""matmul: floating-point operations a second, beside the best that XLA reaches on a square product in the same run.

"float32" is compared in full precision, "tf32" is f32 in JAX's default precision: TF32 on a GPU, another product. All
others are compared in the default precision, too: XLA may leave some kernels out if another precision is asked for.
matmul_own is matmul on jaxops' own kernels, even if the choice is XLA's faster dot; the choice rests on it.
matmul_random is matmul, as a user gets it, with sizes drawn at random.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from unittest import mock

import jax
import numpy as np
from support.ops import COMPARISONS, parameter_dtype

import jaxops
from benchmarks import harness
from jaxops._device import H200, local_device
from jaxops.ops import _matmul_choice as choices


@dataclasses.dataclass(frozen=True)
class Case:
    """batch products [m, k] @ [k, n]; the layout's letters say which operand lies transposed in memory."""

    m: int
    n: int
    k: int
    layout: str = "NN"
    batch: int = 0
    op: str = "matmul"

    def __str__(self):
        batch = f"{self.batch} of " if self.batch else ""
        layout = "" if self.layout == "NN" else f" {self.layout}"
        return f"{batch}{self.m}x{self.n}x{self.k}{layout}"

    @classmethod
    def named(cls, name: str) -> Case:
        """One product by its name, as str() gives it."""
        sizes, *layout = name.split()
        return cls(*map(int, sizes.split("x")), *layout)

    @property
    def operations(self) -> int:
        """The product's floating-point operations; each gradient takes as many."""
        return 2 * self.m * self.n * self.k * max(self.batch, 1)


def _squares(*sizes):
    return [Case(size, size, size) for size in sizes]


LANGUAGE_MODELS = [
    Case(8192, 6144, 4096),
    Case(8192, 28672, 4096),
    Case(8192, 4096, 14336),
    Case(8192, 128256, 4096),
    Case(65536, 256, 256),
    Case(8192, 128, 8192),
    Case(2048, 768, 3072),
]
SKINNY = [Case(m, n, 4096) for n in (4096, 28672) for m in (1, 8, 16, 32, 64, 128)]
UNALIGNED = [Case(4095, 4097, 4093), Case(1000, 1000, 1000), Case(127, 129, 131), Case(4096, 4096, 100)]
#: Rows that are aligned to 16 bytes but lie across L2 cache lines.
ACROSS_LINES = [Case(4096, 4096, 4104), Case(8192, 1000, 2048), Case(4096, 1000, 1000)]
BATCHED = [Case(1024, 128, 1024, batch=128), Case(1024, 1024, 128, batch=128), Case(256, 256, 64, batch=256)]
LAYOUTS = [
    Case(m, n, k, layout)
    for m, n, k in ((4096, 4096, 4096), (8192, 4096, 14336), (4096, 4096, 100))
    for layout in ("NT", "TN", "TT")
]

CASES = {
    "gpu": [
        *_squares(512, 1024, 2048, 4096, 8192, 16384),
        *LANGUAGE_MODELS,
        *SKINNY,
        *UNALIGNED,
        Case(128, 128, 65536),
        *BATCHED,
        *LAYOUTS,
        *(
            dataclasses.replace(case, op="dense_gelu")
            for case in _squares(1024, 2048, 4096, 8192, 16384) + LANGUAGE_MODELS + ACROSS_LINES
        ),
    ],
    "gpu, 8 bits": [*_squares(1024, 2048, 4096, 8192), *LANGUAGE_MODELS[:3], *LAYOUTS[:2]],
    "cpu": [
        *_squares(256, 512, 1024),
        Case(1, 1024, 1024),
        Case(127, 129, 131),
        Case(256, 256, 64, batch=8),
        Case(512, 512, 512, "NT"),
        Case(512, 512, 512, op="dense_gelu"),
    ],
}
#: More measurements behind the choice, for few rows, for small products, and for rows that lie across cache lines or
#: are not aligned.
WEIGHTS = "1024x4096 2048x2048 4096x1024 4096x8192 5120x5120 6144x4096 8192x4096 14336x4096"
FEW_ROWS = [
    f"{m}x{weight}{layout}"
    for layout, weight, m in itertools.product(("", " NT"), WEIGHTS.split(), (16, 32, 48, 64, 128))
]
MORE = """
1x2048x2048, 1x2048x4096, 1x2048x4096 NT, 1x4096x1024, 1x4096x4096 NT, 1x4096x8192, 1x4096x14336, 1x4096x14336 NT,
1x5120x5120, 1x6144x4096, 1x8192x2048, 1x8192x4096, 1x8192x4096 NT, 1x8192x8192, 1x14336x4096 NT, 1x28672x4096 NT,
2x2048x2048 NT, 2x4096x4096, 2x8192x4096, 2x28672x4096, 4x4096x4096, 4x4096x4096 NT, 4x8192x4096, 4x14336x4096 NT,
4x28672x4096, 8x1024x1024, 8x1024x1024 NT, 8x1024x4096, 8x1024x4096 NT, 8x2048x2048, 8x2048x4096, 8x4096x4096 NT,
8x4096x14336, 8x4096x14336 NT, 8x6144x4096, 8x8192x4096, 8x8192x4096 NT, 8x11008x4096, 8x14336x4096, 8x14336x4096 NT,
8x28672x4096 NT, 12x4096x4096, 12x4096x4096 NT, 12x8192x4096, 16x2048x4096, 16x2048x4096 NT, 16x3072x4096,
16x4096x4096 NT, 16x4096x14336, 16x28672x4096 NT, 20x8192x8192, 24x2048x4096, 24x4096x4096, 24x11008x4096,
24x28672x4096, 32x4096x4096 NT, 32x4096x14336, 32x4096x14336 NT, 32x10240x2048, 32x12288x4096 NT, 33x4096x11008,
40x4096x4096, 48x2048x4096, 48x4096x4096, 48x7168x2048, 48x20480x4096, 48x24576x4096, 48x28672x4096, 56x8192x8192 NT,
64x1024x2048, 64x2048x1024, 64x2048x4096, 64x4096x4096 NT, 64x4096x14336, 64x5120x1280 NT, 64x8192x14336, 64x11008x4096,
64x12288x6144, 64x28672x4096 NT, 80x4096x4096, 96x2048x2048, 96x4096x4096, 96x8192x4096, 96x28672x4096, 112x4096x4096,
128x1024x1024, 128x1024x8192, 128x2048x1024, 128x2048x4096, 128x2048x8192, 128x3072x3072, 128x4096x2048,
128x4096x4096 NT, 128x4096x6144, 128x4096x14336, 128x5120x1280 NT, 128x7168x2048 NT, 128x7168x5120, 128x11008x4096,
72x4096x4096, 80x2048x2048, 80x8192x4096, 80x14336x4096, 80x4096x14336 NT, 96x4096x14336, 96x14336x4096 NT,
112x8192x4096, 144x4096x4096, 160x4096x4096 NT, 192x4096x4096, 192x4096x14336, 192x14336x4096, 200x4096x4096,
200x14336x4096, 256x1024x4096, 256x2048x4096, 256x4096x14336, 320x4096x4096, 384x4096x4096, 512x4096x4096,
1000x1024x1024, 1000x4096x4096, 1152x1152x1152, 1280x1280x1280, 1792x1792x1792, 256x256x256, 256x256x1024, 256x256x2048,
256x512x640, 256x1024x1024, 256x1024x2048, 256x2048x2048, 256x4096x1024, 256x4096x2048, 256x4096x4096, 256x8192x4096,
384x384x384, 384x768x512, 384x1024x1024, 512x512x256, 512x512x512 NT, 512x512x512 TN, 512x512x2048, 512x512x2048 TN,
512x512x4096, 512x768x768, 512x1024x512, 512x1024x2048, 512x2048x512, 512x2048x1024, 512x4096x1024, 576x576x576,
640x512x896 NT, 640x640x640, 640x1024x1280 NT, 768x512x1024 NT, 768x768x256, 768x768x768, 768x768x1536, 768x768x2048,
896x1024x1024, 1024x256x1024, 1024x512x640 TN, 1024x512x1024, 1024x512x4096, 1024x1024x512, 1024x1024x1024 NT,
1024x1024x1024 TN, 1024x1024x1536, 1024x1024x2048, 1024x1024x2048 TN, 1024x1024x4096, 1024x2048x1024, 1536x1536x1536,
2000x2000x2000, 2048x512x512, 2048x512x1024, 2048x512x2048 NT, 2048x4096x1000 NT, 4096x1000x1000, 4096x4096x4104 NT,
4104x4104x4104, 8192x1000x2048, 8192x5000x5000 NT, 65536x1000x1024, 32x1024x1024 NT, 32x2048x4096, 32x2048x4096 NT,
64x1000x2050, 128x4096x4100, 256x256x100, 300x300x300, 500x500x500, 500x500x500 NT, 700x700x700, 768x50258x8192 TN,
1000x1000x100, 1000x1000x1002, 1002x1002x1002, 1500x1500x1500, 2004x2004x2004 NT, 2048x2048x36, 2048x4096x510,
4096x4096x102, 4100x4100x4100, 8192x100x1024, 8192x50257x768, 8192x50257x768 NT, 8192x50258x768, 8192x50258x768 NT,
16384x1000x2050, 65536x100x256, 256x1024x8192 TN, 768x3072x8192 TN, 1024x4096x4096 TN, 2048x2048x2048 NT,
2048x2048x2048 TN, 4096x14336x8192 TN, 8192x8192x8192 NT, 2048x512x4096, 4096x512x4096, 2048x1024x4096, 4096x32x4096,
8192x64x1024, 1x4096x28672, 1x4096x28672 NT, 1x8192x28672 NT, 1x1024x16384, 1x1024x16384 NT, 2x4096x28672 NT,
8x4096x28672, 8x4096x28672 NT, 16x4096x28672 NT, 32x1024x28672, 32x1024x28672 NT, 64x1024x16384, 64x1024x28672 NT,
4096x28672x1 TN, 4096x4096x1 TN, 16x4096x28672, 256x256x1 TN, 1024x1024x1 TN, 8192x8192x1 TN, 2048x2048x2 TN,
4096x4096x2 TN, 4096x4096x3 TN, 4096x4096x4 TN, 4096x4096x6 TN, 4096x4096x8 TN, 4096x28672x4 TN, 4096x28672x8 TN,
4096x4096x16 TN, 4096x28672x16 TN, 4096x4096x32 TN, 4096x28672x32 TN, 4096x4096x64 TN, 4096x28672x64 TN,
4096x14336x128 TN, 4096x4096x1, 4096x4096x2, 4096x4096x4, 4096x4096x8, 4096x4096x8 NT, 1x256x65536, 1x256x65536 NT,
1x2048x16384, 1x2048x16384 NT, 1x2048x28672 NT, 1x16384x16384, 1x16384x16384 NT, 2x1024x16384 NT, 4x2048x28672,
8x1024x16384, 8x1024x16384 NT, 8x8192x16384, 8x8192x16384 NT, 16x256x65536, 16x256x65536 NT, 16x1024x28672,
16x1024x28672 NT, 16x16x65536, 64x64x65536, 64x512x32768, 256x256x16384, 128x128x16384, 128x128x32768, 128x128x65536 NT,
128x128x65536 TN, 128x128x16384 TN, 64x64x65536 TN, 64x256x65536 TN, 256x64x65536 TN, 256x256x65536, 256x256x65536 TN,
256x256x16384 TN, 128x512x16384, 128x512x16384 TN, 512x128x16384 TN, 512x128x32768, 192x192x32768 TN, 64x1024x16384 TN,
96x96x65536 TN, 32x2048x16384, 32x2048x16384 NT, 64x128x131072 TN, 1x1024x4096, 1x1280x4096, 1x1536x1536, 1x2048x1024,
1x3072x4096, 1x4096x2048, 1x5120x1280, 1x7168x2048, 1x7168x4096, 1x8192x1024, 1x1024x1024 NT, 1x2048x2048 NT,
1x3072x4096 NT, 1x4096x1024 NT, 1x4096x2048 NT, 1x5120x5120 NT, 1x6144x4096 NT, 1x8192x8192 NT, 1x512x16384,
1x1024x1024, 1x1024x8192, 2x1024x1024, 8x1024x2048, 16x1024x1024, 16x1536x1024, 1x1024x1536, 2x1024x2048, 2x3072x1024,
8x2048x1024, 16x1024x2048, 16x2048x1024, 16x3072x1024
"""
OWN = [*(case for case in CASES["gpu"] if case.op == "matmul"), *map(Case.named, [*FEW_ROWS, *MORE.split(",")])]
QUICK = {"gpu": [*_squares(1024), Case(127, 129, 131)], "cpu": [*_squares(128), Case(63, 65, 67)]}

#: XLA's best rate on these squares is the ceiling.
CEILINGS = {"gpu": _squares(4096, 8192), "cpu": _squares(512, 1024)}
QUICK_CEILINGS = {"gpu": _squares(4096), "cpu": _squares(256)}

#: Full f32 runs at a sixteenth of bf16's rate on a GPU: products with more operations say nothing new.
F32_OPERATIONS = 2e12


def operand_dtype(dtype: str) -> str:
    """The operands' dtype in memory."""
    return "float32" if dtype == "tf32" else dtype


def cases(dtype: str, quick: bool) -> list[Case]:
    """The products for the device at hand."""
    device = harness.backend()
    if dtype.startswith("float8"):
        return CASES["gpu, 8 bits"] if device == "gpu" and not quick else QUICK[device]
    found = (QUICK if quick else CASES)[device]
    return [case for case in found if dtype != "float32" or case.operations <= F32_OPERATIONS]


def operands(case: Case, dtype: str, rng: harness.Generator) -> tuple[jax.Array, ...]:
    """The matrices as they lie in memory, and the bias if the op takes one."""
    lead = (case.batch,) if case.batch else ()
    shapes = ((case.m, case.k), (case.k, case.n))
    memory = operand_dtype(dtype)
    matrices = tuple(
        rng.standard_normal(lead + (shape if letter == "N" else shape[::-1])).astype(memory)
        for shape, letter in zip(shapes, case.layout, strict=True)
    )
    if case.op != "dense_gelu":
        return matrices
    return *matrices, rng.standard_normal((case.n,)).astype(parameter_dtype(memory))


def functions(case: Case, dtype: str) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """jaxops's product and XLA's; bf16 results from 8-bit operands, with fast sums, which are XLA's default."""
    eight_bits = dtype.startswith("float8")
    if case.layout == "NN" and not eight_bits:
        comparison = COMPARISONS[case.op]
        products = (comparison.ours, comparison.reference)
    else:
        axes = ((axis if letter == "N" else 1 - axis,) for axis, letter in zip((1, 0), case.layout, strict=True))
        options = {"dimension_numbers": (tuple(axes), ((), ()))}
        if eight_bits:
            options["preferred_element_type"] = "bfloat16"
        products = (functools.partial(product, **options) for product in (jaxops.dot_general, jax.lax.dot_general))
    return tuple(map(_in_full_precision, products)) if dtype == "float32" else tuple(products)


def _in_full_precision(function):
    def product(*operands):
        with jax.default_matmul_precision("highest"):
            return function(*operands)

    return product


def ceiling(dtype: str, clock: harness.Clock, settings: harness.Settings) -> float:
    """XLA's best rate on a square product."""
    rates = []
    for case in (QUICK_CEILINGS if settings.quick else CEILINGS)[harness.backend()]:
        draw = harness.drawing(functools.partial(operands, case, dtype))
        product = harness.Calls(harness.compiled(functions(case, dtype)[1]), [draw(0)])
        times = harness.alternate(clock, {"xla": product}, settings.seconds, settings.rounds)
        rates.append(case.operations / times["xla"] / 1e12)
    return max(rates)


def tasks(measured: Sequence[Case], dtype: str, ceiling: float) -> list[harness.Task]:
    """A dtype's measurements. Gradients only for plain products, because other gradients are such products too.

    The timed kernel is the kernel that users get, which can be XLA's own.
    """
    found = []
    for case in measured:
        ours, reference = functions(case, dtype)
        draw = harness.drawing(functools.partial(operands, case, dtype))
        plain = case.op == "matmul" and case.layout == "NN" and not dtype.startswith("float8")
        for direction, products in (("forward", 1), ("backward", 2))[: 2 if plain else 1]:
            found.append(
                harness.Task(
                    op=case.op,
                    direction=direction,
                    shape=str(case),
                    dtype=dtype,
                    ours=ours,
                    reference=reference,
                    draw=draw,
                    work=products * case.operations,
                    unit="TFLOP/s",
                    ceiling=ceiling,
                )
            )
    return found


def random_cases(seed: int, count: int, most: float) -> list[Case]:
    """Products with 1e7 to `most` operations: sizes from 16 to 8192, small ones as often as large ones.

    A quarter have sizes that are multiples of 64, half multiples of 8, the others any size.
    """
    rng = np.random.default_rng(seed)
    found: dict[Case, None] = {}
    while len(found) < count:
        step = rng.choice([64, 8, 8, 1])
        m, n, k = (max(1, round(2 ** rng.uniform(4, 13) / step)) * int(step) for _ in range(3))
        case = Case(m, n, k, str(rng.choice(["NN", "NT", "TN"])))
        if 1e7 <= case.operations <= most:
            found[case] = None
    return [*found]


def _measure(
    op: str,
    products: Callable[[str], Sequence[Case]],
    directions: set[str],
    clock: harness.Clock,
    settings: harness.Settings,
) -> bool:
    succeeded = True
    for dtype in settings.dtypes:
        best = ceiling(dtype, clock, settings)
        found = [task for task in tasks(products(dtype), dtype, best) if task.direction in directions]
        if op != "matmul":
            found = [dataclasses.replace(task, op=op) for task in found]
        title = f"{op} (m x n x k), {dtype}; ceiling: XLA's best square product"
        succeeded &= harness.run(title, found, clock, settings)
    return succeeded


def run(clock: harness.Clock, settings: harness.Settings) -> bool:
    """Measures the products; False if a measurement failed."""
    directions = {"forward", "backward"}
    return _measure("matmul", lambda dtype: cases(dtype, settings.quick), directions, clock, settings)


def run_random(clock: harness.Clock, settings: harness.Settings) -> bool:
    """Measures products drawn at random in the same way, only forward."""
    most = 4e11 if harness.backend() == "gpu" and not settings.quick else 1e9
    products = random_cases(settings.seed, 3 if settings.quick else 64, most)
    return _measure("matmul_random", lambda _: products, {"forward"}, clock, settings)


def run_own(clock: harness.Clock, settings: harness.Settings) -> bool:
    """The products on our own kernels, forward only; False also on devices without such kernels."""
    if harness.backend() == "cpu" or local_device().capability != H200.capability:
        settings.console.print("FAILED matmul_own: its kernels need a Hopper GPU", style="red")
        return False

    def own(dtype):
        return cases(dtype, settings.quick) if settings.quick or dtype.startswith("float8") else OWN

    jax.clear_caches()  # for products lowered by the choice
    try:
        with mock.patch.object(choices, "slower_than_xla", return_value=None):
            return _measure("matmul_own", own, {"forward"}, clock, settings)
    finally:
        jax.clear_caches()

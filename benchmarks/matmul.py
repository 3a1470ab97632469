"""matmul: floating-point operations a second, beside the best that XLA reaches on a square product in the same run.

"float32" is compared in full precision, "tf32" is f32 in JAX's default precision: TF32 on a GPU, another product.
matmul_own is matmul on jaxops' own kernels also where the choice is XLA's dot for being faster; the choice rests on it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from unittest import mock

import jax

import jaxops
from benchmarks import harness
from jaxops._comparison import COMPARISONS, parameter_dtype
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
        """Floating-point operations of the product; each of the two gradients takes as many."""
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
            for case in _squares(1024, 2048, 4096, 8192, 16384) + LANGUAGE_MODELS
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
#: What the choice for few rows and for small products rests on.
WEIGHTS = [(1024, 4096), (2048, 2048), (4096, 1024), (4096, 8192), (5120, 5120), (6144, 4096), (8192, 4096)]
FEW_ROWS = [
    Case(m, *weight, layout)
    for layout, weight, m in itertools.product(("NN", "NT"), [*WEIGHTS, (14336, 4096)], (16, 32, 48, 64, 128))
]
SMALL_NAMES = """
256x256x1024, 256x512x640, 256x1024x1024, 256x4096x1024, 384x768x512, 512x512x256, 512x512x512 NT, 512x512x512 TN,
512x512x2048, 512x768x768, 512x1024x512, 512x2048x512, 640x512x896 NT, 768x512x1024 NT, 768x768x256, 1024x256x1024,
1024x512x640 TN, 1024x512x1024, 1024x1024x512, 1024x1024x2048, 2048x512x512"""
SMALL = [*_squares(256, 384, 576, 640, 768, 1536), *map(Case.named, SMALL_NAMES.split(","))]

QUICK = {"gpu": [*_squares(1024), Case(127, 129, 131)], "cpu": [*_squares(128), Case(63, 65, 67)]}

#: The squares of which the best XLA rate is the ceiling.
CEILINGS = {"gpu": _squares(4096, 8192), "cpu": _squares(512, 1024)}
QUICK_CEILINGS = {"gpu": _squares(4096), "cpu": _squares(256)}

#: Full f32 runs at a sixteenth of bf16's rate on a GPU: larger products than these operations say nothing new.
F32_OPERATIONS = 2e12


def operand_dtype(dtype: str) -> str:
    """That of the operands in memory."""
    return "float32" if dtype == "tf32" else dtype


def cases(dtype: str, quick: bool) -> list[Case]:
    """The products for the device at hand."""
    device = _backend()
    if dtype.startswith("float8"):
        return CASES["gpu, 8 bits"] if device == "gpu" and not quick else QUICK[device]
    found = (QUICK if quick else CASES)[device]
    return [case for case in found if dtype != "float32" or case.operations <= F32_OPERATIONS]


def _backend():
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


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
    """jaxops's product and XLA's; bf16 results of 8-bit operands, with fast sums, as is XLA's default."""
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
    precision = "default" if eight_bits or dtype == "tf32" else "highest"
    return tuple(_in_precision(product, precision) for product in products)


def _in_precision(function, precision):
    def product(*operands):
        with jax.default_matmul_precision(precision):
            return function(*operands)

    return product


def ceiling(dtype: str, clock: harness.Clock, settings: harness.Settings) -> float:
    """XLA's best rate on a square product."""
    rates = []
    for case in (QUICK_CEILINGS if settings.quick else CEILINGS)[_backend()]:
        draw = harness.drawing(functools.partial(operands, case, dtype))
        product = harness.Calls(harness.compiled(functions(case, dtype)[1]), [draw(0)])
        times = harness.alternate(clock, {"xla": product}, settings.seconds, settings.rounds)
        rates.append(case.operations / times["xla"] / 1e12)
    return max(rates)


def tasks(dtype: str, ceiling: float, quick: bool, own: bool = False) -> list[harness.Task]:
    """The measurements of a dtype. Gradients only of plain products: those of the others are such products too.

    What is timed is what a user gets: the kernel that jaxops chooses, which can be XLA's own. own: those of matmul_own.
    """
    found = []
    measured = cases(dtype, quick)
    if own:
        more = [] if quick or dtype.startswith("float8") else [*FEW_ROWS, *SMALL]
        measured = list(dict.fromkeys([*(case for case in measured if case.op == "matmul"), *more]))
    for case in measured:
        ours, reference = functions(case, dtype)
        draw = harness.drawing(functools.partial(operands, case, dtype))
        plain = case.op == "matmul" and case.layout == "NN" and not dtype.startswith("float8") and not own
        for direction, products in (("forward", 1), ("backward", 2))[: 2 if plain else 1]:
            found.append(
                harness.Task(
                    op="matmul_own" if own else case.op,
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


def run(clock: harness.Clock, settings: harness.Settings, own: bool = False) -> bool:
    """Measures the products; False if a measurement failed."""
    succeeded = True
    for dtype in settings.dtypes:
        best = ceiling(dtype, clock, settings)
        title = f"matmul{'_own' if own else ''} (m x n x k), {dtype}; ceiling: XLA's best square product"
        succeeded &= harness.run(title, tasks(dtype, best, settings.quick, own), clock, settings)
    return succeeded


def run_own(clock: harness.Clock, settings: harness.Settings) -> bool:
    """The same on our own kernels; False also where there are none."""
    device = choices.local_device()
    if _backend() == "cpu" or device.capability != choices.H200.capability:
        settings.console.print("FAILED matmul_own: its kernels need a Hopper GPU", style="red")
        return False
    jax.clear_caches()  # of products lowered by the choice
    try:
        with mock.patch.object(choices, "slower_than_xla", return_value=None):
            return run(clock, settings, own=True)
    finally:
        jax.clear_caches()

"""Gated MLPs, forward and with their gradients: plain JAX, jaxops' products, and jaxops' kernels for both products.

"XLA" is plain JAX. "jaxops, products" multiplies by jaxops.matmul; the backward pass keeps both products and computes
the activation again. "gated_matmul" has the first half in one call, "gated_mlp" the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import jaxops
from benchmarks import harness
from jaxops.ops._gated_kernel import gate

#: Tokens, width and inner width.
SHAPES = ((8192, 4096, 14336), (4096, 4096, 14336), (8192, 1024, 2816), (4096, 5120, 13824), (8192, 2048, 8192))
SMALL = ((256, 64, 160),)


@dataclasses.dataclass
class Row:
    """One row in benchmarks/results/mlp.csv; a call's times, in ms."""

    KEY: ClassVar = ("device", "shape", "activation", "direction", "contender", "dtype")

    date: str
    jaxops: str
    jax: str
    device: str
    shape: str
    activation: str
    direction: str
    contender: str
    dtype: str
    ms: float
    tflops: float
    temporary_mib: float
    timing: str


@dataclasses.dataclass(frozen=True)
class Case:
    """An MLP; direction: "forward", or with all operands' gradients."""

    tokens: int
    width: int
    inner: int
    direction: str
    dtype: str
    activation: str = "silu"

    def __str__(self) -> str:
        return f"mlp {self.tokens}x{self.width}x{self.inner} {self.activation} {self.direction} {self.dtype}"

    @property
    def operations(self) -> int:
        """The products' floating-point operations."""
        return 6 * self.tokens * self.width * self.inner * (1 if self.direction == "forward" else 3)

    def operands(self, generator: harness.Generator) -> tuple[jax.Array, ...]:
        """Activations, weights, and the result's cotangent."""
        shapes = [(self.width, self.inner)] * 2 + [(self.inner, self.width)]
        weights = (generator.standard_normal(shape) / shape[0] ** 0.5 for shape in shapes)
        rows = (generator.standard_normal((self.tokens, self.width)) for _ in range(2))
        x, cotangent = rows
        return tuple(a.astype(self.dtype) for a in (x, *weights, cotangent))

    def contenders(self) -> dict[str, Callable[..., Any]]:
        """Functions on the operands."""
        act = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}[self.activation]

        def products(x, w_gate, w_up, w_down):
            hidden = gate(jaxops.matmul(x, w_gate), jaxops.matmul(x, w_up), self.activation)
            return jaxops.matmul(hidden, w_down)

        def first_half(x, w_gate, w_up, w_down):
            return jaxops.matmul(jaxops.gated_matmul(x, w_gate, w_up, activation=self.activation), w_down)

        functions = {
            "XLA": lambda x, w_gate, w_up, w_down: (act(x @ w_gate) * (x @ w_up)) @ w_down,
            "jaxops, products": products,
            "gated_matmul": first_half,
            "gated_mlp": lambda *operands: jaxops.gated_mlp(*operands, activation=self.activation),
        }
        if self.direction == "forward":
            return {name: lambda *operands, f=f: f(*operands[:-1]) for name, f in functions.items()}

        def both(function):
            def run(*operands):
                out, pullback = jax.vjp(function, *operands[:-1])
                return out, pullback(operands[-1])

            return run

        return {name: both(f) for name, f in functions.items()}


def cases(settings: harness.Settings) -> Iterator[Case]:
    """Few and small ones if quick, or on the CPU."""
    small = settings.quick or harness.backend() == "cpu"
    for dtype in settings.dtypes:
        if dtype == "float32" and not small:
            continue  # there is no kernel
        for shape in SMALL if small else SHAPES:
            yield from (Case(*shape, direction, dtype) for direction in ("forward", "forward and gradients"))


@jax.jit
def _distance(got, wanted):
    """The difference relative to the norm."""
    got, wanted = (jnp.ravel(x).astype(jnp.float32) for x in (got, wanted))
    return jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)


def measure(case: Case, clock: harness.Clock, settings: harness.Settings) -> Iterator[Row]:
    """A row for each contender; their results must agree."""
    calls, memory = harness.contenders(case)
    wanted = None
    for name, call in calls.items():
        results = jax.tree.leaves(call.function(*call.operand_sets[0]))
        wanted = results if wanted is None else wanted
        for i, (a, b) in enumerate(zip(results, wanted, strict=True)):
            if not (distance := float(_distance(a, b))) <= harness.TOLERANCES[case.dtype]:
                raise ArithmeticError(f"{name}: result {i} differs from XLA's by {distance:.1e} of its norm")
    del wanted, results
    seconds = harness.alternate(clock, calls, settings.seconds, settings.rounds)
    for name in calls:
        yield Row(
            **harness.origin(),
            shape=f"{case.tokens}x{case.width}x{case.inner}",
            activation=case.activation,
            direction=case.direction,
            contender=name,
            dtype=case.dtype,
            ms=1e3 * seconds[name],
            tflops=case.operations / seconds[name] / 1e12,
            temporary_mib=memory[name],
            timing=clock.name,
        )


def run(clock: harness.Clock, settings: harness.Settings) -> bool:
    """Measures every case, prints a table and records it; False if a measurement failed."""
    columns = {"TFLOP/s": lambda row: f"{row.tflops:.0f}", "temporary MiB": lambda row: f"{row.temporary_mib:.0f}"}
    return harness.run_contenders(
        "mlp", cases(settings), lambda case: measure(case, clock, settings), columns, settings
    )

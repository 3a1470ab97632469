"""Losses from logits, and from hidden states, beside optax and XLA's best form, with the memory each takes.

XLA's best form is logsumexp in f32 minus a masked sum: it writes neither f32 logits nor a one-hot array. Memory is the
compiled program's allocation besides its operands and results.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from rich.table import Table

import jaxops
from benchmarks import harness

#: [tokens, vocabulary] for a loss from logits, and [tokens, width, vocabulary] for one from hidden states.
LOGITS = (
    *((8192, 50304), (8192, 50257), (8192, 128256), (4096, 151936)),
    *((1 << 20, 256), (1 << 18, 1000), (1 << 17, 4096)),
    *((1, 128256), (8, 128256), (64, 128256), (64, 32000), (16, 4096)),
)
HIDDEN = ((8192, 768, 50304), (8192, 1024, 50304), (4096, 4096, 128256), (8192, 4096, 128256), (32768, 2560, 128256))
SMALL_LOGITS, SMALL_HIDDEN = ((64, 1000), (7, 4097)), ((256, 32, 512),)


@dataclasses.dataclass
class Row:
    """One row in benchmarks/results/loss.csv; a call's times, in ms."""

    KEY: ClassVar = ("device", "shape", "direction", "contender", "dtype")

    date: str
    jaxops: str
    jax: str
    device: str
    shape: str
    direction: str
    contender: str
    dtype: str
    ms: float
    temporary_mib: float
    loss: float
    timing: str


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss and its operands' shape; direction: "forward", or with the gradients."""

    shape: tuple[int, ...]
    direction: str
    dtype: str

    def __str__(self) -> str:
        kind = "logits" if len(self.shape) == 2 else "hidden states"
        return f"{kind} {'x'.join(map(str, self.shape))} {self.direction} {self.dtype}"

    def operands(self, generator: harness.Generator) -> tuple[jax.Array, ...]:
        """Logits, or hidden states and weights; labels."""
        tokens, *_, columns = self.shape
        spread = generator.standard_normal((tokens,))
        labels = jnp.clip(jnp.abs(spread) / 4 * columns, 0, columns - 1).astype(jnp.int32)
        if len(self.shape) == 2:
            return (3 * generator.standard_normal(self.shape)).astype(self.dtype), labels
        _, width, _ = self.shape
        x = generator.standard_normal((tokens, width)).astype(self.dtype)
        return x, (generator.standard_normal((width, columns)) / width**0.5).astype(self.dtype), labels

    def contenders(self) -> dict[str, Callable[..., Any]]:
        """Functions on the operands: the mean loss, or the loss and the gradients."""
        losses = {
            "XLA's best form": best_form,
            "optax": optax.softmax_cross_entropy_with_integer_labels,
            "jaxops": jaxops.softmax_cross_entropy_with_integer_labels,
        }
        if len(self.shape) == 2:
            means = {name: lambda x, labels, f=f: jnp.mean(f(x, labels)) for name, f in losses.items()}
        else:
            means = {name: lambda x, w, labels, f=f: jnp.mean(f(x @ w, labels)) for name, f in losses.items()}
            means["jaxops, linear"] = lambda x, w, labels: jaxops.linear_cross_entropy(x, w, labels, reduction="mean")
        if self.direction == "forward":
            return means
        both = {name: jax.value_and_grad(f, tuple(range(len(self.shape) - 1))) for name, f in means.items()}
        if len(self.shape) == 2:
            both["jaxops, in one pass"] = _in_one_pass
        return both


def best_form(x: jax.Array, labels: jax.Array) -> jax.Array:
    """Of logits, in f32."""
    x = x.astype(jnp.float32)
    here = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == labels[..., None]
    return jax.nn.logsumexp(x, axis=-1) - jnp.sum(jnp.where(here, x, 0), axis=-1)


def _in_one_pass(x, labels):
    loss, gradient = jaxops.softmax_cross_entropy_value_and_grad(x, labels, 1 / len(x))
    return jnp.mean(loss), (gradient,)


def cases(settings: harness.Settings) -> Iterator[Case]:
    """Few and small ones if quick, or on the CPU."""
    small = settings.quick or harness.backend() == "cpu"
    for dtype in settings.dtypes:
        for shape in (*(SMALL_LOGITS if small else LOGITS), *(SMALL_HIDDEN if small else HIDDEN)):
            if dtype == "float32" and len(shape) == 3 and not small:
                continue
            yield from (Case(shape, direction, dtype) for direction in ("forward", "value and gradients"))


def measure(case: Case, clock: harness.Clock, settings: harness.Settings) -> Iterator[Row]:
    """A row for each contender; their losses must agree."""
    draw = harness.drawing(case.operands)
    first = draw(0)
    sets = [first, *(draw(seed) for seed in range(1, harness.copies(first)))]
    lowered = {name: harness.compiled(f).lower(*first) for name, f in case.contenders().items()}
    calls, memory, losses = {}, {}, {}
    for name, program in harness.compile_all(lowered).items():
        memory[name] = program.memory_analysis().temp_size_in_bytes / 2**20
        value = program(*first)
        losses[name] = float(value if case.direction == "forward" else value[0])
        calls[name] = harness.Calls(program, sets)
        del value
    wanted = losses["XLA's best form"]
    for name, loss in losses.items():
        if not abs(loss - wanted) <= 0.02 * abs(wanted):
            raise ArithmeticError(f"{name}: loss {loss} instead of {wanted}")
    seconds = harness.alternate(clock, calls, settings.seconds, settings.rounds)
    for name in calls:
        yield Row(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            jaxops=jaxops.__version__,
            jax=jax.__version__,
            device=harness.device_name(),
            shape="x".join(map(str, case.shape)),
            direction=case.direction,
            contender=name,
            dtype=case.dtype,
            ms=1e3 * seconds[name],
            temporary_mib=memory[name],
            loss=losses[name],
            timing=clock.name,
        )


def run(clock: harness.Clock, settings: harness.Settings) -> bool:
    """Measures every case, prints a table and records it; False if a measurement failed."""
    succeeded = True
    table = Table(title="losses")
    for heading in ("loss of", "contender", "ms", "XLA / this", "temporary MiB", "loss"):
        table.add_column(heading, justify="left" if heading in ("loss of", "contender") else "right")
    for case in settings.bar(settings.select(cases(settings), str), str):
        try:
            rows = list(measure(case, clock, settings))
        except (RuntimeError, ArithmeticError) as error:  # from XLA and the device; from the losses
            settings.console.print(f"{case} FAILED: {str(error).splitlines()[0]}", style="red", markup=False)
            succeeded = False
            continue
        for i, row in enumerate(rows):
            harness.record(settings.results / "loss.csv", row)
            ratio = rows[0].ms / row.ms
            table.add_row(
                "" if i else str(case),
                row.contender,
                f"{row.ms:.4f}",
                f"{ratio:.2f}",
                f"{row.temporary_mib:.0f}",
                f"{row.loss:.5f}",
            )
    settings.console.print(table)
    return succeeded

"""Losses from logits, and from hidden states, beside optax and XLA's best form, with the memory each takes.

XLA's best form is logsumexp in f32 minus a masked sum: it writes neither f32 logits nor a one-hot array. Memory is the
compiled program's allocation besides its operands and results. With several devices, losses from hidden states also run
on all of them, with the vocabulary split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
    """A loss and its operands' shape.

    direction: "forward", or with the gradients. devices: how many share the vocabulary.
    """

    shape: tuple[int, ...]
    direction: str
    dtype: str
    devices: int = 1

    def __str__(self) -> str:
        kind = "logits" if len(self.shape) == 2 else "hidden states"
        return f"{kind} {self.label} {self.direction} {self.dtype}"

    @property
    def label(self) -> str:
        """The shape, and on how many devices."""
        return "x".join(map(str, self.shape)) + (f" on {self.devices}" if self.devices > 1 else "")

    def operands(self, generator: harness.Generator) -> tuple[jax.Array, ...]:
        """Logits, or hidden states and weights; labels."""
        tokens, *_, columns = self.shape
        spread = generator.standard_normal((tokens,))
        labels = jnp.clip(jnp.abs(spread) / 4 * columns, 0, columns - 1).astype(jnp.int32)
        if len(self.shape) == 2:
            return (3 * generator.standard_normal(self.shape)).astype(self.dtype), labels
        _, width, _ = self.shape
        x = generator.standard_normal((tokens, width)).astype(self.dtype)
        w = (generator.standard_normal((width, columns)) / width**0.5).astype(self.dtype)
        if self.devices == 1:
            return x, w, labels
        mesh = Mesh(np.array(jax.devices()[: self.devices]), ("vocabulary",))
        specs = (P(), P(None, "vocabulary"), P())
        return tuple(
            jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
            for array, spec in zip((x, w, labels), specs, strict=True)
        )

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
            devices = len(jax.devices())
            split = len(shape) == 3 and devices > 1 and shape[-1] % devices == 0
            for count in (1, devices) if split else (1,):
                yield from (Case(shape, direction, dtype, count) for direction in ("forward", "value and gradients"))


def measure(case: Case, clock: harness.Clock, settings: harness.Settings) -> Iterator[Row]:
    """A row for each contender; their losses must agree."""
    calls, memory = harness.contenders(case)
    losses = {}
    for name, call in calls.items():
        value = call.function(*call.operand_sets[0])
        losses[name] = float(value if case.direction == "forward" else value[0])
        del value
    wanted = losses["XLA's best form"]
    for name, loss in losses.items():
        if not abs(loss - wanted) <= 0.02 * abs(wanted):
            raise ArithmeticError(f"{name}: loss {loss} instead of {wanted}")
    seconds = harness.alternate(clock, calls, settings.seconds, settings.rounds)
    for name in calls:
        yield Row(
            **harness.origin(),
            shape=case.label,
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
    columns = {"temporary MiB": lambda row: f"{row.temporary_mib:.0f}", "loss": lambda row: f"{row.loss:.5f}"}
    return harness.run_contenders(
        "loss", cases(settings), lambda case: measure(case, clock, settings), columns, settings
    )

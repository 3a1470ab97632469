"""The row ops on shapes, axes and options drawn at random, beside the code that a user would write without jaxops."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from support.ops import COMPARISONS, parameter_dtype

import jaxops
from benchmarks import harness, rows

#: The options of each op, at most one at a time; "to float32" is for 16-bit operands.
OPTIONS = {
    name: {"logits": ("where", "bias", "causal", "to float32"), "norm": ("residual", "no parameters")}[case.family]
    for name, case in COMPARISONS.items()
    if case.family in ("logits", "norm")
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: x's shape, its rows' axes, and an option from OPTIONS or none."""

    op: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    option: str = ""

    def __str__(self):
        over = "" if self.axes == (len(self.shape) - 1,) else f" axis {','.join(map(str, self.axes))}"
        return f"{self.op} {'x'.join(map(str, self.shape))}{over} {self.option}".rstrip()

    @property
    def row(self) -> tuple[int, ...]:
        """One row's shape."""
        return tuple(self.shape[axis] for axis in self.axes)


def random_cases(seed: int, count: int, most: float) -> list[Case]:
    """Calls on 2^12 to `most` elements, small ones as often as large ones.

    In half the shapes rows lie along the last axis, in a quarter along another, in the others along two. Half the
    shapes have axes that are multiples of 8, the others any; nearly half the calls have an option.
    """
    rng = np.random.default_rng(seed)
    found: dict[Case, None] = {}
    while len(found) < count:
        rank = int(rng.integers(2, 5))
        parts = rng.dirichlet(np.full(rank, 2.0)) * rng.uniform(12, math.log2(most))
        step = int(rng.choice([8, 1]))
        shape = tuple(round(2**part / step) * step or round(2**part) for part in parts)
        kind = rng.choice(["last", "last", "other", "two"])
        if kind == "last":
            axes: tuple[int, ...] = (rank - 1,)
        else:
            axes = tuple(sorted(map(int, rng.choice(rank, 1 if kind == "other" else 2, replace=False))))
        op = str(rng.choice([*OPTIONS]))
        option = str(rng.choice(["", str(rng.choice(OPTIONS[op]))]))
        if option == "causal" and kind != "last":
            continue
        found[Case(op, shape, axes, option)] = None
    return [*found]


def _softmaxes(case: Case) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """jaxops's and jax.nn's, on x and the option's operand."""
    ours = functools.partial(getattr(jaxops, case.op), axis=case.axes)
    reference = functools.partial(getattr(jax.nn, case.op), axis=case.axes)

    def masked(x):
        return reference(x, where=jnp.tril(jnp.ones(x.shape[-2:], bool)))

    return {
        "": (ours, reference),
        "where": (lambda x, where: ours(x, where=where), lambda x, where: reference(x, where=where)),
        "bias": (lambda x, bias: ours(x, bias=bias), lambda x, bias: reference(x + bias)),
        "causal": (functools.partial(ours, causal=True), masked),
        "to float32": (functools.partial(ours, dtype=jnp.float32), lambda x: reference(x.astype(jnp.float32))),
    }[case.option]


def _norms(case: Case) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """jaxops's and Flax's, on x, the parameters and the residual."""
    import flax.linen as nn

    names = () if case.option == "no parameters" else ("scale", "bias") if case.op == "layer_norm" else ("scale",)
    options = {"reduction_axes": case.axes, "feature_axes": case.axes, "use_scale": bool(names)}
    module = nn.RMSNorm if case.op == "rms_norm" else functools.partial(nn.LayerNorm, use_bias=bool(names))
    residual = case.option == "residual"

    def ours(x, *others):
        parameters = dict(zip((*names, *["residual"] * residual), others, strict=True))
        return getattr(jaxops, case.op)(x, **parameters, axis=case.axes, dtype=x.dtype)

    def reference(x, *others):
        parameters = dict(zip(names, others, strict=False))
        total = x + others[-1] if residual else x
        y = module(**options, dtype=x.dtype).apply({"params": parameters} if names else {}, total)
        return (y, total) if residual else y

    return ours, reference


def _operands(case: Case, dtype: np.dtype, rng: harness.Generator) -> tuple[jax.Array, ...]:
    def normal(shape, dtype=dtype):
        return rng.standard_normal(shape).astype(dtype)

    # Broadcast along the first axis that rows do not lie along, as padding is over heads and a bias over a batch.
    shared = next((axis for axis in range(len(case.shape)) if axis not in case.axes), None)
    broadcast = tuple(1 if axis == shared else length for axis, length in enumerate(case.shape))
    if case.option == "where":
        return normal(case.shape), rng.standard_normal(broadcast) < 1.15
    if case.option == "bias":
        return normal(case.shape), normal(broadcast)
    if COMPARISONS[case.op].family == "logits":
        return (normal(case.shape),)
    parameters = 0 if case.option == "no parameters" else 2 if case.op == "layer_norm" else 1
    vectors = [normal(case.row, parameter_dtype(dtype)) for _ in range(parameters)]
    return (normal(case.shape), *vectors, *[normal(case.shape)] * (case.option == "residual"))


def tasks(cases: list[Case], dtype: str) -> list[harness.Task]:
    """A dtype's measurements, forward and backward; rates count x and the result alone."""
    found = []
    for case in cases:
        if case.option == "to float32" and jnp.dtype(dtype).itemsize > 2:
            continue
        ours, reference = (_softmaxes if COMPARISONS[case.op].family == "logits" else _norms)(case)
        draw = harness.drawing(functools.partial(_operands, case, np.dtype(dtype)))
        size = math.prod(case.shape) * jnp.dtype(dtype).itemsize
        for direction, tensors in (("forward", 2), ("backward", 3)):
            found.append(
                harness.Task(
                    op="rows_random",
                    direction=direction,
                    shape=str(case),
                    dtype=dtype,
                    ours=ours,
                    reference=reference,
                    draw=draw,
                    work=tensors * size,
                    unit="TB/s",
                    ceiling=functools.partial(rows.ceiling, size, direction),
                    differentiable=1 if case.option == "where" else None,
                )
            )
    return found


def run(clock: harness.Clock, settings: harness.Settings) -> bool:
    """Measures the seed's calls; False if a measurement failed."""
    most, count = (2**18, 4) if settings.quick or jax.default_backend() == "cpu" else (2**26, 64)
    cases = random_cases(settings.seed, count, most)
    found = [task for dtype in settings.dtypes for task in tasks(cases, dtype)]
    return harness.run("rows_random; ceiling: as many bytes of x and the result", found, clock, settings)

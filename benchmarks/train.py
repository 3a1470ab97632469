"""Whole training steps: plain Flax, XLA at its best, the model swapped or fused by one call, and jaxops' own layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import table

from benchmarks import harness, models

#: The n-th step's loss may differ by n times as much, relative: activations are bf16, and Adam's first steps are as
#: large for a gradient that is all rounding error as for any other.
LOSS_TOLERANCE = 5e-3
CHECKED_STEPS = 5

#: How far a parameter's gradient may differ, relative to its norm, or to a thousandth of the whole gradient's norm if
#: that is larger: the gradients of keys' biases are rounding errors. With two layers, bf16 gradients of both XLA and
#: jaxops differ from f32's by 0.002 to 0.03.
GRADIENT_TOLERANCE = 0.1


#: The plain model, computed in f32: what rounding does to the losses on text is measured from here.
EXACT = "float32"
#: On text, a contender's losses may be this many times as far from f32's as XLA's best.
TEXT_TOLERANCE = 1.5


@dataclasses.dataclass(frozen=True)
class Row(harness.Row):
    """ours, xla: milliseconds a step, for this contender and for XLA's best. Memory: temporary, in GiB."""

    KEY: ClassVar = harness.Row.KEY

    memory: float
    xla_memory: float


class Measured(NamedTuple):
    """seconds: a step. memory: the compiled step's temporary bytes. losses: the first steps'. gradients: the largest
    difference of a parameter's first gradient from XLA's best, relative."""

    seconds: float
    memory: int
    losses: list[float]
    gradients: float


@jax.jit
def _gradients_differ(found: Any, wanted: Any) -> Any:
    """For each parameter, the difference's norm; relative to its own norm, or a thousandth of the whole norm."""
    norms = [jax.tree.map(jnp.linalg.norm, tree) for tree in (jax.tree.map(jnp.subtract, found, wanted), wanted)]
    least = 1e-3 * jnp.linalg.norm(jnp.array(jax.tree.leaves(norms[1])))
    return jax.tree.map(lambda difference, norm: difference / jnp.maximum(norm, least), *norms)


def _losses_on_text(steps: dict[str, Any], state: Any, module: Any, count: int) -> dict[str, list[float]]:
    """Each contender's losses, from the same parameters on the same text."""
    found: dict[str, list[float]] = {}
    for name, step in steps.items():
        now, losses = state, []
        for i in range(count):
            now, loss = step(now, module.text(i))
            losses.append(loss)
        found[name] = [float(loss) for loss in losses]
    return found


def errors_on_text(text: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """By name: the mean and the largest relative difference of a contender's losses from f32's."""
    exact = np.array(text[EXACT])
    relative = {name: np.abs(np.array(losses) - exact) / np.abs(exact) for name, losses in text.items()}
    return {name: (float(np.mean(found)), float(np.max(found))) for name, found in relative.items()}


def _show_text(case: models.Case, text: dict[str, list[float]], settings: harness.Settings) -> bool:
    """Prints the losses on text; whether all are about as near to f32's as XLA's best."""
    title = f"{case.label}: losses of {settings.steps} steps on text"
    shown = table.Table(title=title, title_justify="left")
    shown.add_column("contender")
    for heading in ("first", "middle", "last", "mean error", "largest"):
        shown.add_column(heading, justify="right")
    errors, good = errors_on_text(text), True
    for name, losses in text.items():
        mean, largest = errors[name]
        within = mean <= TEXT_TOLERANCE * errors[models.BASELINE][0]
        good &= within
        numbers = (*(f"{losses[i]:.4f}" for i in (0, len(losses) // 2, -1)), f"{mean:.1e}", f"{largest:.1e}")
        shown.add_row(name, *numbers, style=None if within else "red")
    settings.console.print(shown)
    if not good:
        settings.console.print(f"FAILED {case.label}: losses on text are far from f32's", style="red", markup=False)
    return good


def _measure(
    case: models.Case, names: Sequence[str], settings: harness.Settings
) -> tuple[dict[str, Measured], dict[str, list[float]]]:
    """The named contenders' figures; their losses on text and f32's, if there are any."""
    modules = {name: case.contender(name) for name in names}
    plain = modules[models.BASELINE]
    batch = plain.batch(jax.random.key(1))
    parameters = models.draw_parameters(plain, batch)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = (parameters, zeros, zeros, jnp.zeros((), jnp.int32))
    functions = {name: module.loss for name, module in modules.items()}
    reads_text = settings.steps > 0 and plain.text is not None
    if reads_text:
        functions[EXACT] = models.exact_loss(case)
    lowered = {name: models.make_step(loss).lower(state, batch) for name, loss in functions.items()}
    steps = harness.compile_all(lowered)
    text = _losses_on_text(steps, state, plain, settings.steps) if reads_text else {}
    steps.pop(EXACT, None)
    losses: dict[str, list[float]] = {}
    differences = {models.BASELINE: 0.0}
    first = None  # the baseline's first moments after one step: a tenth of its gradients
    for name in sorted(steps, key=lambda name: name != models.BASELINE):
        now, losses[name] = state, []
        for _ in range(CHECKED_STEPS):
            now, loss = steps[name](now, batch)
            losses[name].append(float(loss))
            if first is None:
                first = now[1]
            elif name not in differences:
                found = jax.tree_util.tree_leaves_with_path(_gradients_differ(now[1], first))
                at = int(np.argmax([x for _, x in found]))  # the first NaN, if there is one
                differences[name] = float(found[at][1])
                if not differences[name] <= GRADIENT_TOLERANCE:
                    where = jax.tree_util.keystr(found[at][0], simple=True, separator=".")
                    raise ArithmeticError(f"{name}: the gradient of {where} differs by {differences[name]:.3f}")
        del now
    del first
    for name, found in losses.items():
        for i, (loss, wanted) in enumerate(zip(found, losses[models.BASELINE], strict=True)):
            if not abs(loss - wanted) <= (i + 1) * LOSS_TOLERANCE * abs(wanted):
                raise ArithmeticError(f"{name}: losses {found} instead of {losses[models.BASELINE]}")
    clock = harness.WallClock()
    clock.enough = 0.02 if settings.quick else 0.3  # a round
    calls = {name: harness.Calls(step, [(state, batch)]) for name, step in steps.items()}
    seconds = harness.alternate(clock, calls, 20 * settings.seconds, settings.rounds)
    memory = {name: step.memory_analysis() for name, step in steps.items()}
    return {
        name: Measured(
            seconds[name],
            memory[name].temp_size_in_bytes if memory[name] else 0,
            losses[name],
            differences[name],
        )
        for name in modules
    }, text


def run(settings: harness.Settings) -> bool:
    """Measures the models, records them in train.csv and prints the table; False if one failed."""
    shown = table.Table(title="Training steps", title_justify="left")
    for heading in ("model", "contender"):
        shown.add_column(heading)
    for heading in ("ms", "times best XLA", "temporary GiB", "share", "gradients", "losses of the first steps"):
        shown.add_column(heading, justify="right")
    failures: list[tuple[models.Case, Any]] = []
    cases = models.QUICK if settings.quick else models.CASES if jax.default_backend() == "gpu" else models.CPU
    every = [(case, name) for case in cases for name in models.CONTENDERS]
    chosen = settings.select(every, lambda pair: f"train {pair[0].label}: {pair[1]}")
    # The baseline is always measured.
    names = {case: [n for n in models.CONTENDERS if n == models.BASELINE or (case, n) in chosen] for case, _ in chosen}
    alike = True
    for case in settings.bar([*names], lambda case: case.label):
        try:
            measured, text = _measure(case, names[case], settings)
        except (RuntimeError, ArithmeticError) as error:  # from XLA and the device; from the losses
            failures.append((case, error))
            continue
        best = measured[models.BASELINE]
        if text:
            alike &= _show_text(case, text, settings)
        for name, found in measured.items():
            ratio, gib = best.seconds / found.seconds, found.memory / 2**30
            share = found.memory / best.memory if best.memory else 1.0
            curve = " ".join(f"{loss:.4f}" for loss in found.losses)
            numbers = (f"{1e3 * found.seconds:.2f}", f"{ratio:.3f}", f"{gib:.2f}", f"{share:.2f}")
            numbers += (f"{found.gradients:.3f}",)
            shown.add_row(case.label, name, *numbers, curve)
            if name != models.BASELINE:
                row = Row.of(
                    op="train",
                    direction=name,
                    shape=case.label,
                    dtype="bfloat16",
                    ours=1e3 * found.seconds,
                    xla=1e3 * best.seconds,
                    unit="ms",
                    ceiling=None,
                    ratio=ratio,
                    timing=harness.WallClock.name,
                    memory=gib,
                    xla_memory=best.memory / 2**30,
                )
                harness.record(settings.results / "train.csv", row)
    settings.console.print(shown)
    for case, error in failures:
        settings.console.print(f"FAILED {case.label}: {error}", style="red", markup=False)
    return alike and not failures

"""The output of the demo: tables for people, a dictionary for machines, and the plot."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from benchmarks.demo.language_model import Run, Settings
from benchmarks.demo.measurement import ROUNDING, Pair, Row, Sizes

#: How far the two loss curves may lie apart, relative to the plain one.
CURVE_TOLERANCE = 0.01


def environment_line(here: dict[str, Any]) -> str:
    """Versions, device and handlers in one line."""

    def handlers(names):
        ops = sorted({name.removesuffix("_fwd").removesuffix("_bwd") for name in names})
        return f"{len(names)} ({', '.join(ops)})" if names else "none"

    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    device = here["device"]
    registered = "; ".join(f"{name} {handlers(names)}" for name, names in here["handlers"].items())
    return f"{versions}; device: {device['count']} x {device['kind']} ({device['platform']}); handlers: {registered}"


def _digits(value: float, count: int) -> str:
    """A number with `count` significant digits, never in exponential form."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{max(0, count - 1 - math.floor(math.log10(abs(value))))}f}" if value else "0"


def measurement_table(rows: list[Row], sizes: Sizes) -> Table:
    """A row for each op and dtype; errors beyond the bound are marked."""

    def matrices(shape):
        return f"{list(shape)} @ {list(shape[::-1])}"

    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        caption_justify="left",
        title="jaxops beside jax.nn, flax.linen and jax.numpy (ref)",
        caption=(
            "error: max |result - float64| in ulp of the result's dtype at the largest float64 value, for the value "
            "and for the gradient that errs most. µs: median of a jitted call, forward and forward with backward. "
            "ratio: ref's time over that of jaxops, above 1 where jaxops is the faster.\n"
            f"Errors of {list(sizes.error_rows)} and {matrices(sizes.error_matrices)}, "
            f"times of {list(sizes.timed_rows)} and {matrices(sizes.timed_matrices)}."
        ),
    )
    for heading in ("op", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("value\nerror", "\nref", "grad\nerror", "\nref", "fwd\nµs", "\nref", "\nratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("both\nµs", "\nref", "\nratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    if any(row.worse for row in rows):
        table.add_column("", no_wrap=True)
    for row in rows:
        cells = [row.op, row.dtype.replace("bfloat", "bf").replace("float", "f")]
        for error in (row.value_error, row.gradient_error):
            cells += [_digits(error.jaxops, 2), _digits(error.reference, 2)]
        for seconds in (row.forward, row.forward_and_backward):
            cells += [_digits(1e6 * seconds.jaxops, 3), _digits(1e6 * seconds.reference, 3)]
            cells.append(f"{seconds.ratio:.2f}")
        if row.worse:
            table.add_row(*cells, "worse", style="bold red")
        else:
            table.add_row(*cells)
    return table


def loss_table(runs: dict[str, Run]) -> Table:
    """The two loss curves at about ten steps, from the first to the last."""
    plain, swapped = runs["plain"].losses, runs["jaxops"].losses
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title="Loss, nats a character")
    for heading in ("step", "plain", "jaxops", "difference"):
        table.add_column(heading, justify="right")
    for step in np.unique(np.linspace(0, len(plain) - 1, 11).round().astype(int)):
        difference = abs(swapped[step] - plain[step]) / abs(plain[step])
        table.add_row(str(step + 1), f"{plain[step]:.4f}", f"{swapped[step]:.4f}", f"{100 * difference:.1g} %")
    return table


def save_plot(runs: dict[str, Run], path: Path, title: str) -> None:
    """Draws both curves and their relative difference into a PNG file."""
    plain, swapped = (np.asarray(runs[name].losses) for name in ("plain", "jaxops"))
    steps = np.arange(1, len(plain) + 1)
    figure = Figure(figsize=(7, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.plot(steps, plain, label="flax.linen and jax.nn", linewidth=3, alpha=0.4)
    top.plot(steps, swapped, label="jaxops swapped in", linewidth=1)
    top.set(ylabel="loss, nats a character", title=title)
    top.legend()
    bottom.plot(steps, 100 * np.abs(swapped - plain) / np.abs(plain))
    bottom.axhline(100 * CURVE_TOLERANCE, linestyle="--", color="gray")
    bottom.set_yscale("symlog", linthresh=1e-5)  # linear below: differences of 0 are common
    bottom.set(xlabel="step", ylabel="difference, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def failures(rows: list[Row], difference: float) -> list[str]:
    """What is not as it must be, a sentence each."""
    found = []
    for row in rows:
        for what, error in (("value", row.value_error), ("gradient", row.gradient_error)):
            if not row.allows(error):
                found.append(
                    f"{row.op} in {row.dtype}: the {what} errs by {error.jaxops:.2f} ulp; at most {ROUNDING:.0f}, or "
                    f"the reference's {error.reference:.2f}, is allowed"
                )
    if not difference <= CURVE_TOLERANCE:
        found.append(
            f"the loss curves lie {100 * difference:.3g} % apart; at most {100 * CURVE_TOLERANCE:.0f} % is allowed"
        )
    return found


def as_dictionary(
    here: dict[str, Any],
    sizes: Sizes,
    rows: list[Row],
    settings: Settings,
    runs: dict[str, Run],
    difference: float,
    plot: Path,
    found: list[str],
) -> dict[str, Any]:
    """Everything, for JSON. Errors are in ulp, times in seconds, losses in nats a character; NaN becomes None."""

    def with_ratio(seconds: Pair):
        return {**dataclasses.asdict(seconds), "ratio": seconds.ratio}

    result = {
        **here,
        "sizes": dataclasses.asdict(sizes),
        "ops": [
            {
                "op": row.op,
                "dtype": row.dtype,
                "value_error_ulp": dataclasses.asdict(row.value_error),
                "gradient_error_ulp": dataclasses.asdict(row.gradient_error),
                "forward_seconds": with_ratio(row.forward),
                "forward_and_backward_seconds": with_ratio(row.forward_and_backward),
                "worse": row.worse,
            }
            for row in rows
        ],
        "training": {
            "settings": dataclasses.asdict(settings),
            "parameters": runs["plain"].parameter_count,
            "losses": {name: run.losses for name, run in runs.items()},
            "seconds_per_step": {name: run.seconds_per_step for name, run in runs.items()},
            "largest_relative_difference": difference,
            "plot": str(plot),
        },
        "failures": found,
    }
    return _finite(result)


def _finite(value: Any) -> Any:
    """The value with plain Python numbers, and None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value

"""`make demo`: the ops beside their references, and a language model trained on both."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

#: Packages of the `demo` extra.
_NEEDED = ("flax", "optax", "rich", "matplotlib")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Measures every op and its jax.nn counterpart against float64, then trains a small Flax language "
        "model on plain jax.nn and with jaxops swapped in.",
        epilog="Exit status: 0; 1 if an op errs by more than its reference and by more than 2 ulp, or if the loss "
        "curves differ by more than 1 %; 2 for bad arguments or missing packages.",
    )
    parser.add_argument("--quick", action="store_true", help="few steps and small arrays: about 20 seconds")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object and nothing else")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        help="directory for loss.png; created if missing (default: %(default)s)",
    )
    parser.add_argument("--steps", type=_positive, help="training steps (default: 500, with --quick 30)")
    parser.add_argument("--seed", type=int, default=0, help="random seed, 0 to 2^31 - 1 (default: 0)")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**31:
        parser.error(f"argument --seed: must be from 0 to 2^31 - 1, got {options.seed}")
    if options.steps is None:
        options.steps = 30 if options.quick else 500
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        parser.error(f"argument --out: cannot write into {options.out}: {error.strerror}")
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        parser.exit(2, f"the demo needs {', '.join(missing)}: pip install '.[demo]' in jaxops' checkout\n")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    options = _parse(arguments)

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from support.ops import COMPARISONS

    from benchmarks.demo import language_model, measurement, report
    from jaxops.__main__ import environment

    # Without a terminal to ask for its width, rich would cut the tables at 80 columns.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 110
    console = Console(width=width, quiet=options.json, highlight=False, markup=False)
    say = functools.partial(console.print, soft_wrap=not console.is_terminal)

    def progress() -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )

    here = environment()
    say(report.environment_line(here))

    sizes = measurement.Sizes.of(here["device"]["platform"], options.quick)
    rows = []
    with progress() as bar:
        task = bar.add_task("Measuring the ops", total=len(COMPARISONS) * len(measurement.DTYPES))
        for row in measurement.measure_all(sizes, options.seed):
            rows.append(row)
            bar.update(task, advance=1, description=f"Measured {row.op} {row.dtype}")
    console.print("\n", report.measurement_table(rows, sizes), sep="")

    settings = language_model.Settings(steps=options.steps, seed=options.seed)
    text = language_model.read_text()
    with progress() as bar:
        task = bar.add_task("Compiling both models", total=2 * settings.steps)
        for runs in language_model.train(settings, text):
            done = [run.losses for run in runs.values()]
            description = "Training" + "".join(
                f", {name} {run.losses[-1]:.3f}" for name, run in runs.items() if run.losses
            )
            bar.update(task, completed=sum(map(len, done)), description=description)
    plain, swapped = runs["plain"], runs["jaxops"]
    difference = language_model.largest_relative_difference(plain.losses, swapped.losses)

    plot = options.out / "loss.png"
    report.save_plot(runs, plot, f"A decoder of {plain.parameter_count:,} parameters on {here['device']['kind']}")
    found = report.failures(rows, difference)
    say(
        f"\nA character-level decoder of {plain.parameter_count:,} parameters, on {len(text):,} characters of Python's "
        f"own documentation, {settings.steps} steps of {settings.batch} x {settings.length} characters:\n"
    )
    console.print(report.loss_table(runs))
    say(
        f"\nLargest relative difference: {100 * difference:.2g} %. "
        f"A step takes {1e3 * plain.seconds_per_step:.3g} ms on plain Flax, "
        f"{1e3 * swapped.seconds_per_step:.3g} ms with jaxops. Plot: {plot}"
    )
    if options.json:
        result = report.as_dictionary(here, sizes, rows, settings, runs, difference, plot, found)
        print(json.dumps(result, allow_nan=False))
    for failure in found:
        print(f"demo: {failure}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

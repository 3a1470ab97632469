"""Times jaxops and XLA alternately in one run, on the device at hand: `python -m benchmarks OP`."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from support.ops import ROW_OPS

import jaxops
from benchmarks import (
    attention,
    budget,
    calls,
    fused,
    gradients,
    harness,
    loss,
    matmul,
    mlp,
    rows,
    rows_random,
    train,
    upstream,
)

# These need no kernel clock, and run first: it leaves CUPTI attached, which would slow them down.
BY_HOST = {
    "calls": calls.run,
    "train": train.run,
    "budget": budget.run,
    "fuse": fused.run,
    "gradients": gradients.run,
    "upstream": upstream.run,
}
OPS = ("calls", "train", *ROW_OPS, "matmul", "attention", "loss", "mlp")
# Only where asked for by name.
BY_NAME = {
    "matmul_own": matmul.run_own,
    "matmul_random": matmul.run_random,
    "rows_random": rows_random.run,
}


def _pattern(text):
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"no regular expression: {error}") from error


def _arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times jaxops and XLA alternately in one run, prints a table with the share of the ceiling "
        "measured in the same run, and records each measurement in results/OP.csv.",
    )
    parser.add_argument(
        "op",
        choices=(*OPS, *BY_HOST, *BY_NAME, "all"),
        metavar="OP",
        help=f"one of {', '.join(OPS)}, or all; or budget: where a training step's time goes; or "
        "fuse: a model in plain JAX, as it is and fused; or gradients: the errors of whole models' gradients in "
        "bf16, against f32; or upstream: transformers' Flax Llama as it is, with cuDNN's attention, swapped, and "
        "fused; or "
        "matmul_own: matmul on jaxops' own kernels where it chooses XLA's, "
        "too; or matmul_random: matmul of random sizes; or rows_random: the row ops on random shapes, axes and options",
    )
    parser.add_argument("--quick", action="store_true", help="a few small shapes and few repeats: does it run?")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=tuple(harness.TOLERANCES),
        default=["bfloat16", "float32"],
        help="dtypes of the operands, by default bfloat16 and float32; of matmul also float8_e4m3fn, and tf32: float32 "
        "in JAX's default precision, where float32 means the full one; calls is always float32, train bfloat16",
    )
    parser.add_argument(
        "--seconds", type=float, help="seconds of timing a measurement, without compilation (default 0.5, quick 0.05)"
    )
    parser.add_argument(
        "--only",
        type=_pattern,
        default="",
        metavar="PATTERN",
        help="a regular expression: only measurements with it in the label, as 'softmax backward bfloat16 65536x1024'",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(__file__).resolve().parent / "results",
        metavar="DIRECTORY",
        help="where the CSV files are (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the shapes of matmul_random and rows_random (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="of train: also trains each decoder and BERT for so many steps on text, and compares with f32's losses",
    )
    arguments = parser.parse_args(argv)
    if not arguments.op.startswith("matmul") and (only := {"float8_e4m3fn", "tf32"} & {*arguments.dtype}):
        parser.error(f"--dtype {' '.join(sorted(only))} is of matmul alone")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks; 1 if a measurement failed, or if there was none."""
    arguments = _arguments(argv)
    seconds = (0.05 if arguments.quick else 0.5) if arguments.seconds is None else arguments.seconds
    settings = harness.Settings(
        dtypes=tuple(arguments.dtype),
        quick=arguments.quick,
        seconds=seconds,
        only=arguments.only,
        results=arguments.results,
        console=harness.make_console(),
        seed=arguments.seed,
        steps=arguments.steps,
    )
    settings.console.print(f"jaxops {jaxops.__version__}, jax {jax.__version__}, {harness.device_name()}")
    selected = OPS if arguments.op == "all" else (arguments.op,)
    succeeded = True
    for op in (op for op in selected if op in BY_HOST):
        succeeded &= BY_HOST[op](settings)
    timed = [op for op in selected if op not in BY_HOST]
    if timed:
        clock, what = harness.find_clock()
        settings.console.print(f"timing: {what}", markup=False)
    for op in timed:
        run = {"matmul": matmul.run, "attention": attention.run, "loss": loss.run, "mlp": mlp.run, **BY_NAME}.get(
            op, functools.partial(rows.run, op)
        )
        succeeded &= run(clock, settings)
    if not settings.labels:
        message = f"FAILED: no measurement's label has {settings.only.pattern!r} in it"
        settings.console.print(message, style="red", markup=False)
        return 1
    settings.console.print(f"recorded in {settings.results}/*.csv")
    return 0 if succeeded else 1


if __name__ == "__main__":
    harness.keep_freed_memory()
    sys.exit(main())

"""Other plans for rows than the chosen one, timed in one process: `python -m benchmarks.sweep softmax 65536x2048`.

The sweep tries every plan that holds the rows, or the plans in `--plan "BlockRows 4 64"`: kernel, packs a thread,
lanes, blocks a cluster. A plan that is not compiled, or that the device does not run, is left out: ffi/rows/tuning.h
says which are.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from rich import table
from support.ops import COMPARISONS, ROW_OPS

from benchmarks import harness


class Plan(NamedTuple):
    """A kernel and its numbers: the arguments for `try_plan` in the compiled halves."""

    kernel: str = ""
    packs: int = 0
    lanes: int = 1
    cluster: int = 1

    @classmethod
    def parse(cls, text: str) -> Plan:
        """From "BlockRows 4 64"."""
        kernel, *numbers = text.split()
        return cls(kernel, *map(int, numbers))

    def __str__(self):
        if not self.kernel:
            return "the chosen one"
        clusters = f", clusters of {self.cluster}" if self.cluster > 1 else ""
        return f"{self.kernel}, {self.lanes} lanes x {self.packs}{clusters}"


def try_plan(plan: Plan) -> None:
    """From now on every call takes this plan."""
    from jaxops import _cpu, _cuda

    for half in (_cpu, _cuda):
        half.try_plan(*plan)


def plans(length: int, across: bool) -> Iterator[Plan]:
    """All that hold rows with so many packs."""
    for packs, cluster in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        lanes = -(-length // (packs * cluster))
        if across:
            if lanes <= 64:
                yield Plan("TileRows", packs, max(-(-lanes // 4) * 4, 16), cluster)
        elif lanes <= 32 and cluster == 1:
            yield Plan("WarpRows", packs, 1 << (lanes - 1).bit_length())
        if not across and 16 < lanes <= 1024:
            kernels = ["BlockRows"] if cluster == 1 else ["ClusterRows", "PersistentRows"]
            yield from (Plan(kernel, packs, max(-(-lanes // 32) * 32, 64), cluster) for kernel in kernels)


def task_of(op: str, direction: str, dtype: str, shape: tuple[int, ...], axis: int) -> harness.Task:
    """The measurement."""
    comparison, options = COMPARISONS[op], {} if axis == -1 else {"axis": axis}
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    return harness.Task(
        op=op,
        direction=direction,
        shape="x".join(map(str, shape)),
        dtype=dtype,
        ours=functools.partial(comparison.ours, **options),
        reference=functools.partial(comparison.reference, **options),
        draw=harness.drawing(functools.partial(comparison.operands, shape=shape, dtype=jnp.dtype(dtype))),
        work={"forward": 2, "backward": 3}[direction] * size,
        unit="TB/s",
        ceiling=None,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, the fastest plan first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=ROW_OPS)
    parser.add_argument("shape", type=lambda text: tuple(map(int, text.split("x"))))
    parser.add_argument("--axis", type=int, default=-1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--plan", type=Plan.parse, action="append", help="only these; may be given several times")
    parser.add_argument("--seconds", type=float, default=0.1, help="of timing a plan")
    options = parser.parse_args(arguments)
    across = options.axis not in (-1, len(options.shape) - 1)
    columns = options.shape[options.axis]
    pack = 1 if across else 4 if options.dtype == "float32" else 8
    clock, how = harness.find_clock()
    task = task_of(options.op, options.direction, options.dtype, options.shape, options.axis)
    rates = {}
    for plan in [Plan(), *(options.plan or plans(-(-columns // pack), across))]:
        try_plan(Plan())
        calls = task.calls(task.ours)  # compiled when it is first called: workspaces depend on the plan
        try_plan(plan)
        try:
            taken = harness.alternate(clock, {"plan": calls}, options.seconds, 3)["plan"]
        except Exception as error:  # from XLA, whose class depends on its version
            if options.plan:
                print(f"{plan}: {str(error).splitlines()[0]}")
            continue
        rates[plan] = task.work / taken / 1e12
    try_plan(Plan())
    shown = table.Table("plan", "TB/s", "of the chosen one's", title=f"{task.label}: {how}")
    for plan, rate in sorted(rates.items(), key=lambda found: -found[1]):
        shown.add_row(str(plan), f"{rate:.3f}", f"{rate / rates[Plan()]:.3f}")
    harness.make_console().print(shown)


if __name__ == "__main__":
    main()

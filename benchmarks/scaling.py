"""Weak scaling of a transformer layer on the GPUs of one machine: `python -m benchmarks.scaling`.

A step of training (loss, gradients, update) in bfloat16 on 1, 2, 4, ... devices with the same number of sequences each:
on XLA's operations, with the row ops of jaxops, and with all its ops. The parameters are split over "data" (fully
sharded data parallelism) and "model" (tensor parallelism). All contenders are compiled first and timed in turns.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import transformer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops
from benchmarks import harness

ROWS_ALONE = SimpleNamespace(
    **{
        **vars(transformer.OURS),
        **{name: getattr(transformer.PLAIN, name) for name in ("dense", "dense_gelu", "einsum")},
    }
)
CONTENDERS = {"xla": transformer.PLAIN, "jaxops, rows": ROWS_ALONE, "jaxops": transformer.OURS}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the layer; batch: sequences for each device."""

    batch: int
    positions: int
    width: int
    heads: int
    vocabulary: int


@dataclasses.dataclass
class Measurement:
    """Seconds of a step are medians of several turns of `steps` steps each."""

    KEY: ClassVar = ("device", "data", "model", "contender", "batch", "positions", "width")

    date: str
    jaxops: str
    jax: str
    device: str
    data: int
    model: int
    contender: str
    batch: int
    positions: int
    width: int
    loss: float
    step_ms: float
    fastest_ms: float
    efficiency: float  # the contender's step on one device, over its step here


class Contender:
    """A compiled step on a mesh, and its state."""

    def __init__(self, ops, mesh, sizes: Sizes):
        params = transformer.parameters(sizes.width, sizes.heads, sizes.vocabulary, jnp.bfloat16)
        shardings = {name: NamedSharding(mesh, spec) for name, spec in transformer.SPECS.items()}
        rows = NamedSharding(mesh, P("data"))
        rng = np.random.default_rng(1)
        shape = (sizes.batch * mesh.size, sizes.positions)
        x = rng.standard_normal((*shape, sizes.width), np.float32).astype(jnp.bfloat16)
        self.params = jax.device_put(params, shardings)
        self.batch = jax.device_put(x, rows), jax.device_put(rng.integers(0, sizes.vocabulary, shape), rows)

        def step(params, x, targets):
            value, gradients = jax.value_and_grad(lambda p: transformer.loss(ops, p, x, targets))(params)
            return jax.tree.map(lambda p, g: p - (1e-3 * g).astype(p.dtype), params, gradients), value

        function = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        self.step = function.lower(self.params, *self.batch).compile()
        self.turns: list[float] = []
        self.loss = float("nan")

    def run(self, steps: int) -> None:
        """A turn of so many steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.params, loss = self.step(self.params, *self.batch)
        loss.block_until_ready()
        self.turns.append((time.perf_counter() - start) / steps)
        self.loss = float(loss)


def meshes():
    """Data parallelism over 1, 2, 4, ... devices; two of them as "model" where there are four or more."""
    count = len(jax.devices())
    shapes = [(n, 1) for n in (1, 2, 4, 8) if n <= count] + [(n // 2, 2) for n in (4, 8) if n <= count]
    for data, model in shapes:
        devices = jax.devices()[: data * model]
        yield jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def measure(sizes: Sizes, steps: int, turns: int):
    """Compiles everything at once, then times the contenders of one mesh after another."""
    cases = [(mesh, name) for mesh in meshes() for name in CONTENDERS]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {(mesh, name): pool.submit(Contender, CONTENDERS[name], mesh, sizes) for mesh, name in cases}
        ready = {key: job.result() for key, job in jobs.items()}
    alone: dict[str, float] = {}
    for mesh in dict.fromkeys(mesh for mesh, _ in cases):
        here = {name: ready.pop((mesh, name)) for name in CONTENDERS}
        for contender in here.values():
            contender.run(2)
        for _ in range(turns):
            for contender in here.values():
                contender.run(steps)
        for name, contender in here.items():
            seconds = statistics.median(contender.turns[1:])
            alone.setdefault(name, seconds)
            yield Measurement(
                date=datetime.date.today().isoformat(),
                jaxops=jaxops.__version__,
                jax=jax.__version__,
                device=harness.device_name(),
                data=mesh.shape["data"],
                model=mesh.shape["model"],
                contender=name,
                batch=sizes.batch,
                positions=sizes.positions,
                width=sizes.width,
                loss=contender.loss,
                step_ms=1e3 * seconds,
                fastest_ms=1e3 * min(contender.turns[1:]),
                efficiency=alone[name] / seconds,
            )


def main() -> int:
    """Runs the benchmark and records what it measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small layer and few steps: does it run?")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(__file__).resolve().parent / "results" / "scaling.csv",
        metavar="FILE",
        help="the CSV file in which measurements are recorded (default: %(default)s)",
    )
    options = parser.parse_args()
    sizes = Sizes(1, 16, 64, 4, 64) if options.quick else Sizes(2, 2048, 4096, 32, 8192)
    steps, turns = (1, 2) if options.quick else (5, 5)
    for row in measure(sizes, steps, turns):
        harness.record(options.results, row)
        print(
            f"{row.data} x {row.model}  {row.contender:13} {row.step_ms:8.3f} ms a step (fastest "
            f"{row.fastest_ms:.3f}), efficiency {row.efficiency:.3f}, loss {row.loss:.4f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

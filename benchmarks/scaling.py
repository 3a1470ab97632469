"""A Llama-like decoder's step on several devices, beside the best that XLA has: `python -m benchmarks.scaling`.

Parameters are split over the mesh axis `data` (fully sharded data parallelism) and over `model` (tensor parallelism,
the vocabulary included); each device along `data` has its own sequences.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import harness, models

CONTENDERS = (models.BASELINE, "swapped", "jaxops")
#: How a layer's kernels are split, by its name; norms' scales are whole.
SPECS = {
    **dict.fromkeys(("query", "key", "value", "gate", "up", "logits"), P("data", "model")),
    **dict.fromkeys(("out", "down", "tokens"), P("model", "data")),
}


@dataclasses.dataclass
class Measurement:
    """A step's milliseconds are medians over several turns, each with `steps` steps.

    collectives: the compiled step's collectives, counted by kind. efficiency: the contender's step on one device, over
    its step here.
    """

    KEY: ClassVar = ("device", "data", "model", "contender", "shape")

    date: str
    jaxops: str
    jax: str
    device: str
    data: int
    model: int
    contender: str
    shape: str
    loss: float
    step_ms: float
    fastest_ms: float
    memory_gib: float
    efficiency: float
    collectives: str


def _specs(parameters) -> object:
    def spec(path, x):
        return SPECS[path[-2].key] if x.ndim == 2 else P()

    return jax.tree_util.tree_map_with_path(spec, parameters)


class Contender:
    """A compiled step on a mesh, and its state."""

    def __init__(self, name: str, mesh: Mesh, size: models.LlamaSize):
        module = models.Case(models.Llama, size).contender(name)
        batch = module.batch(jax.random.key(1))
        parameters = models.draw_parameters(module, batch)
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), _specs(parameters), is_leaf=lambda x: isinstance(x, P)
        )
        whole = NamedSharding(mesh, P())
        state_shardings = (shardings, shardings, shardings, whole)
        moments = [jax.tree.map(jnp.zeros_like, parameters) for _ in range(2)]
        self.state = jax.device_put((parameters, *moments, jnp.zeros((), jnp.int32)), state_shardings)
        self.batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        function = jax.jit(models.make_step(module.loss), donate_argnums=0, out_shardings=(state_shardings, whole))
        with jax.set_mesh(mesh):
            self.step = function.lower(self.state, self.batch).compile()
        self.turns: list[float] = []
        self.loss = float("nan")

    def run(self, steps: int) -> None:
        """A turn with so many steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state, loss = self.step(self.state, self.batch)
        loss.block_until_ready()
        self.turns.append((time.perf_counter() - start) / steps)
        self.loss = float(loss)

    def collectives(self) -> str:
        """The compiled step's collectives, counted."""
        kinds = r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
        found = collections.Counter(re.findall(rf" {kinds}", self.step.as_text()))
        return " ".join(f"{kind}:{count}" for kind, count in sorted(found.items()))


def meshes() -> Iterator[Mesh]:
    """One device; then all of them along `data`, along `model`, and, if there are four or more, along both."""
    count = 1 << (len(jax.devices()).bit_length() - 1)
    shapes = {(1, 1): None, (count, 1): None, (1, count): None}
    if count >= 4:
        shapes[count // 2, 2] = None
    for data, model in shapes:
        devices = jax.devices()[: data * model]
        yield jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def measure(size: models.LlamaSize, steps: int, turns: int) -> Iterator[Measurement]:
    """Compiles a mesh's contenders together, then times them in turns; `size.batch` is for a device along `data`."""
    alone: dict[str, float] = {}
    for mesh in meshes():
        here_size = dataclasses.replace(size, batch=size.batch * mesh.shape["data"])
        with concurrent.futures.ThreadPoolExecutor() as pool:
            jobs = {name: pool.submit(Contender, name, mesh, here_size) for name in CONTENDERS}
            here = {name: job.result() for name, job in jobs.items()}
        for contender in here.values():
            contender.run(2)
        for _ in range(turns):
            for contender in here.values():
                contender.run(steps)
        for name, contender in here.items():
            seconds = statistics.median(contender.turns[1:])
            alone.setdefault(name, seconds)
            memory = contender.step.memory_analysis()
            yield Measurement(
                **harness.origin(),
                data=mesh.shape["data"],
                model=mesh.shape["model"],
                contender=name,
                shape=size.label,
                loss=contender.loss,
                step_ms=1e3 * seconds,
                fastest_ms=1e3 * min(contender.turns[1:]),
                memory_gib=(memory.temp_size_in_bytes if memory else 0) / 2**30,
                efficiency=alone[name] / seconds,
                collectives=contender.collectives(),
            )


def main() -> int:
    """Runs the benchmark and records its measurements."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: does it run?")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(__file__).resolve().parent / "results" / "scaling.csv",
        metavar="FILE",
        help="the CSV file in which measurements are recorded (default: %(default)s)",
    )
    options = parser.parse_args()
    size = models.LlamaSize(1, 256, 64, 2, 512) if options.quick else models.LlamaSize(4, 2048, 4096, 1, 32768)
    steps, turns = (1, 2) if options.quick else (3, 5)
    for row in measure(size, steps, turns):
        harness.record(options.results, row)
        print(
            f"{row.data} x {row.model}  {row.contender:9} {row.step_ms:8.3f} ms a step (fastest {row.fastest_ms:.3f}), "
            f"efficiency {row.efficiency:.3f}, loss {row.loss:.4f}, {row.memory_gib:.2f} GiB, {row.collectives}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

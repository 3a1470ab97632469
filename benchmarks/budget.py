"""Where a training step's microseconds go: kernels by kind and source line, gaps between them, and the floor."""

from __future__ import annotations

import collections
import dataclasses
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from rich import table

from benchmarks import harness, models

STEPS = 4

#: Kernel kinds, by the first expression that is found in a kernel's name.
KINDS = {
    "attention": r"(?i)attention|flash|sdpa|fmha|cudnn_generated",
    "loss": r"(?i)cross_?entropy",
    "norms and softmax": r"Rows|Row(Kernel|Sums|Stream)|ColumnSums",
    "epilogues' gradients": r"(?i)epilogue",
    "products": r"(?i)matmul|gemm|nvjet|cutlass|xmma|wgmma|splitK",
    "copies and fills": r"(?i)memcpy|memset|copy",
    "elementwise": r"",
}


@dataclasses.dataclass(frozen=True)
class Row(harness.Row):
    """ours: microseconds of a step in kernels of this kind, which `direction` names. ceiling: the least microseconds.

    contender: whose step. kernels: how many run.
    """

    KEY: ClassVar = (*harness.Row.KEY, "contender")

    contender: str
    kernels: int


class Event(NamedTuple):
    """A kernel's run, in microseconds."""

    name: str
    start: float
    duration: float


@dataclasses.dataclass
class Budget:
    """A step: its microseconds by the wall clock; its kernels' runs under the profiler, where they take a few percent
    longer; the HLO that tells where they come from.
    """

    wall: float
    events: list[Event]
    hlo: str

    def kinds(self) -> dict[str, list[Event]]:
        """Each kind's events."""
        found: dict[str, list[Event]] = {kind: [] for kind in KINDS}
        for event in self.events:
            found[next(kind for kind, pattern in KINDS.items() if re.search(pattern, event.name))].append(event)
        return found

    @property
    def busy(self) -> float:
        """Microseconds in which at least one kernel runs."""
        total, end = 0.0, 0.0
        for event in sorted(self.events, key=lambda event: event.start):
            total += max(0.0, event.start + event.duration - max(end, event.start))
            end = max(end, event.start + event.duration)
        return total

    @property
    def gaps(self) -> float:
        """Microseconds between the first kernel's start and the last one's end in which none runs."""
        first = min((event.start for event in self.events), default=0.0)
        return max((event.start + event.duration for event in self.events), default=0.0) - first - self.busy

    def sources(self) -> dict[str, str]:
        """For each fused kernel the operation and the source line that the compiler names for it."""
        found = {}
        pattern = r'%?([\w.-]+) = [^\n]*metadata=\{[^}]*?op_name="([^"]*)"([^}]*)\}'
        for name, operation, rest in re.findall(pattern, self.hlo):
            line = re.search(r'source_file="([^"]*)"[^}]*source_line=(\d+)', rest)
            where = f" {Path(line[1]).name}:{line[2]}" if line else ""
            found[re.sub(r"[.-]", "_", name)] = "/".join(operation.split("/")[-3:]) + where
        return found


def read_events(folder: Path) -> list[Event]:
    """The first GPU's kernels in a profile."""
    (path,) = folder.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU:0")]
    return [
        Event(event.name, event.start_ns / 1e3, event.duration_ns / 1e3)
        for plane in planes
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def profile(case: models.Case, name: str) -> Budget:
    """Runs some steps with a contender, first timed, then profiled."""
    module = case.contender(name)
    batch = module.batch(jax.random.key(1))
    parameters = models.draw_parameters(module, batch)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = (parameters, zeros, zeros, jnp.zeros((), jnp.int32))
    step = models.make_step(module.loss).lower(state, batch).compile()

    def run() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            out = step(state, batch)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / STEPS * 1e6

    run()
    wall = statistics.median(run() for _ in range(5))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        events = read_events(Path(folder))
    return Budget(wall, events, step.as_text())


def floors(case: models.Case, flops: float, bytes_: float) -> dict[str, float]:
    """The least microseconds for each kind at these rates, in flops and bytes a second.

    Products: 6 flops a token for each number in a kernel. Attention: the two products forward, five backward, half of
    them if causal. Norms: x read and written, forward; x and two gradients, backward. Elementwise: AdamW reads four
    f32 arrays of the parameters' size, and writes three.
    """
    size = case.size
    module = case.contender(models.BASELINE)
    shapes = jax.eval_shape(lambda key: module.init(key, *module.example(module.batch(key))), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    kernels = sum(x.size for path, x in leaves if path[-1].key == "kernel")
    if getattr(size, "tied", False):
        kernels += size.vocabulary * size.width
    tokens = size.batch * size.length
    causal = 0.5 if case.model in (models.Gpt, models.Llama) else 1.0
    attention = 14 * causal * tokens * size.length * size.width * size.layers
    norms = (2 * size.layers + 1) * tokens * size.width * 2 * (2 + 3)
    return {
        "products": 6 * kernels * tokens / flops * 1e6,
        "attention": attention / flops * 1e6,
        "norms and softmax": norms / bytes_ * 1e6,
        "elementwise": 28 * models.count(shapes) / bytes_ * 1e6,
    }


def ceilings() -> tuple[float, float]:
    """Flops and bytes a second in XLA's product of 8192 cubed and in its copy of 1 GiB, measured here."""
    x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    big = jax.random.normal(jax.random.key(0), (2**28,), jnp.float32)
    clock = harness.WallClock()
    calls = {
        "product": harness.Calls(jax.jit(jnp.matmul), [(x, x)]),
        "copy": harness.Calls(jax.jit(jnp.negative), [(big,)]),
    }
    seconds = harness.alternate(clock, calls, 0.2, 5)
    return 2 * 8192**3 / seconds["product"], 2 * big.nbytes / seconds["copy"]


def _largest(events: Iterable[Event], most: int) -> list[tuple[str, float, int]]:
    groups: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        groups[event.name].append(event.duration)
    totals = [(name, sum(found) / STEPS, round(len(found) / STEPS)) for name, found in groups.items()]
    return sorted(totals, key=lambda total: -total[1])[:most]


def _show(case: models.Case, name: str, budget: Budget, floor: dict[str, float], settings: harness.Settings) -> None:
    shown = table.Table(title=f"{case.label}: {name}", title_justify="left")
    shown.add_column("kind")
    for heading in ("us", "kernels", "floor", "above it"):
        shown.add_column(heading, justify="right")

    def add(kind: str, taken: float, count: str, least: float | None) -> None:
        rest = ["", ""] if least is None else [f"{least:.0f}", f"{taken - least:.0f}"]
        shown.add_row(kind, f"{taken:.0f}", count, *rest)
        row = Row.of(
            op="budget",
            direction=kind,
            shape=case.label,
            dtype="bfloat16",
            ours=taken,
            xla=None,
            unit="us",
            ceiling=least,
            ratio=None,
            timing="JAX's profiler",
            contender=name,
            kernels=int(count or 0),
        )
        harness.record(settings.results / "budget.csv", row)

    for kind, events in budget.kinds().items():
        if events:
            taken = sum(event.duration for event in events) / STEPS
            add(kind, taken, str(round(len(events) / STEPS)), floor.get(kind, 0.0))
    add("gaps between kernels", budget.gaps / STEPS, "", 0.0)
    add("the step", budget.wall, str(round(len(budget.events) / STEPS)), sum(floor.values()))
    settings.console.print(shown)

    sources = budget.sources()
    largest = table.Table(title="largest kernels", title_justify="left")
    for heading in ("kernel", "from"):
        largest.add_column(heading, overflow="fold")
    for heading in ("us", "launches"):
        largest.add_column(heading, justify="right")
    for kernel, taken, launches in _largest(budget.events, 30):
        largest.add_row(kernel[:60], sources.get(kernel, "")[-60:], f"{taken:.0f}", str(launches))
    settings.console.print(largest)


def run(settings: harness.Settings) -> bool:
    """Profiles the selected models and prints their budgets; False if there is no GPU."""
    if jax.default_backend() != "gpu":
        settings.labels.append("budget")
        settings.console.print("FAILED budget: it reads a GPU's profile, and there is no GPU", style="red")
        return False
    cases: Sequence[Any] = models.QUICK if settings.quick else models.CASES
    every = [(case, name) for case in cases for name in (models.BASELINE, "swapped", "jaxops")]
    selected = settings.select(every, lambda pair: f"budget {pair[0].label}: {pair[1]}")
    rates = ceilings()
    settings.console.print(f"ceilings: {rates[0] / 1e12:.0f} TFLOP/s, {rates[1] / 1e12:.2f} TB/s")
    for case, name in selected:
        _show(case, name, profile(case, name), floors(case, *rates), settings)
    return True

"""The parts that the benchmarks share: operands, device time, alternating measurements, the results as CSV and as a
table."""

from __future__ import annotations

import concurrent.futures
import csv
import ctypes
import dataclasses
import datetime
import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from rich import progress, table
from rich.console import Console

import jaxops

#: Operands on a GPU rotate over copies that fill this size together: more than twice any GPU's L2 cache up to now.
FOOTPRINT = 128 << 20

#: Relative errors ||ours - reference|| / ||reference|| above these are wrong results, not rounding: four units in the
#: last place of the 16-bit dtypes; for f32, less than the 3e-4 from operands rounded to TF32, and for such products
#: ("tf32") four TF32 units.
TOLERANCES = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 1e-4, "float8_e4m3fn": 3e-2, "tf32": 4e-3}


class Generator:
    """Draws as numpy's Generator does, on the device; for jax.jit, which keeps f32 intermediates out of memory."""

    def __init__(self, key: jax.Array):
        self._keys = (jax.random.fold_in(key, i) for i in itertools.count())

    def standard_normal(self, shape: Sequence[int]) -> jax.Array:
        """Normal numbers, f32."""
        return jax.random.normal(next(self._keys), shape, jnp.float32)


def drawing(operands: Callable[[Generator], tuple]) -> Callable[[int], tuple]:
    """A function from a seed to `operands`, drawn on the device by one program."""
    return jax.jit(lambda seed: operands(Generator(jax.random.key(seed))))


class Calls:
    """Calls that run one function on several operand sets in turn, enqueued together and timed together.

    Has the methods of `jax.stages.Wrapped`, so that JAX's profiler runs it as it is.
    """

    def __init__(self, function: Callable[..., Any], operand_sets: Sequence[tuple]):
        self.function = function
        self.operand_sets = operand_sets
        self.count = len(operand_sets)
        # Runs on the CPU are not queued one behind the other, and could overlap.
        self._blocking = jax.default_backend() == "cpu"

    def __call__(self) -> Any:
        """Enqueues the calls; the last one's result."""
        out = None
        for operands in itertools.islice(itertools.cycle(self.operand_sets), self.count):
            out = self.function(*operands)
            if self._blocking:
                jax.block_until_ready(out)
        return out

    def trace(self, *_: Any) -> Any:
        """Not available."""
        raise NotImplementedError

    lower = eval_shape = trace


class WallClock:
    """Seconds a call by the host's clock, over calls enqueued back to back."""

    name = "wall clock"
    enough = 10e-3  # a round: long compared with its first call's dispatch and the wait for its last

    def __call__(self, calls: Calls) -> float:
        """Runs the calls; seconds a call."""
        start = time.perf_counter()
        jax.block_until_ready(calls())
        return (time.perf_counter() - start) / calls.count


class LatencyClock:
    """Seconds a call by the host's clock, each call awaited before the next, as in a loop that uses its results.

    Calls enqueued back to back give other ratios.
    """

    name = "wall clock, one call at a time"
    enough = 10e-3

    def __call__(self, calls: Calls) -> float:
        """Runs the calls; the median time."""
        times = []
        for operands in itertools.islice(itertools.cycle(calls.operand_sets), calls.count):
            start = time.perf_counter()
            jax.block_until_ready(calls.function(*operands))
            times.append(time.perf_counter() - start)
        return statistics.median(times)


class KernelClock:
    """Seconds a call inside kernels, as CUPTI reports them: the sum over a call's kernels, copies not included."""

    name = "CUPTI kernel time"
    enough = 1e-3

    def __init__(self):
        from jax.experimental.mosaic.gpu import profiler

        self._profiler = profiler.Cupti(finalize=False)

    def __call__(self, calls: Calls) -> float:
        """Runs the calls, twice; seconds a call in the second run."""
        milliseconds = self._profiler.measure(calls)()[1]
        if milliseconds is None:
            raise RuntimeError("CUPTI saw no kernels")
        return milliseconds / 1e3 / calls.count


Clock = WallClock | LatencyClock | KernelClock


def find_clock() -> tuple[Clock, str]:
    """The best clock for the device, and its description."""
    if jax.default_backend() != "gpu":
        return WallClock(), "wall clock"
    try:
        clock = KernelClock()
        clock(Calls(jax.jit(jnp.negative), [(jnp.ones(1024),)]))
    except Exception as error:  # any reason without CUPTI: no bindings, no permission, another subscriber
        return WallClock(), f"wall clock over many enqueued calls, launch gaps included (no CUPTI: {error})"
    return clock, "time inside kernels, by CUPTI"


def keep_freed_memory() -> None:
    """Makes glibc's malloc keep freed memory, for measurements on the CPU.

    Else it returns large buffers to the system now and then, and some calls' times, not others', include a result's
    page faults, which take several times as long as writing it.
    """
    arena_max, mmap_max, trim_threshold = -8, -4, -1  # mallopt's parameters: one heap, never map, never trim
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)


def compile_options() -> dict[str, int]:
    """Options for timed functions: no command buffers, whose concurrent kernels would be counted twice."""
    return {"xla_gpu_graph_min_graph_size": 1 << 30} if jax.default_backend() == "gpu" else {}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under jax.jit, with the options for timing."""
    return jax.jit(function, compiler_options=compile_options())


def compile_all(lowered: Mapping[str, jax.stages.Lowered]) -> dict[str, jax.stages.Compiled]:
    """The compiled programs, compiled at the same time: one after the other, training steps take a minute each."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))


def contenders(case: Any) -> tuple[dict[str, Calls], dict[str, float]]:
    """The calls of a case's contenders on its operands, and the temporary memory of each, in MiB: what the compiled
    program allocates besides operands and results.
    """
    draw = drawing(case.operands)
    first = draw(0)
    sets = [first, *(draw(seed) for seed in range(1, copies(first)))]
    programs = compile_all({name: compiled(function).lower(*first) for name, function in case.contenders().items()})
    memory = {name: program.memory_analysis().temp_size_in_bytes / 2**20 for name, program in programs.items()}
    return {name: Calls(program, sets) for name, program in programs.items()}, memory


def alternate(clock: Clock, contenders: dict[str, Calls], seconds: float, rounds: int) -> dict[str, float]:
    """Seconds a call for each contender: medians over rounds in which each runs once, in alternating order.

    Takes about `seconds` for all contenders together, and at least `rounds` rounds.
    """
    for calls in contenders.values():
        jax.block_until_ready(calls())  # compile, load, touch
        start = time.perf_counter()
        jax.block_until_ready(calls())
        once = (time.perf_counter() - start) / calls.count
        sets = len(calls.operand_sets)
        calls.count = sets * max(1, min(round(clock.enough / (sets * once)), 1024))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order, begin, done = list(contenders), time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begin < seconds:
        for name in order:
            samples[name].append(clock(contenders[name]))
        order.reverse()
        done += 1
    return {name: statistics.median(values) for name, values in samples.items()}


def copies(operands: tuple) -> int:
    """How many sets of such operands keep a GPU from finding them in its L2 cache."""
    size = sum(x.nbytes for x in operands)
    if jax.default_backend() != "gpu" or size >= FOOTPRINT:
        return 1
    return min(128, math.ceil(FOOTPRINT / max(size, 1)))


@dataclasses.dataclass(frozen=True)
class Task:
    """One measurement: an op in one direction on one shape.

    draw: from a seed to the op's operands. work: the direction's bytes or floating-point operations per call. ceiling:
    the rate that the device reaches at best, in `unit`; or a function and its operands that do as much work at that
    rate, timed beside the op.
    """

    op: str
    direction: str
    shape: str
    dtype: str
    ours: Callable[..., jax.Array]
    reference: Callable[..., jax.Array]
    draw: Callable[[int], tuple]
    work: float
    unit: str
    ceiling: float | Callable[[], Calls] | None
    differentiable: int | None = None  # how many operands, from the first, have gradients; None: all

    @property
    def label(self) -> str:
        """The label that the progress bar shows and `--only` searches."""
        return f"{self.op} {self.direction} {self.dtype} {self.shape}"

    def calls(self, function: Callable[..., jax.Array]) -> Calls:
        """The timed calls: the function, or its pullback to every operand on residuals."""
        first = self.draw(0)
        seeds = range(1, copies(first))
        if self.direction == "forward":
            return Calls(compiled(function), [first, *map(self.draw, seeds)])

        @jax.jit
        def forward(*operands):
            varied, fixed = operands[: self.differentiable], operands[len(operands[: self.differentiable]) :]
            return jax.vjp(lambda *varied: function(*varied, *fixed), *varied)

        @jax.jit
        def cotangent(y):
            def draw(y):
                return jax.random.normal(jax.random.key(1), y.shape, jnp.float32).astype(y.dtype)

            return jax.tree.map(draw, y)

        sets = []
        for operands in itertools.chain([first], map(self.draw, seeds)):
            y, pullback = forward(*operands)
            sets.append((pullback, cotangent(y)))
        return Calls(compiled(lambda pullback, dy: pullback(dy)), sets)


@jax.jit
def _relative_error(ours, reference):
    ours, reference = (jnp.ravel(x).astype(jnp.float32) for x in (ours, reference))
    difference = jnp.where(ours == reference, 0, ours - reference)  # 0 also for infinities
    size = jnp.linalg.norm(jnp.where(jnp.isfinite(reference), reference, 0))
    return jnp.linalg.norm(difference) / jnp.maximum(size, jnp.finfo(jnp.float32).tiny)


def check(task: Task, ours: Calls, reference: Calls) -> None:
    """Raises ArithmeticError if the two disagree: a wrong kernel's speed means nothing."""
    results = (jax.tree.leaves(calls.function(*calls.operand_sets[0])) for calls in (ours, reference))
    for i, (got, wanted) in enumerate(zip(*results, strict=True)):
        error = float(_relative_error(got, wanted))
        if not error <= TOLERANCES[task.dtype]:
            raise ArithmeticError(f"result {i} differs from XLA's by {error:.1e} of its norm")


def origin() -> dict[str, str]:
    """The fields with which every row begins: when, with which versions and on which device it was measured."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": now, "jaxops": jaxops.__version__, "jax": jax.__version__, "device": device_name()}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of benchmarks/results/<op>.csv.

    ours, xla, ceiling: in `unit`. ratio: how many times faster jaxops is. timing: the clock.
    """

    KEY: ClassVar = ("device", "op", "direction", "shape", "dtype")

    date: str
    jaxops: str
    jax: str
    device: str
    op: str
    direction: str
    shape: str
    dtype: str
    ours: float
    xla: float
    unit: str
    ceiling: float | None
    ratio: float
    timing: str

    @classmethod
    def of(cls, **measured: Any) -> Row:
        """A row for this device, now."""
        return cls(**origin(), **measured)


def record(path: Path, row: Any) -> None:
    """Writes a row, a dataclass, into a CSV file, replacing an earlier row for the same measurement.

    The fields that `row.KEY` names tell measurements apart.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {k: format(v, ".5g") if isinstance(v, float) else v for k, v in dataclasses.asdict(row).items()}
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    if path.exists():
        with path.open(newline="") as file:
            rows = {tuple(found[name] for name in row.KEY): found for found in csv.DictReader(file)}
    rows[tuple(str(fields[name]) for name in row.KEY)] = fields
    written = path.with_suffix(".tmp")
    with written.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(rows.values())
    written.replace(path)


def run_contenders(
    name: str,
    cases: Iterable[Any],
    measure: Callable[[Any], Iterable[Any]],
    columns: Mapping[str, Callable[[Any], str]],
    settings: Settings,
) -> bool:
    """Measures the selected cases, each with a row for every contender, the reference first; prints a table with these
    columns and records the rows in NAME.csv. False if a measurement failed.
    """
    succeeded = True
    shown = table.Table(title=name)
    shown.add_column(name)
    shown.add_column("contender")
    for heading in ("ms", "XLA / this", *columns):
        shown.add_column(heading, justify="right")
    try:
        for case in settings.bar(settings.select(cases, str), str):
            try:
                rows = list(measure(case))
            except (RuntimeError, ArithmeticError) as error:  # from XLA and the device; from the results
                settings.console.print(f"FAILED {case}: {_reason(error)}", style="red", markup=False)
                succeeded = False
                continue
            for i, row in enumerate(rows):
                record(settings.results / f"{name}.csv", row)
                cells = (f"{row.ms:.4f}", f"{rows[0].ms / row.ms:.3f}", *(show(row) for show in columns.values()))
                shown.add_row("" if i else str(case), row.contender, *cells)
    finally:  # also after an interrupt
        settings.console.print(shown)
    return succeeded


def _reason(error: Exception) -> str:
    """The message's first line, or the error's type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def backend() -> str:
    """ "cpu", or "gpu" for any accelerator: the keys of the shape tables."""
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def device_name() -> str:
    """The device's kind; for a CPU its model and how many cores are there."""
    kind = jax.devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return kind
    try:
        model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    return f"{model.group(1).strip() if model else kind}, {os.cpu_count()} cores"


def make_console() -> Console:
    """A console that does not fold tables when its output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=130)


def results_table(title: str, rows: Sequence[Row]) -> table.Table:
    """The rows as a table."""
    unit = rows[0].unit if rows else ""
    shown = table.Table(title=title, title_justify="left")
    for heading in ("op", "direction", "dtype", "shape"):
        shown.add_column(heading)
    for heading in (f"jaxops {unit}", f"XLA {unit}", "ratio", f"ceiling {unit}", "share of it"):
        shown.add_column(heading, justify="right")
    for row in rows:
        style = None if row.ratio > 0.97 else "yellow"
        ceiling = ["", ""] if row.ceiling is None else [f"{row.ceiling:.4g}", f"{row.ours / row.ceiling:.2f}"]
        numbers = [f"{row.ours:.4g}", f"{row.xla:.4g}", f"{row.ratio:.2f}", *ceiling]
        shown.add_row(row.op, row.direction, row.dtype, row.shape, *numbers, style=style)
    return shown


def measure(task: Task, clock: Clock, seconds: float, rounds: int) -> Row:
    """Times the op, the reference and the ceiling in turns."""
    contenders = {"ours": task.calls(task.ours), "xla": task.calls(task.reference)}
    check(task, contenders["ours"], contenders["xla"])
    if callable(task.ceiling):
        contenders["ceiling"] = task.ceiling()
    times = alternate(clock, contenders, seconds, rounds)
    rates = {name: task.work / taken / 1e12 for name, taken in times.items()}
    return Row.of(
        op=task.op,
        direction=task.direction,
        shape=task.shape,
        dtype=task.dtype,
        ours=rates["ours"],
        xla=rates["xla"],
        unit=task.unit,
        ceiling=rates.get("ceiling", task.ceiling),
        ratio=rates["ours"] / rates["xla"],
        timing=clock.name,
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command line's options.

    seconds: spent timing each measurement, not counting compilation. only: an expression that a measurement's label
    must contain. seed: for random numbers. steps: of training on text. labels: the measurements selected so far.
    """

    dtypes: tuple[str, ...]
    quick: bool
    seconds: float
    only: re.Pattern[str]
    results: Path
    console: Console
    seed: int = 0
    steps: int = 0
    labels: list[str] = dataclasses.field(default_factory=list)

    @property
    def rounds(self) -> int:
        """A measurement's fewest rounds."""
        return 3 if self.quick else 7

    def select(self, items: Iterable[Any], label: Callable[[Any], str]) -> list[Any]:
        """The items that `only` asks for."""
        found = [item for item in items if self.only.search(label(item))]
        self.labels.extend(map(label, found))
        return found

    def bar(self, items: Sequence[Any], label: Callable[[Any], str]) -> Iterator[Any]:
        """The items, behind a progress bar that names the current one."""
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )
        with progress.Progress(*columns, console=self.console, transient=True) as shown:
            running = shown.add_task("", total=len(items))
            for item in items:
                shown.update(running, description=label(item))
                yield item
                shown.advance(running)


def run(title: str, tasks: Sequence[Task], clock: Clock, settings: Settings) -> bool:
    """Measures the tasks, records each result as it comes and prints the table; False if one failed."""
    tasks = settings.select(tasks, lambda task: task.label)
    rows, failures = [], []
    try:
        for task in settings.bar(tasks, lambda task: task.label):
            try:
                row = measure(task, clock, settings.seconds, settings.rounds)
            except (RuntimeError, ArithmeticError) as error:  # from XLA and the device; from `check`
                failures.append((task, error))
                continue
            record(settings.results / f"{row.op}.csv", row)
            rows.append(row)
    finally:
        settings.console.print(results_table(title, rows))
        for task, error in failures:
            settings.console.print(f"FAILED {task.label}: {_reason(error)}", style="red", markup=False)
    return not failures

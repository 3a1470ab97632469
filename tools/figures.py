"""Writes the figures of docs/performance.md, and the picture in the README, from benchmarks/results/*.csv.

Every block of the page between `<!-- figures: NAME -->` and `<!-- end -->` is the output of the function NAME here.
`python tools/figures.py` rewrites the blocks; `--check` only says whether they are current.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "speed.svg"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: A cell of a column of numbers: a number, perhaps with a unit or another in brackets, or nothing.
NUMBER = re.compile(r"(\d+(\.\d+)?( (ms|us|\(.*\)))?)?$")

H200 = "NVIDIA H200"
ROW_OPS = ("softmax", "log_softmax", "layer_norm", "rms_norm")
DIRECTIONS = ("forward", "backward")
#: A measurement counts as slower than XLA below this ratio; runs differ by about 1 %.
SLOWER = 0.97
#: A tensor with as many elements is a full-size one: beyond the L2 cache of an H200 in bfloat16.
FULL_SIZE = 2**24

Row = dict[str, str]


def read(*names: str, device: str | None = H200) -> list[Row]:
    """The rows of some files, of one device; none of a file that does not exist."""
    found = []
    for path in (RESULTS / f"{name}.csv" for name in names):
        if path.exists():
            with path.open(newline="") as file:
                found += [row for row in csv.DictReader(file) if device is None or row["device"].startswith(device)]
    return found


def ratio(row: Row) -> float:
    """How many times faster jaxops was."""
    return float(row["ratio"])


def mean(rows: Iterable[Row]) -> float:
    """The geometric mean of the ratios."""
    return statistics.geometric_mean(map(ratio, rows))


def elements(row: Row) -> int:
    """How many elements the tensor has whose shape begins the row's `shape`."""
    found = re.search(r"\d+(x\d+)+", row["shape"])
    return math.prod(map(int, found[0].split("x"))) if found else 0


def select(rows: Iterable[Row], **fields: str) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def table(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns of numbers are aligned to the right."""
    lines = list(lines)
    columns = list(zip(*lines, strict=True))[1:]
    rule = ["---", *("---:" if all(NUMBER.match(cell) for cell in column) else "---" for column in columns)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, rule, *lines))


def digits(value: float) -> str:
    """Three digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def duration(milliseconds: float) -> str:
    """A time, in microseconds if it is below 0.1 ms."""
    return f"{digits(milliseconds)} ms" if milliseconds >= 0.1 else f"{digits(1000 * milliseconds)} us"


def source(command: str, rows: Sequence[Row]) -> str:
    """The line below a table: the command, the device and the dates."""
    devices = ", ".join(sorted({row["device"].removeprefix("NVIDIA ") for row in rows}))
    dates = sorted({row["date"][:10] for row in rows})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"\n*`python -m benchmarks {command}`, {devices}, {days}.*"


def lowest(rows: Iterable[Row], most: int, below: float = 1) -> list[list[str]]:
    """Table lines of the slowest measurements."""
    found = sorted((row for row in rows if ratio(row) <= below), key=ratio)[:most]
    return [
        [
            f"{row['op']} {row['shape']}".removeprefix("rows_random ").removeprefix("matmul_random "),
            row["direction"],
            row["dtype"],
            f"{ratio(row):.2f}",
        ]
        for row in found
    ]


def rows() -> str:
    """Row ops at one large shape."""
    found = select(read(*ROW_OPS), shape="32768x4096", dtype="bfloat16")

    def cell(op, direction):
        (row,) = select(found, op=op, direction=direction)
        return f"{float(row['ours']):.2f} ({float(row['xla']):.2f})"

    lines = [[f"`{op}`", *(cell(op, direction) for direction in DIRECTIONS)] for op in ROW_OPS]
    ceilings = [statistics.median(float(row["ceiling"]) for row in select(found, direction=d)) for d in DIRECTIONS]
    lines.append(["an XLA copy of as many bytes", *(f"{value:.2f}" for value in ceilings)])
    return table(["TB/s (XLA's)", *DIRECTIONS], lines) + "\n" + source("OP --seconds 0.02", found)


def rows_full_size() -> str:
    """Ratios over all full-size tensors."""
    found = [row for row in read(*ROW_OPS) if elements(row) >= FULL_SIZE]
    lines = []
    for op in ROW_OPS:
        for dtype in ("bfloat16", "float32"):
            cells = []
            for direction in DIRECTIONS:
                some = select(found, op=op, dtype=dtype, direction=direction)
                cells += [f"{mean(some):.2f}", f"{min(map(ratio, some)):.2f}"]
            lines.append([f"`{op}`, {dtype}", *cells])
    heading = ["times XLA's speed", "forward", "lowest", "backward", "lowest"]
    slow = lowest(found, 40, SLOWER)
    total = (
        f"Of {len(found)} measurements, {len(slow)} are slower than XLA by 3 % or more:\n\n"
        + table(["measurement", "direction", "dtype", "ratio"], slow)
        if slow
        else f"None of {len(found)} measurements is slower than XLA by 3 % or more."
    )
    return f"{table(heading, lines)}\n\n{total}\n{source('OP --seconds 0.02', found)}"


def rows_few() -> str:
    """Ratios of tensors of few rows."""
    found = [row for row in read(*ROW_OPS) if re.fullmatch(r"(8|64|256)x\d+", row["shape"])]
    found = select(found, dtype="bfloat16")
    lines = []
    for op in sorted({row["op"] for row in found}, key=ROW_OPS.index):
        cells = []
        for direction in DIRECTIONS:
            some = select(found, op=op, direction=direction)
            slowest = min(some, key=ratio)
            cells += [f"{mean(some):.2f}", f"{ratio(slowest):.2f} ({slowest['shape']})"]
        lines.append([f"`{op}`", *cells])
    heading = ["times XLA's speed", "forward", "lowest", "backward", "lowest"]
    return table(heading, lines) + "\n" + source("OP --dtype bfloat16 --only ' (8|64|256)x'", found)


def rows_random() -> str:
    """Ratios of random shapes, and the slowest of them."""
    found = read("rows_random")
    lines = []
    for dtype in ("bfloat16", "float32"):
        for direction in DIRECTIONS:
            some = select(found, dtype=dtype, direction=direction)
            shares = [sum(ratio(row) < limit for row in some) for limit in (0.95, 0.5)]
            lines.append([f"{dtype} {direction}", str(len(some)), f"{mean(some):.2f}", *map(str, shares)])
    heading = ["", "measurements", "times XLA's speed", "below 0.95", "below 0.5"]
    slow = table(["slowest", "direction", "dtype", "ratio"], lowest(found, 10))
    return f"{table(heading, lines)}\n\n{slow}\n{source('rows_random --seconds 0.006', found)}"


def matmul() -> str:
    """Products of bfloat16, plain and with an epilogue."""
    plain = {row["shape"]: row for row in select(read("matmul"), direction="forward", dtype="bfloat16")}
    fused = {row["shape"]: row for row in select(read("dense_gelu"), direction="forward", dtype="bfloat16")}
    shapes = sorted(
        (shape for shape in {*plain, *fused} if re.fullmatch(r"\d+x\d+x\d+", shape)),
        key=lambda shape: [*map(int, shape.split("x"))],
    )

    def cells(row):
        return [f"{float(row['ours']):.0f}", f"{ratio(row):.2f}"] if row else ["", ""]

    lines = [[shape, *cells(plain.get(shape)), *cells(fused.get(shape))] for shape in shapes]
    heading = ["m x n x k", "TFLOP/s", "ratio", "with bias and gelu", "ratio"]
    measured = [*plain.values(), *fused.values()]
    return table(heading, lines) + "\n" + source("matmul --dtype bfloat16 --seconds 0.01", measured)


def matmul_f32() -> str:
    """Products of f32 in full precision."""
    found = [
        row
        for row in select(read("matmul"), direction="forward", dtype="float32")
        if re.fullmatch(r"(\d+)x\1x\1", row["shape"])
    ]
    lines = [[row["shape"], f"{float(row['ours']):.0f}", f"{ratio(row):.2f}"] for row in found]
    return table(["m x n x k", "TFLOP/s", "ratio"], lines) + "\n" + source("matmul --dtype float32", found)


def matmul_random() -> str:
    """Products of random sizes."""
    found = select(read("matmul_random"), dtype="bfloat16")
    summary = f"{len(found)} products of random sizes and layouts: {mean(found):.2f} of XLA's speed."
    slow = table(["slowest", "direction", "dtype", "ratio"], lowest(found, 5))
    return f"{summary}\n\n{slow}\n{source('matmul_random --dtype bfloat16 --seconds 0.008', found)}"


def calls() -> str:
    """Small calls in a chain."""
    found = read("calls")
    lines = [[f"`{r['op']}`, {r['shape']}", f"{float(r['ours']):.2f}", f"{float(r['xla']):.2f}"] for r in found]
    return table(["microseconds a call", "jaxops", "XLA"], lines) + "\n" + source("calls --seconds 0.03", found)


def attention() -> str:
    """Attention beside cuDNN: both directions of a call in one line; decoding beside a copy of the cache."""
    found = read("attention")
    if not found:
        return "*Not measured yet.*"
    other = ", against the plain form"
    decoding = [row for row in found if row["unit"] == "TB/s"]
    lines, compared = [], [row for row in found if row not in decoding and not row["shape"].endswith(other)]
    for shape in dict.fromkeys(row["shape"] for row in found if row not in decoding):
        cells = []
        for direction in DIRECTIONS:
            (row,) = select(found, shape=shape, direction=direction) or [None]
            cells += [f"{float(row['ours']):.0f}", f"{ratio(row):.2f}"] if row else ["", ""]
        lines.append([shape.replace(other, " (XLA)"), *cells])
    means = (f"{mean(select(compared, direction=direction)):.2f}" for direction in DIRECTIONS)
    heading = ["batch x tokens x heads x depth", "forward, TFLOP/s", "ratio", "backward, TFLOP/s", "ratio"]
    tables = [table(heading, lines), "Geometric means of the ratios: forward {}, backward {}.".format(*means)]
    if decoding:
        cells = [
            [
                row["shape"],
                f"{float(row['ours']):.2f}",
                f"{float(row['ours']) / float(row['ceiling']):.2f}",
                row["ratio"],
            ]
            for row in decoding
        ]
        cells = [[*cell, f"{float(number):.2f}"] for *cell, number in cells]
        tables.append(table(["batch x query:keys x heads x depth", "TB/s", "share of a copy", "ratio"], cells))
    return "\n\n".join(tables) + "\n" + source("attention --dtype bfloat16 --seconds 0.05", found)


#: The contenders of losses, as headings, by name.
LOSSES = {
    "XLA's best form": "XLA",
    "optax": "optax",
    "jaxops": "jaxops",
    "jaxops, in one pass": "one pass",
    "jaxops, linear": "no logits",
}
#: The operands of losses by the number of sizes in `shape`.
LOSS_SIZES = {2: "tokens x vocabulary", 3: "tokens x width x vocabulary"}


def loss() -> str:
    """Losses beside XLA's best form and optax. The temporary memory is the linear loss's, or the fastest one's."""
    found = read("loss")
    if not found:
        return "*Not measured yet.*"
    tables = []
    for sizes, direction in itertools.product(LOSS_SIZES, dict.fromkeys(row["direction"] for row in found)):
        rows = [row for row in select(found, direction=direction) if row["shape"].count("x") == sizes - 1]
        names = [name for name in LOSSES if select(rows, contender=name)]
        lines = []
        for shape, dtype in dict.fromkeys((row["shape"], row["dtype"]) for row in rows):
            some = {row["contender"]: row for row in select(rows, shape=shape, dtype=dtype)}
            best = some["XLA's best form"]
            ours = min((some[name] for name in some if name.startswith("jaxops")), key=lambda row: float(row["ms"]))
            frugal = some.get("jaxops, linear", ours)
            lines.append(
                [
                    shape if dtype == "bfloat16" else f"{shape}, {dtype}",
                    *(duration(float(some[name]["ms"])) if name in some else "" for name in names),
                    f"{float(best['ms']) / float(ours['ms']):.2f}",
                    f"{float(frugal['temporary_mib']):.0f} ({float(best['temporary_mib']):.0f})",
                ]
            )
        if lines:
            heading = [LOSS_SIZES[sizes], *(LOSSES[name] for name in names), "ratio", "MiB (XLA's)"]
            operands = "logits" if sizes == 2 else "hidden states"
            tables.append(f"From {operands}, {direction}:\n\n{table(heading, lines)}")
    return "\n\n".join(tables) + "\n" + source("loss --seconds 0.1", found)


def train() -> str:
    """Training steps beside the best that XLA has, with their temporary memory."""
    found = read("train")
    if not found:
        return "*Not measured yet.*"
    lines = [
        [
            row["shape"],
            row["direction"],
            *(f"{float(row[column]):.1f}" for column in ("ours", "xla")),
            f"{ratio(row):.2f}",
            f"{float(row['memory']):.1f} ({float(row['xla_memory']):.1f})",
        ]
        for row in found
    ]
    heading = ["model", "contender", "ms a step", "best XLA", "ratio", "temporary GiB (best XLA)"]
    return table(heading, lines) + "\n" + source("train", found)


def budget() -> str:
    """Where a training step's time goes, by kind of kernel."""
    found = read("budget")
    if not found:
        return "*Not measured yet.*"
    tables = []
    for shape, contender in dict.fromkeys((row["shape"], row["contender"]) for row in found):
        some = select(found, shape=shape, contender=contender)
        lines = [
            [row["direction"], f"{float(row['ours']):.0f}", row["kernels"], f"{float(row['ceiling']):.0f}"]
            for row in some
        ]
        tables.append(f"{shape}, {contender}:\n\n" + table(["", "us", "kernels", "least us"], lines))
    return "\n\n".join(tables) + "\n" + source("budget", found)


def scaling() -> str:
    """Training steps on several devices."""
    found = read("scaling")
    if not found:
        return "*Not measured yet.*"
    lines = [
        [
            f"{row['data']} x {row['model']}, {row['contender']}",
            f"{float(row['step_ms']):.2f}",
            f"{float(row['efficiency']):.2f}",
            f"{float(row['memory_gib']):.2f}",
            row["collectives"],
        ]
        for row in found
    ]
    heading = ["`data` x `model`", "ms a step", "efficiency", "temporary GiB", "collectives"]
    return f"{found[0]['shape']}:\n\n{table(heading, lines)}\n" + source("scaling", found).replace(
        "benchmarks scaling", "benchmarks.scaling"
    )


def cpu() -> str:
    """The row ops on the CPU."""
    found = read(*ROW_OPS, device="AMD EPYC, 2 cores")
    lines = []
    for op in ROW_OPS:
        both = [select(found, op=op, direction=direction) for direction in DIRECTIONS]
        lines.append(
            [f"`{op}`", *(cell for some in both for cell in (f"{mean(some):.2f}", f"{min(map(ratio, some)):.2f}"))]
        )
    slower = sum(ratio(row) <= SLOWER for row in found)
    note = f"{slower} of {len(found)} measurements are slower than XLA by 3 % or more; runs differ by up to half."
    heading = ["times XLA's speed", "forward", "lowest", "backward", "lowest"]
    return f"{table(heading, lines)}\n\n{note}\n{source('OP --seconds 0.2', found)}"


FIGURES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        *(rows, rows_full_size, rows_few, rows_random),
        *(matmul, matmul_f32, matmul_random, calls, attention, loss, train, budget, scaling, cpu),
    )
}


def render(page: str) -> str:
    """The page with all of its blocks current.

    Raises:
      KeyError: a block has no function.
    """
    return BLOCK.sub(lambda m: f"{m[1]}\n{FIGURES[m[2]]()}\n\n{m[3]}", page)


def picture() -> str:
    """A bar chart of ratios to XLA, as SVG."""
    found = select(read(*ROW_OPS), shape="32768x4096", dtype="bfloat16")
    bars = [
        (f"{row['op']} {row['direction']}", ratio(row)) for row in sorted(found, key=lambda r: ROW_OPS.index(r["op"]))
    ]
    fused = select(read("dense_gelu"), direction="forward", dtype="bfloat16", shape="8192x28672x4096")
    bars += [("matmul, bias and gelu", ratio(row)) for row in fused]
    width, line, left, unit = 640, 24, 190, 90
    height = line * len(bars) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="sans-serif" font-size="13" fill="#7f7f7f">',
        "<title>Speed of jaxops' ops on an H200, as multiples of XLA's</title>",
    ]
    for i, (label, value) in enumerate(bars):
        y = 8 + line * i
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{value * unit:.1f}" height="17" fill="#1f77b4"/>')
        parts.append(f'<text x="{left + value * unit + 6:.1f}" y="{y + 13}">{value:.2f}</text>')
    bottom = line * len(bars) + 8
    parts.append(f'<path d="M{left + unit} 2V{bottom}" stroke="#ff7f0e" stroke-width="2" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{left + unit}" y="{bottom + 18}" text-anchor="middle">XLA = 1</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> int:
    """Rewrites, or checks, the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something is out of date")
    check = parser.parse_args().check
    stale = [
        (path, text)
        for path, text in ((PAGE, render(PAGE.read_text())), (PICTURE, picture()))
        if not path.exists() or path.read_text() != text
    ]
    for path, text in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

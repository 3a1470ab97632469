"""Draws benchmarks/results/*.csv for the documentation; mkdocs calls `on_files` (see mkdocs.yml)."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

#: Readable on the light and on the dark page, whose background shows through.
GRAY = "#7f7f7f"
matplotlib.rcParams.update({"svg.hashsalt": "jaxops", "svg.fonttype": "none", "font.family": "sans-serif"})
matplotlib.rcParams.update({"savefig.transparent": True, "legend.framealpha": 0})
matplotlib.rcParams.update({"grid.color": GRAY, "grid.alpha": 0.25})
matplotlib.rcParams.update(
    dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"), GRAY
    )
)

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"

#: Charts of row ops leave out smaller tensors, which an H200's L2 cache holds.
FULL_SIZE = 2**24

#: Columns of the CSV files that are drawn: label, style.
LINES = {
    "ceiling": ("XLA copy of as many bytes", {"color": GRAY, "linestyle": ":"}),
    "xla": ("XLA", {"color": "tab:orange", "marker": "s", "markersize": 4}),
    "ours": ("jaxops", {"color": "tab:blue", "marker": "o", "markersize": 4}),
}


def read_rows(path: Path) -> list[dict[str, str]]:
    """The last row of every measurement on an NVIDIA GPU; none of a file of another kind, without directions."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["device"].startswith("NVIDIA") and "direction" in row]
    return list({(row["device"], row["direction"], row["shape"], row["dtype"]): row for row in rows}.values())


def _of_one_device(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of the device with the most measurements."""
    device = statistics.mode(row["device"] for row in rows) if rows else None
    return [row for row in rows if row["device"] == device]


def _svg(figure: Figure, rows: Sequence[dict[str, str]]) -> bytes:
    said = {name: sorted({row[name] for row in rows}) for name in ("device", "jax", "date")}
    dates = dict.fromkeys(said["date"][end][:10] for end in (0, -1))
    caption = f"{', '.join(said['device'])}, jax {', '.join(said['jax'])}, measured {' to '.join(dates)}"
    figure.supxlabel(caption, x=0.01, ha="left", fontsize="small")  # a phone shows the left half first
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def draw_rows(rows: Sequence[dict[str, str]]) -> bytes | None:
    """Rates of a row op over the number of columns, by direction and dtype; the last axis of whole matrices only.

    Shows one matrix for each number of columns, the one with the most rows, on the device with the most measurements.
    Small matrices are left out. Hollow points: rows that are no multiple of 8 elements.
    """
    shown = _of_one_device([row for row in rows if re.fullmatch(r"\d+x\d+", row["shape"])])
    sizes = [(*map(int, row["shape"].split("x")), row) for row in shown]
    sizes = [size for size in sizes if size[0] * size[1] >= FULL_SIZE]
    if not sizes:
        return None
    largest = {
        (row["dtype"], row["direction"], columns): (columns, row)
        for _, columns, row in sorted(sizes, key=lambda size: size[0])
    }
    matrices = list(largest.values())
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True, squeeze=False)
    for line, dtype in zip(panels, ("bfloat16", "float32"), strict=True):
        for axes, direction in zip(line, ("forward", "backward"), strict=True):
            shown = sorted(
                ((n, row) for n, row in matrices if (row["dtype"], row["direction"]) == (dtype, direction)),
                key=lambda pair: pair[0],
            )
            for name, (label, style) in LINES.items():
                points = {n: float(row[name]) for n, row in shown if row[name]}
                aligned = {n: rate for n, rate in points.items() if n % 8 == 0}
                axes.plot(aligned.keys(), aligned.values(), label=label, **style)
                if "marker" in style:  # rows that are not aligned: a point each, no line
                    others = [[n, rate] for n, rate in points.items() if n % 8]
                    hollow = style | {"linestyle": "", "fillstyle": "none"}
                    axes.plot(*zip(*others, strict=True) if others else ([], []), **hollow)
            axes.set_title(f"{shown[0][1]['op'] if shown else ''} {direction}, {dtype}", fontsize="medium")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.grid()
    panels[0][0].set_ylim(bottom=0)
    handles, labels = panels[0][0].get_legend_handles_labels()
    hollow = Line2D([], [], color=GRAY, marker="o", markersize=4, linestyle="", fillstyle="none")
    handles, labels = [*handles, hollow], [*labels, "rows that are no multiple of 8 elements"]
    figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize="small")
    for axes in panels[-1]:
        axes.set_xlabel("columns")
    for axes in panels[:, 0]:
        axes.set_ylabel(matrices[0][1]["unit"])
    return _svg(figure, [row for _, row in matrices])


def draw_bars(rows: Sequence[dict[str, str]]) -> bytes | None:
    """Rates by shape, forward and backward side by side; of one device."""

    def order(shape):  # single products, batches, other layouts; each by size
        return " of " in shape, shape[-1].isalpha(), math.prod(map(int, re.findall(r"\d+", shape))), shape

    rows = _of_one_device(rows)
    shapes = sorted({row["shape"] for row in rows}, key=order)
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    if not shapes:
        return None
    height = 1 + 0.35 * len(shapes)
    figure = Figure(figsize=(9, height), layout="constrained")
    panels = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    for axes, direction in zip(panels, directions, strict=True):
        found = {row["shape"]: row for row in rows if row["direction"] == direction}
        for offset, name in ((0.2, "ours"), (-0.2, "xla")):
            label, style = LINES[name]
            rates = [float(found[shape][name]) if shape in found else 0.0 for shape in shapes]
            axes.barh([-i + offset for i in range(len(shapes))], rates, 0.4, label=label, color=style["color"])
        labels = [re.sub(r"^(\d+) of ", r"batch of \1, ", shape) for shape in shapes]
        axes.set_yticks([-i for i in range(len(shapes))], labels, fontsize="small")
        axes.set_ylim(-len(shapes) + 0.4, 0.6)
        axes.set_title(f"{direction}, {rows[0]['unit']}", fontsize="medium")
        axes.grid(axis="x")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, fontsize="small")
    return _svg(figure, rows)


def draw_all() -> dict[str, bytes]:
    """The charts by file name."""
    charts = {}
    for path in sorted(RESULTS.glob("*.csv")):
        if path.stem in ("matmul_own", "matmul_random", "rows_random"):  # not what users get, or sizes of chance
            continue
        if path.stem in ("budget", "loss", "mlp", "scaling", "train"):  # no rates; tables on the performance page
            continue
        rows = read_rows(path)
        if path.stem in ("matmul", "dense_gelu"):
            rows = [row for row in rows if row["dtype"] == "bfloat16"]
        chart = draw_rows(rows) if rows and rows[0]["unit"] == "TB/s" else draw_bars(rows)
        if chart is not None:
            charts[f"{path.stem}.svg"] = chart
    return charts


def on_files(files: Any, config: Any) -> Any:
    """Adds the charts to the site, as charts/OP.svg."""
    from mkdocs.structure.files import File

    for name, chart in draw_all().items():
        files.append(File.generated(config, f"charts/{name}", content=chart))
    return files

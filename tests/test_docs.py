"""The documentation: every block of Python runs, every command exists, and the charts are drawn."""

import ast
import csv
import importlib.util
import pathlib
import re
import shlex
import statistics
from unittest import mock

import pytest

from jaxops._comparison import ROW_OPS
from jaxops._device import H200
from jaxops.ops import _matmul_choice as choices

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
TRAINING = ROOT / "docs" / "training.md"
#: The languages, the title (the name of the file that the block is, or is part of), the text.
FENCE = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """Line numbers and texts of a page's blocks that are no files."""
    text = page.read_text()
    return [(text[: m.start(3)].count("\n"), m[3]) for m in FENCE.finditer(text) if m[1] == language and m[2] is None]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks(page, capsys):
    """In order, in one namespace a page, as a reader types them."""
    namespace = {"__name__": "__main__"}
    for line, block in blocks(page, "python"):
        tree = ast.increment_lineno(ast.parse(block), line)
        exec(compile(tree, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands(page):
    """Commands name targets of the Makefile, files and modules that exist, extras and options of pyproject.toml."""
    languages = {m[1] for m in FENCE.finditer(page.read_text()) if m[2] is None}
    assert languages <= {"python", "bash"}, "what a reader cannot run is no code block"
    makefile = (ROOT / "Makefile").read_text()
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for _, block in blocks(page, "bash"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
            elif words[0] == "python":
                assert (ROOT / words[1]).is_file(), line
            else:
                assert words[:2] == ["pip", "install"], line
                assert all(extra in extras for extra in re.findall(r"\[([\w-]+)\]", line)), line


def test_links():
    changes = ROOT / "CHANGELOG.md"  # a page of the site too
    places = [*((page, page.parent) for page in PAGES), (changes, changes.parent), (changes, ROOT / "docs")]
    for page, folder in places:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", FENCE.sub("", page.read_text())):
            assert (folder / target).exists() or target.endswith(".svg"), f"{page.name}: {target}"


def test_every_page_is_in_the_site():
    navigation = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(str(p.relative_to(ROOT / "docs")) for p in PAGES[:-2])


def last_rows(device, until):
    """The row ops' last measurements on a device before a time, by op, direction, shape and dtype."""
    found = {}
    for op in ROW_OPS:
        with (ROOT / "benchmarks" / "results" / f"{op}.csv").open() as file:
            for row in csv.DictReader(file):
                if row["device"] == device and row["date"] < until:
                    found[op, row["direction"], row["shape"], row["dtype"]] = row
    return found


def slower(rows):
    return sum(float(row["ratio"]) <= 0.97 for row in rows.values())


def test_figures():
    """The README's figures of the row ops are those of the rows that it names."""
    text = " ".join((ROOT / "README.md").read_text().split())
    rows = last_rows("NVIDIA H200", "2026-11-25T04:00")
    for op in ROW_OPS:
        both = (rows[op, direction, "32768x4096", "bfloat16"] for direction in ("forward", "backward"))
        rates = [f"{float(row['ours']):.2f} ({float(row['xla']):.2f})" for row in both]
        assert f"| `{op}` | {rates[0]} | {rates[1]} |" in text
    assert f"The files have {len(rows)} measurements of such sizes" in text
    assert f"Of them {slower(rows)} are slower than XLA by 3 %" in text
    time = re.search(r"last rows up to ([\d-]+), ([\d:]+)", text)
    rows = last_rows("AMD EPYC, 2 cores", f"{time[1]}T{time[2]}")
    mean = {
        direction: statistics.geometric_mean(float(row["ratio"]) for key, row in rows.items() if key[1] == direction)
        for direction in ("forward", "backward")
    }
    wanted = (
        f"{mean['forward']:.2f} times as fast as XLA forward and {mean['backward']:.2f} times backward, in the "
        f"geometric mean over {len(rows)} measurements of the four row ops, of which {slower(rows)} are slower"
    )
    assert wanted in text


def test_figures_of_few_rows():
    """The README's figures of few rows are those of the rows that it names."""
    text = " ".join((ROOT / "README.md").read_text().split())

    def of_few_rows(rows, op, columns):
        """The ratios forward and backward, by shape, and their geometric means as the README has them."""
        ratios = [
            {
                key[2]: float(row["ratio"])
                for key, row in rows.items()
                if key[:2] == (op, direction) and re.fullmatch(rf"(8|64|256)x({columns})", key[2])
            }
            for direction in ("forward", "backward")
        ]
        return ratios, [f"{statistics.geometric_mean(found.values()):.2f}" for found in ratios]

    rows = last_rows("NVIDIA H100 80GB HBM3", "2026-11-28T03:00")
    for op in ROW_OPS:
        ratios, means = of_few_rows(rows, op, "347|1024|4096")
        assert all(7 <= len(found) <= 9 for found in ratios)
        assert f"| `{op}` | {means[0]} | {means[1]} |" in text
    rows = last_rows("NVIDIA H200", "2026-11-29T04:00")
    lowest = []
    for op in ("layer_norm", "log_softmax"):
        ratios, means = of_few_rows(rows, op, "347|1024|4096|8192")
        assert all(len(found) == 12 for found in ratios)
        assert f"{op} {means[0]} and {means[1]}" in text
        assert min(ratios[0], key=ratios[0].get) == "8x8192"
        lowest.append(f"{ratios[0]['8x8192']:.2f}")
    backward = ratios[1]["8x347"]
    assert backward == min(ratios[1].values())
    assert f"{' and '.join(lowest)} forward for [8, 8192], {backward:.2f} backward for log_softmax of [8, 347]" in text


def test_figures_of_products():
    """The README's figures of f32 products in full precision are those of matmul.csv."""
    text = " ".join((ROOT / "README.md").read_text().split())
    with (ROOT / "benchmarks" / "results" / "matmul.csv").open() as file:
        found = {
            row["shape"]: row
            for row in csv.DictReader(file)
            if (row["direction"], row["dtype"]) == ("forward", "float32") and row["date"].startswith("2026-11-28T19:2")
        }
    rows = [found["x".join([str(size)] * 3)] for size in (2048, 4096, 8192)]
    rates, ratios = ([float(row[name]) for row in rows] for name in ("ours", "ratio"))
    assert "{:.1f}, {:.1f} and {:.1f} TFLOP/s, {:.2f}, {:.2f} and {:.2f} times XLA's".format(*rates, *ratios) in text


def test_figures_of_bfloat16_products():
    """The README's table of bf16 products is that of the measurements that it names."""
    found = {}
    for op in ("matmul", "dense_gelu"):
        with (ROOT / "benchmarks" / "results" / f"{op}.csv").open() as file:
            for row in csv.DictReader(file):
                if "2026-11-28T23:18" <= row["date"] < "2026-11-28T23:49" and row["direction"] == "forward":
                    found[op, row["shape"]] = f"{float(row['ratio']):.2f}"
    table = re.findall(
        r"^\| (\d+x\d+x\d+) \| ([\d.*]*) ?\| ([\d.*]*) ?\|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(table) == 19
    for shape, *cells in table:
        product = choices.Product(*map(int, shape.split("x")), "16bit")
        for op, finished, cell in zip(("matmul", "dense_gelu"), (False, True), cells, strict=True):
            star = "*" * (choices.choose(product, H200, finished, finished).kernel == "xla")
            assert cell == ((op, shape) in found) * (found.get((op, shape), "") + star)
    assert all(float(ratio) >= 0.98 for (op, _), ratio in found.items() if op == "matmul")


def test_figures_of_training():
    """docs/training.md against the rows that it names."""
    with (ROOT / "benchmarks" / "results" / "train.csv").open() as file:
        rows = {(row["shape"].split(",")[0], row["direction"], row["date"][:16]): row for row in csv.DictReader(file)}
    table = re.findall(r"^\| (\d+) of (\d+) \| (.*?) \| ([\d-]+), ([\d:]+) \|", TRAINING.read_text(), re.MULTILINE)
    assert len(table) == 3
    for layers, width, cells, day, time in table:
        both = [rows[f"{layers} layers of {width}", name, f"{day}T{time}"] for name in ("swapped", "fused")]
        ours, plain = [float(row["ours"]) for row in both], float(both[0]["xla"])
        assert cells == " | ".join([f"{plain / 1e3:.0f}", *(f"{rate / 1e3:.0f} ({rate / plain:.2f})" for rate in ours)])


def tool(name):
    """A module of tools/, which is no package."""
    specification = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_formulas():
    page = 'a <span class="arithmatex">\\(x_i &lt; \\epsilon\\)</span> b <div class="arithmatex">\\[y\\]</div> c'
    got = tool("formulas").on_page_content(page)
    assert "arithmatex" not in got and got.startswith("a <math") and got.endswith("</math> c"), got
    assert got.count("<math") == 2 and "&#x0003C;" in got and 'display="block"' in got, got


def test_charts(tmp_path):
    charts = tool("charts")
    with mock.patch.object(charts, "_svg", side_effect=lambda _, rows: rows):  # which takes a second or two
        drawn = charts.draw_all()
    for page in PAGES:
        for name in re.findall(r"charts/(\w+\.svg)", page.read_text()):
            assert drawn[name]
    chart = charts.draw_rows(charts.read_rows(charts.RESULTS / "rms_norm.csv"))
    assert chart.startswith(b"<?xml") and b"jaxops" in chart
    columns = "date,jaxops,jax,device,op,direction,shape,dtype,ours,xla,unit,ceiling,ratio,timing\n"
    rows = [f"2026-01-0{i},1,1,NVIDIA X,a,forward,4x8,bfloat16,{i},1,TB/s,,1,c\n" for i in (1, 2)]
    (tmp_path / "a.csv").write_text(
        columns + "".join(rows) + "2026-01-01,1,1,CPU,a,forward,4x8,bfloat16,9,1,TB/s,,1,c\n"
    )
    assert [row["ours"] for row in charts.read_rows(tmp_path / "a.csv")] == ["2"]
    with (tmp_path / "a.csv").open() as file:
        assert b"NVIDIA X, jax 1, measured 2026-01-01 to 2026-01-02" in charts.draw_bars(list(csv.DictReader(file))[:2])
    sizes = [("4096x8", "NVIDIA X"), ("4096x16", "NVIDIA X"), ("64x8", "NVIDIA X"), ("8192x8", "NVIDIA Y")]
    values = {"date": "2026-01-01", "jax": "1", "dtype": "float32", "direction": "forward", "unit": "TB/s"}
    values |= {"ours": "1", "xla": "1", "ceiling": ""}
    with mock.patch.object(charts, "_svg") as svg:
        charts.draw_rows([{"shape": shape, "device": device, **values} for shape, device in sizes])
    assert [row["shape"] for row in svg.call_args.args[1]] == ["4096x8", "4096x16"]

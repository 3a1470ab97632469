"""The documentation: every block of Python runs, every command exists, and the charts are drawn."""

import ast
import csv
import functools
import importlib.util
import re
import shlex
import types
from unittest import mock

import pytest
from support.pages import FENCE, PAGES, ROOT

from jaxops import _warnings


def blocks(page, language):
    """Line numbers and texts of a page's blocks that are no files."""
    text = page.read_text()
    return [(text[: m.start(3)].count("\n"), m[3]) for m in FENCE.finditer(text) if m[1] == language and m[2] is None]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks(page, capsys, monkeypatch):
    """In order, in one namespace a page, as a reader types them, to whom nothing was said before."""
    monkeypatch.setattr(_warnings, "_said", set())
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


def tool(name):
    """A module of tools/, which is no package."""
    specification = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_figures_are_current():
    """docs/performance.md and the README's picture are what tools/figures.py makes of benchmarks/results."""
    figures = tool("figures")
    page = figures.PAGE.read_text()
    assert figures.render(page) == page
    assert figures.picture() == figures.PICTURE.read_text()
    assert {*figures.FIGURES} == {name for _, name, _ in figures.BLOCK.findall(page)}
    assert figures.render(figures.BLOCK.sub(r"\1\3", page)) == page  # also from empty blocks


def test_formulas():
    page = 'a <span class="arithmatex">\\(x_i &lt; \\epsilon\\)</span> b <div class="arithmatex">\\[y\\]</div> c'
    got = tool("formulas").on_page_content(page)
    assert "arithmatex" not in got and got.startswith("a <math") and got.endswith("</math> c"), got
    assert got.count("<math") == 2 and "&#x0003C;" in got and 'display="block"' in got, got
    word = tool("formulas").on_page_content('<span class="arithmatex">\\(w_{gate}\\)</span>')
    assert '<mi mathvariant="normal">g</mi>' in word, word


def test_wrapping():
    """Lines break between words, and within names only if they are too long for a line."""
    entry = types.SimpleNamespace(title="dots_with_no_batch_dims_saveable", children=[])
    contents = [types.SimpleNamespace(title="log_softmax", children=[entry])]
    wrapped = functools.partial(tool("wrapping").on_page_content, page=types.SimpleNamespace(toc=contents))
    name = "jaxops.softmax_cross_entropy_with_integer_labels"
    long = name.replace(".", ".<wbr>").replace("_", "_<wbr>")
    assert wrapped(f"<p><code>{name}</code></p>") == f"<p><code>{long}</code></p>"
    assert wrapped(f'<h2 id="{name}">{name}</h2>') == f'<h2 id="{name}">{long}</h2>'
    assert wrapped("a <code>--out</code>") == 'a <code class="whole">--out</code>'
    assert wrapped("(<code>int</code>\n)") == '(<code class="whole">int</code>)'
    assert wrapped("<td>0, 2.5e-05</td> 3 %") == '<td>0, <span class="whole">2.5e-05</span></td> 3&nbsp;%'
    for kept in (f"<pre><code>{name} 1e-6</code></pre>", f"<p>{name} &lt;x_y&gt;</p>", "<math><mi>x</mi></math>"):
        assert wrapped(kept) == kept
    assert contents[0].title == "log_softmax"
    assert "".join(entry.title.split("<wbr>")) == "dots_with_no_batch_dims_saveable" != entry.title


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
    sizes = [
        ("4194304x8", "NVIDIA X"),
        ("4194304x16", "NVIDIA X"),
        ("2097152x8", "NVIDIA X"),
        ("8388608x8", "NVIDIA Y"),
    ]
    sizes.append(("256x24", "NVIDIA X"))  # a small one
    values = {"op": "a", "date": "2026-01-01", "jax": "1", "dtype": "float32", "direction": "forward", "unit": "TB/s"}
    values |= {"ours": "1", "xla": "1", "ceiling": ""}
    with mock.patch.object(charts, "_svg") as svg:
        charts.draw_rows([{"shape": shape, "device": device, **values} for shape, device in sizes])
    assert [row["shape"] for row in svg.call_args.args[1]] == ["4194304x8", "4194304x16"]

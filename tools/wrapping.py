"""Decides where the documentation's lines may break, mostly for narrow screens; mkdocs calls it (see mkdocs.yml)."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

#: Parts of a page that stay as they are: blocks of code, and formulas.
KEPT = re.compile(r"(<pre.*?</pre>|<math.*?</math>)", re.DOTALL)
CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
HEADING = re.compile(r"(<h[1-6][ >].*?</h[1-6]>)", re.DOTALL)

#: Shorter code fits on a phone's line, so it moves to the next line as a whole: `--out` does not end in `-`.
WHOLE = 36
#: Names that may need two lines: code on a phone, headings on a phone, and entries in the column of contents.
LONG_CODE, LONG_HEADING, LONG_ENTRY = (re.compile(rf"[^\s<>]{{{length},}}") for length in (40, 30, 20))
#: Where the first line may end.
JOINT = re.compile(r"(?<=[._(=])(?=\w)|(?<=[a-z])(?=[A-Z])")
#: A number such as 2.5e-05, which a line would end after its hyphen.
NEGATIVE_EXPONENT = re.compile(r"\b\d[\d.]*e-\d+")


def _in_text(replace: Callable[[str], str], page: str) -> str:
    """The page with its text replaced, its tags left alone."""
    return re.sub(r"(<[^>]*>)|([^<]+)", lambda found: found[1] or replace(found[2]), page)


def _breakable(text: str, long: re.Pattern[str]) -> str:
    return long.sub(lambda name: JOINT.sub("<wbr>", name[0]), text)


def _code(found: re.Match[str]) -> str:
    text = html.unescape(re.sub(r"<[^>]*>", "", found[1]))
    if len(text) <= WHOLE:
        return f'<code class="whole">{found[1]}</code>'
    return f"<code>{_in_text(lambda text: _breakable(text, LONG_CODE), found[1])}</code>"


def _wrap(part: str) -> str:
    part = HEADING.sub(lambda found: _in_text(lambda text: _breakable(text, LONG_HEADING), found[1]), part)
    part = CODE.sub(_code, part)
    part = re.sub(r"</code>\s+\)", "</code>)", part)  # mkdocstrings ends a parameter's default with a space

    def numbers(text: str) -> str:
        text = re.sub(r"(?<=\d) (?=%)", "&nbsp;", text)
        return NEGATIVE_EXPONENT.sub(r'<span class="whole">\g<0></span>', text)

    return _in_text(numbers, part)


def _mark(entries: Any) -> None:
    """Gives the entries of a table of contents, and the entries below them, their places to break."""
    for entry in entries:
        entry.title = _breakable(entry.title, LONG_ENTRY)
        _mark(entry.children)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """The page with its places to break; mkdocs calls this."""
    _mark(page.toc)
    return "".join(part if KEPT.fullmatch(part) else _wrap(part) for part in KEPT.split(content))

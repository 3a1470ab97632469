"""Turns the documentation's LaTeX formulas into MathML, which browsers show by themselves; see mkdocs.yml."""

from __future__ import annotations

import html
import re
from typing import Any

import latex2mathml.converter

#: As pymdownx.arithmatex leaves them.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

#: A word below a symbol, such as `w_{gate}`; its letters are no product of variables.
WORD = re.compile(r"_\{([A-Za-z]{2,})\}")


def on_page_content(content: str, **_: Any) -> str:
    """The page with its formulas as MathML; mkdocs calls this."""

    def convert(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        formula = WORD.sub(r"_{\\mathrm{\1}}", html.unescape(found[2]))
        return latex2mathml.converter.convert(formula, display=display)

    return FORMULA.sub(convert, content)

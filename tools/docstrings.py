"""How docstrings are read for the documentation; mkdocstrings loads it (see mkdocs.yml)."""

import re
from typing import Any

import griffe


class Markdown(griffe.Extension):
    """Sphinx's roles as Markdown, and the section `Example:` as `Examples:`, which griffe renders as code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r":math:`([^`]*)`", r"\\(\1\\)", text)
            obj.docstring.value = re.sub(r":\w+:(`[^`]*`)", r"\1", text)

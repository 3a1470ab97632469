"""How docstrings are read for the documentation; mkdocstrings loads it (see mkdocs.yml)."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Makes the section `Example:` the one that is rendered as code, which griffe calls `Examples:`."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

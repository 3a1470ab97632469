"""How docstrings are read for the documentation; mkdocstrings loads it (see mkdocs.yml)."""

import re
from typing import Any

import griffe


def _private_names(expression: Any) -> list[griffe.ExprName]:
    """The names in an annotation or a default that begin with an underscore."""
    parts = expression.iterate(flat=True) if isinstance(expression, griffe.Expr) else ()
    return [part for part in parts if isinstance(part, griffe.ExprName) and part.name.startswith("_")]


class Markdown(griffe.Extension):
    """Sphinx's roles as Markdown, and the section `Example:` as `Examples:`, which griffe renders as code.

    Readers see no private names: a default is shown as its value, a type variable without its underscore.
    """

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r":math:`([^`]*)`", r"\\(\1\\)", text)
            obj.docstring.value = re.sub(r":\w+:(`[^`]*`)", r"\1", text)
        if isinstance(obj, griffe.Function):
            for parameter in obj.parameters:
                for name in _private_names(parameter.default):
                    if parameter.default is name and name.name in obj.module.members:
                        parameter.default = obj.module.members[name.name].value
            for annotation in (obj.returns, *(parameter.annotation for parameter in obj.parameters)):
                for name in _private_names(annotation):
                    name.name = name.name.lstrip("_")

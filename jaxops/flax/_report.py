"""What a swap did."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class SwapReport:
    """Which layers and functions of a model run on jaxops, which do not, and why; `print` shows it as a table.

    Attributes:
      swapped: the layer's type, or the function's name, by the path in the model.
      kept: why a layer runs on Flax's own code, by the path; layers without arrays of their own are not listed.
    """

    swapped: dict[str, str] = dataclasses.field(default_factory=dict)
    kept: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        if not self.swapped and not self.kept:
            return "no layers found; if this is a linen model, nothing was called yet: it is swapped while it is traced"
        paths = {path: f"jaxops {what}" for path, what in self.swapped.items()}
        paths |= {path: f"kept: {why}" for path, why in self.kept.items()}
        width = max(map(len, paths))
        lines = [f"{len(self.swapped)} on jaxops, {len(self.kept)} kept"]
        return "\n".join([*lines, *(f"{path:{width}}  {paths[path]}" for path in sorted(paths))])

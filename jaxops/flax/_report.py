"""The report of a swap."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class SwapReport:
    """Lists the layers and functions of a model that run on jaxops, and why others do not; prints as a table.

    Attributes:
      swapped: by path in the model, the layer's type or the function's name.
      kept: by path, why a layer runs on Flax's code. Layers without their own arrays are not listed.
      attention: by path, "fused" or why a swapped attention has its weights as an array.
    """

    swapped: dict[str, str] = dataclasses.field(default_factory=dict)
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    attention: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        if not self.swapped and not self.kept:
            return "no layers found; if this is a linen model, nothing was called yet: it is swapped while it is traced"
        paths = {path: f"jaxops {what}" for path, what in self.swapped.items()}
        paths |= {path: f"{paths[path]}, {how}" for path, how in self.attention.items() if path in paths}
        paths |= {path: f"kept: {why}" for path, why in self.kept.items()}
        width = max(map(len, paths))
        lines = [f"{len(self.swapped)} on jaxops, {len(self.kept)} kept"]
        return "\n".join([*lines, *(f"{path:{width}}  {paths[path]}" for path in sorted(paths))])

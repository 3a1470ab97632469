"""The report of a swap."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jaxops._fuse import FuseReport, fuse

#: The nnx layers that ran while a report traces a call; None: no report does.
_ran: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("jaxops_ran", default=None)


def note_run(layer: Any) -> None:
    """Tells the report that traces a call, if one does, that a swapped layer runs."""
    if (ran := _ran.get()) is not None:
        ran.append(layer)


#: What models call the layers of their gated MLPs: the one before the activation, the one beside it, the last.
_GATED_MLPS = (("gate", "up", "down"), ("gate_proj", "up_proj", "down_proj"), ("wi_0", "wi_1", "wo"))


@dataclasses.dataclass
class SwapReport:
    """Lists the layers and functions of a model that run on jaxops, and why others do not; prints as a table.

    Attributes:
      swapped: by path in the model, the layer's type or the function's name.
      kept: by path, why a layer runs on Flax's code, or a function on JAX's. Layers without their own arrays are not
        listed.
      attention: by path, "fused" or why a swapped attention has its weights as an array.
      idle: by path, the type of swapped nnx layers that :meth:`trace` did not see run.
      left: how many norms, softmaxes, products and the like :meth:`trace` found that stay with XLA.
      gated_mlps: by path of a module, the names of its dense layers if they look like a gated MLP's.
    """

    swapped: dict[str, str] = dataclasses.field(default_factory=dict)
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    attention: dict[str, str] = dataclasses.field(default_factory=dict)
    idle: dict[str, str] = dataclasses.field(default_factory=dict)
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    _layers: dict[str, weakref.ref] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    _unbiased: set[str] = dataclasses.field(default_factory=set, repr=False, compare=False)

    @property
    def gated_mlps(self) -> dict[str, tuple[str, ...]]:
        """By path of a module, three of its swapped dense layers, without bias, whose names are a gated MLP's.

        Such as `gate`, `up` and `down`. They run one by one, because a swap does not see what the module does between
        them. `GatedMLP` in `jaxops.flax.linen` and `jaxops.flax.nnx` joins them, with the same parameters under its own
        names; so does :func:`jaxops.fuse` of a model that is swapped with `products=False`.
        """
        unbiased = self._unbiased & self.swapped.keys()
        parents = sorted({path.rpartition("/")[0] for path in unbiased})
        return {
            parent: names
            for parent in parents
            for names in _GATED_MLPS
            if all((f"{parent}/{name}" if parent else name) in unbiased for name in names)
        }

    def trace(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> SwapReport:
        """Traces a call of the swapped model, without running it, and completes the report.

        Counts the computations that XLA still does although jaxops has ops for them, such as a norm of the model's own.
        Layers that :func:`jaxops.flax.nnx.swap` changed and that the call does not run, such as those whose weights the
        model multiplies itself, move from `swapped` to `idle`. If the call runs copies of layers, as under `nnx.jit`,
        nobody knows which, and the list stays.

        Args:
          function: calls the model, such as `model.apply`, or `lambda x: model(x)`.
          *arguments, **options: what it takes.

        Returns:
          The report itself.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from jaxops.flax import nnx as fast
          >>> class Model(nnx.Module):
          ...     def __init__(self, rngs):
          ...         self.table, self.out = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
          ...     def __call__(self, x):
          ...         return self.out(x @ self.table.kernel[...])
          >>> model, report = fast.swap(Model(nnx.Rngs(0)))
          >>> print(report.trace(lambda x: model(x), jnp.ones((3, 4))))
          1 on jaxops, 0 kept
          out    jaxops Linear
          table  swapped, but does not run
          XLA's: 1 dot_general
        """
        found: list[FuseReport] = []
        ran: list[Any] = []
        token = _ran.set(ran)
        try:
            jax.eval_shape(fuse(function, report=found.append), *arguments, **options)
        finally:
            _ran.reset(token)
        left = collections.Counter(found[-1].counts)
        left.update(miss.what for miss in found[-1].near_misses)
        self.left = dict(left)
        paths = {id(layer): path for path, ref in self._layers.items() if (layer := ref()) is not None}
        if paths and all(id(layer) in paths for layer in ran):
            seen = {paths[id(layer)] for layer in ran}
            for path in list(self.swapped):
                if path in paths.values() and not any(path == at or path.startswith(f"{at}/") for at in seen):
                    self.idle[path] = self.swapped.pop(path)
        return self

    def __str__(self) -> str:
        if not (self.swapped or self.kept or self.idle):
            return "no layers found; if this is a linen model, nothing was called yet: it is swapped while it is traced"
        paths = {path: f"jaxops {what}" for path, what in self.swapped.items()}
        paths |= {path: f"{paths[path]}, {how}" for path, how in self.attention.items() if path in paths}
        paths |= {path: f"kept: {why}" for path, why in self.kept.items()}
        paths |= dict.fromkeys(self.idle, "swapped, but does not run")
        width = max(map(len, paths))
        lines = [f"{len(self.swapped)} on jaxops, {len(self.kept)} kept"]
        lines += [f"{path:{width}}  {paths[path]}" for path in sorted(paths)]
        for parent, names in self.gated_mlps.items():
            where = f"{parent}: " if parent else ""
            lines.append(
                f"{where}{', '.join(names)} run one by one; if they are a gated MLP, see GatedMLP or jaxops.fuse"
            )
        if self.left:
            lines.append("XLA's: " + ", ".join(f"{n} {what}" for what, n in self.left.items()))
        return "\n".join(lines)

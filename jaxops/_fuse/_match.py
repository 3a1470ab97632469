"""What a rule finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxops._fuse._cone import Cone, Reference, agrees
from jaxops._fuse._graph import Graph, Node, Value, description


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """A value, or several, that one of jaxops' ops computes.

    Attributes:
      op: the name of jaxops' function.
      out: the value.
      operands: what `build` takes.
      build: gives the value, of the same shape and dtype, from arrays; with `others` a tuple, the value first.
      nodes: what is not computed any more.
      note: other parts of the match, such as "with bias and gelu".
      others: values that the op computes besides.
    """

    op: str
    out: Value
    operands: tuple[Value, ...]
    build: Callable[..., jax.Array]
    nodes: Sequence[Node]
    note: str = ""
    others: tuple[Value, ...] = ()

    @property
    def results(self) -> tuple[Value, ...]:
        return (self.out, *self.others)


class Search:
    """A graph in which rules look, what they have taken, and which checks were made."""

    def __init__(self, graph: Graph, checked: dict):
        self.graph = graph
        self.taken: set[Node] = set()
        self._checked = checked

    def agrees(self, cone: Cone, what: tuple, reference: Reference, trials: Sequence[tuple[float, float]]) -> bool:
        """As `agrees`; what: the reference, hashable. Layers that are alike are checked once."""
        key = (*cone.key(), what)
        if key not in self._checked:
            self._checked[key] = agrees(cone, reference, trials)
        return self._checked[key]

    def remembered(self, key: tuple, value: Value, compute: Callable[[], Any]) -> Any:
        """compute(), once for all values that are computed alike from the same constants, as those of each layer."""
        described, constants = description(value)
        key = (*key, described)
        if key not in self._checked:
            self._checked[key] = compute(), constants  # whose identities are in the key
        return self._checked[key][0]

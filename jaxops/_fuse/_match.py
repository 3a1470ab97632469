"""Matches and near misses that a rule finds, and the search in which it finds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxops._fuse._cone import Cone, Reference, agrees, known_value
from jaxops._fuse._graph import Graph, Node, Value, description


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """A value, or several, that a jaxops op computes.

    Attributes:
      op: the jaxops function's name.
      out: the value.
      operands: the arguments for `build`.
      build: gives the value, with the same shape and dtype, from arrays; with `others` a tuple, the value first.
      nodes: the nodes that are not computed any more.
      note: the match's other parts, such as "with bias and gelu".
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
    """A graph in which rules look, the nodes that they have taken, and the checks that were made."""

    def __init__(self, graph: Graph, checked: dict):
        self.graph = graph
        self.taken: set[Node] = set()
        self._checked = checked
        self._known: dict[tuple, Any] = {}

    def agrees(self, cone: Cone, what: tuple, reference: Reference, trials: Sequence[tuple[float, float]]) -> bool:
        """As `agrees`; what: the reference, hashable. Equal layers are checked once."""
        key = (*cone.key(), what)
        if key not in self._checked:
            self._checked[key] = agrees(cone, reference, trials, self.known)
        return self._checked[key]

    def known(self, value: Value) -> np.ndarray | None:
        """As `known_value`, once for all layers."""
        return _remembered(self._known, (), value, lambda: known_value(value))

    def remembered(self, key: tuple, value: Value, compute: Callable[[], Any]) -> Any:
        """compute(), once for all layers, and for all traces of the function."""
        return _remembered(self._checked, key, value, compute)


def _remembered(found: dict, key: tuple, value: Value, compute: Callable[[], Any]) -> Any:
    """compute(), once for all values that are computed alike from the same constants."""
    described, constants = description(value)
    key = (*key, described)
    if key not in found:
        found[key] = compute(), constants  # whose identities are in the key
    return found[key][0]

"""layer_norm and rms_norm after a sum of two arrays, which one kernel adds: the sum is a result as well.

The rule assumes that both arrays have the sum's shape and dtype, and exist anyway. If one is computed entry by entry
for the sum alone, XLA computes it in the pass that adds, and the sum stays XLA's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxops._fuse import _arithmetic as numerics
from jaxops._fuse._cone import MOVES
from jaxops._fuse._graph import Graph, Value
from jaxops._fuse._match import Match

OPS = ("layer_norm", "rms_norm")


def joined(graph: Graph, matches: Sequence[Match]) -> list[Match]:
    """The matches, with the sums in the norms that can have them; each sum in one norm."""
    written = {value for match in matches for value in (*match.results, *match.operands)}
    taken = {node for match in matches for node in match.nodes}
    out = []
    for match in matches:
        total = match.operands[0] if match.op in OPS else None
        if total is None or not _is_sum(graph, total, written) or total.node in taken or _waits(match, total):
            out.append(match)
            continue
        taken.add(total.node)
        note = " and ".join(filter(None, [match.note or "with", "residual"]))
        out.append(
            dataclasses.replace(
                match,
                operands=(*total.inputs, *match.operands[1:]),
                build=functools.partial(_build, match.build),
                nodes=[total.node, *match.nodes],
                note=note.replace("with and", "with"),
                others=(total,),
            )
        )
    return out


def _is_sum(graph: Graph, total: Value, written: set[Value]) -> bool:
    if total.name != "add" or total.aval.weak_type or len(set(total.inputs)) != 2:
        return False
    return all(
        (v.shape, v.dtype, v.aval.weak_type) == (total.shape, total.dtype, False) and _is_there(graph, v, written)
        for v in total.inputs
    )


def _is_there(graph: Graph, value: Value, written: set[Value]) -> bool:
    """Whether an array is written to memory whoever adds it."""
    while value.name in ("reshape", "squeeze", "expand_dims", "copy") and value not in written:
        value = value.inputs[0]
    if value in written or value.name in ("dot_general", "input"):
        return True
    computed = value.name in numerics.ELEMENTWISE or value.name in MOVES or value.name in ("iota", "constant")
    return not computed


def _waits(match: Match, total: Value) -> bool:
    """Whether a scale or an offset is computed after the sum, by an operation with effects: their order must not
    change."""
    stack = list(match.operands[1:])
    seen = set(stack)
    while stack:
        value = stack.pop()
        if value.node.index <= total.node.index:
            continue
        if value.node.has_effects or value == total:
            return True
        new = [v for v in value.node.inputs if v not in seen]
        seen.update(new)
        stack += new
    return False


def _build(build: Any, x: Any, residual: Any, *parameters: Any) -> tuple[Any, Any]:
    return build(x, *parameters, residual=residual)

"""dot_general: every product that contracts something, of dtypes that `jaxops.dot_general` has kernels for.

Assumed: nothing; value and derivative are the product's. Products that contract nothing are multiplications, which XLA
joins to what is around them, and stay; so do those with an out_sharding, and of integers and complex numbers.
"""

from __future__ import annotations

import functools

import jaxops
from jaxops._fuse._cone import Refusal
from jaxops._fuse._graph import Node, Value
from jaxops._fuse._match import Match, Search
from jaxops.ops.matmul import why_no_kernel

ANCHORS = frozenset({"dot_general"})

_OPTIONS = ("dimension_numbers", "precision", "preferred_element_type")


def find(search: Search, node: Node) -> Match | None:
    """The product itself."""
    del search
    options = {name: node.params[name] for name in _OPTIONS}
    if not options["dimension_numbers"][0][0]:
        return None
    lhs, rhs = node.inputs
    if node.params.get("out_sharding") is not None:
        raise Refusal("out_sharding is left to XLA's dot")
    if why := why_no_kernel(lhs, rhs, node.avals[0].dtype, options["precision"]):
        raise Refusal(why)
    out = Value(node, 0)
    if out.aval.weak_type:
        raise Refusal("its result is weakly typed")
    return Match("dot_general", out, (lhs, rhs), functools.partial(jaxops.dot_general, **options), [node])


def is_near(node: Node) -> str | None:
    """What a node that no rule took looks like."""
    return "a product" if node.name == "dot_general" and node.params["dimension_numbers"][0][0] else None

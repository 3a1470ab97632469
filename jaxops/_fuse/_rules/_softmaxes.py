"""softmax and log_softmax: exponentials of x less its maximum, and their sum.

Where the search begins: the sum. The rule assumes that the subtracted maximum is over the same values, with or without
stop_gradient, as its derivative cancels; that maximum and sum are over the same axes; that the exponentials are not
used elsewhere. The check on small rows decides about the operations after the sum (a division, a logarithm, in any
spelling). Without a maximum the original overflows where softmax does not: no match. Intermediate roundings are left
out.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jaxops
from jaxops import _arguments as arguments
from jaxops._fuse import _arithmetic as numerics
from jaxops._fuse._cone import Cone, Refusal, core, onward, stripped, untransposed
from jaxops._fuse._graph import Node, Value
from jaxops._fuse._match import Match, Search

ANCHORS = frozenset({"reduce_sum"})

_TRIALS = ((1.0, 0.0), (5.0, 3.0), (0.1, -2.0))


def exponentials(node: Node) -> Value | None:
    """exp(...) if the node sums exponentials."""
    value = core(node.inputs[0])
    while value.name == "convert_element_type" and value.inputs[0].is_float:
        value = value.inputs[0]
    return value if value.name == "exp" else None


def less_maximum(value: Value) -> Value | None:
    """x if the value is x less a maximum of x, over any axes."""
    value = core(value)
    if value.name != "sub":
        return None
    x, shift = core(value.inputs[0]), value.inputs[1]
    while True:
        shift = stripped(shift, "stop_gradient")
        if shift.name == "max" and -math.inf in (numbers := [v.number() for v in shift.inputs]):
            shift = shift.inputs[1 - numbers.index(-math.inf)]
        elif shift.name == "select_n" and shift.inputs[0].name == "is_finite" and shift.inputs[1].number() == 0:
            shift = shift.inputs[2]  # 0 where the maximum is not finite
        else:
            break
    if shift.name != "reduce_max":
        return None
    y = core(shift.inputs[0])
    while y.name == "stop_gradient":
        y = core(y.inputs[0])
    if x == y:
        return x
    # jax.vmap may transpose either.
    return untransposed(x) if untransposed(x) == untransposed(y) else None


def reference(op: str, axes, permutation) -> numerics.Dual:
    def apply(x):
        shifted = x - x.max(axes)
        e = numerics.exp(shifted)
        y = e / e.sum(axes) if op == "softmax" else shifted - numerics.log(e.sum(axes))
        return y.map(lambda a: a.transpose(permutation))

    return apply


def find(search: Search, node: Node) -> Match | None:
    """The softmax, or its logarithm, whose sum is the node."""
    if (exponential := exponentials(node)) is None:
        if stripped(node.inputs[0], "stop_gradient").name == "exp":
            raise Refusal("what is summed has no gradient")
        return None
    x = less_maximum(exponential.inputs[0])
    if x is None:
        raise Refusal("no maximum of the same values is subtracted before the exponential")
    refusal = Refusal("what follows the sum is neither softmax nor log_softmax")
    for end in reversed(list(onward(search.graph, Value(node, 0)))):
        if end.is_float and sorted(end.shape) == sorted(x.shape):
            try:
                return _match(search, x, end)
            except Refusal as why:
                refusal = max(refusal, why, key=lambda r: r.stage)
    raise refusal


def _match(search: Search, x: Value, end: Value) -> Match:
    if x.dtype.name not in arguments.FLOATS or end.dtype.name not in arguments.FLOATS or end.aval.weak_type:
        raise Refusal(f"there is no kernel for {x.dtype}")
    cone = Cone(search.graph, end, x)
    if cone.leaves:
        raise Refusal("other arrays come in before its end")
    if not cone.reduces_alike():
        raise Refusal("its maximum and its sum are over different axes")
    axes, permutation = cone.axes_of(x), cone.permutation()
    for op in ("log_softmax", "softmax") if any(n.name == "log" for n in cone.nodes) else ("softmax",):
        if search.agrees(cone, (op, axes, permutation), reference(op, axes, permutation), _TRIALS):
            build = functools.partial(_build, op=op, axes=axes, dtype=end.dtype, permutation=permutation)
            return Match(op, end, (x,), build, cone.nodes)
    raise Refusal("its value or its derivative is not that of softmax", 2)


def _build(x, *, op, axes, dtype, permutation) -> jax.Array:
    y = getattr(jaxops, op)(x, axis=axes, dtype=dtype)
    return y if permutation == tuple(range(x.ndim)) else jnp.transpose(y, permutation)


def is_near(node: Node) -> str | None:
    """The op that a node resembles if no rule took it."""
    summed = node.name == "reduce_sum" and stripped(node.inputs[0], "stop_gradient")
    return "a softmax" if summed and summed.name == "exp" else None

"""layer_norm and rms_norm: x, or x - mean(x), divided by the root of a mean of squares.

Where the search begins: rsqrt(v + epsilon), sqrt(v + epsilon) or (v + epsilon) ** -0.5, where v comes from sums of
squares. The rule assumes that epsilon is a number known at trace time; that all sums are over the same axes; that the
scale and, for layer_norm, the offset have only the normalised axes; that nothing inside is used elsewhere. The check on
small rows decides about everything else, the derivative included: how the mean and the variance are spelled, in which
order the factors come, where a stop_gradient is. Intermediate 16-bit roundings are left out, and the variance comes
from deviations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

import jaxops
from jaxops import _arguments as arguments
from jaxops._fuse import _arithmetic as numerics
from jaxops._fuse._cone import Cone, Refusal, core, ends, squared, stripped, untransposed
from jaxops._fuse._graph import Node, Value
from jaxops._fuse._match import Match, Search

ANCHORS = frozenset({"rsqrt", "sqrt", "pow", "integer_pow"})


def _sums(value: Value, most: int = 24) -> Iterator[Value]:
    """The sums in a value."""
    seen, stack = set(), [value]
    while stack and len(seen) < most:
        value = stack.pop()
        if value in seen or value.node.index < 0:
            continue
        seen.add(value)
        if value.name == "reduce_sum":
            yield value.inputs[0]
        elif value.name in numerics.ELEMENTWISE or value != stripped(value):
            stack += reversed(value.inputs)


def _with_epsilon(value: Value) -> tuple[Value, float] | None:
    """v and epsilon if the value is v + epsilon."""
    value = stripped(value)
    if value.name != "add":
        return None
    for a, b in (value.inputs, value.inputs[::-1]):
        if (epsilon := b.number()) is not None:
            return a, epsilon
    return None


def _reference(kind: str, axes, epsilon: float, permutation, roles, places) -> numerics.Dual:
    def apply(x, *leaves):
        x = x - x.mean(axes) if kind == "layer_norm" else x
        y = x * numerics.rsqrt((x * x).mean(axes) + epsilon)
        for role, leaf, place in zip(roles, leaves, places, strict=True):
            spread = leaf.map(lambda a, place=place: expanded(a, place, len(x.shape)))
            y = y * spread if role == "scale" else y + spread
        return y.map(lambda a: a.transpose(permutation))

    return apply


def expanded(leaf, place, rank: int):
    """A parameter with its axes where the input has them, and axes of size 1 between; places ascend after a move."""
    kept = [p for p in place if p is not None]
    leaf = leaf.reshape([size for size, p in zip(leaf.shape, place, strict=True) if p is not None])
    leaf = leaf.transpose(sorted(range(len(kept)), key=kept.__getitem__))
    sizes = iter(leaf.shape)
    return leaf.reshape([next(sizes) if d in kept else 1 for d in range(rank)])


def find(search: Search, node: Node) -> Match | None:
    """The norm whose root is the node, with the scale and offset that belong to it."""
    if node.name == "pow" and node.inputs[1].number() != -0.5:
        return None
    if node.name == "integer_pow":
        return None
    squares = [y for total in _sums(node.inputs[0]) if (y := squared(core(total))) is not None]
    if not squares:
        if next(_sums(node.inputs[0]), None) is not None:
            raise Refusal("the sum under the root is not of squares")
        return None
    if (found := _with_epsilon(node.inputs[0])) is None:
        raise Refusal("no number is added to the mean before the root")
    epsilon = found[1]
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise Refusal(f"its epsilon is {epsilon}")
    refusal = Refusal("what follows the root is no norm that jaxops has")
    # The root may be used twice, as in x inv + (offset - mean inv).
    for end in reversed([value for value in ends(search.graph, Value(node, 0)) if value.is_float]):
        for x, kind in _inputs(squares):
            if end.shape != x.shape and sorted(end.shape) != sorted(x.shape):
                continue
            try:
                return _match(search, x, kind, end, epsilon)
            except Refusal as why:
                refusal = max(refusal, why, key=lambda r: r.stage)
    raise refusal


def _inputs(squares: list[Value]) -> Iterator[tuple[Value, str]]:
    """The values that may be the input, and the norm of each."""
    for y in dict.fromkeys(like for square in squares for like in (core(square), untransposed(square))):
        if y.name == "sub":
            yield core(y.inputs[0]), "layer_norm"
            if (moved := untransposed(y.inputs[0])) != core(y.inputs[0]):  # by jax.vmap
                yield moved, "layer_norm"
        yield y, "layer_norm"
        yield y, "rms_norm"


def _match(search: Search, x: Value, kind: str, end: Value, epsilon: float) -> Match:
    if x.dtype.name not in arguments.FLOATS or end.dtype.name not in arguments.FLOATS or end.aval.weak_type:
        raise Refusal(f"there is no kernel for {x.dtype}")
    cone = Cone(search.graph, end, x)
    if not cone.reduces_alike():
        raise Refusal("its sums are over different axes")
    axes, permutation = cone.axes_of(x), cone.permutation()
    places = [cone.places(leaf) for leaf in cone.leaves]
    for leaf, place in zip(cone.leaves, places, strict=True):
        if {p for p in place if p is not None} - set(axes) or not leaf.shape:
            raise Refusal("its scale or offset has other axes than the normalised ones")
    allowed = {
        "rms_norm": ((), ("scale",)),
        "layer_norm": ((), ("scale",), ("bias",), ("scale", "bias"), ("bias", "scale")),
    }[kind]
    deviation = math.sqrt(epsilon)
    trials = ((1.0, 0.7), (1.5 * deviation, -deviation), (0.5, -1.0))
    for roles in (r for r in allowed if len(r) == len(cone.leaves)):
        order = sorted(range(len(roles)), key=lambda i: roles[i] == "bias")  # scale first
        reference = _reference(
            kind,
            axes,
            epsilon,
            permutation,
            [roles[i] for i in order],
            [places[i] for i in order],
        )

        def ordered(x, *leaves, reference=reference, order=order):
            return reference(x, *(leaves[i] for i in order))

        if search.agrees(cone, (kind, axes, epsilon, permutation, roles), ordered, trials):
            break
    else:
        raise Refusal("its value or its derivative is not that of a norm", 2)
    build = functools.partial(
        _build,
        op=kind,
        roles=roles,
        places=places,
        axes=axes,
        epsilon=epsilon,
        dtype=end.dtype,
        permutation=permutation,
    )
    note = " and ".join(sorted(roles, reverse=True))
    return Match(kind, end, (x, *cone.leaves), build, cone.nodes, note and f"with {note}")


def _build(x, *leaves, op, roles, places, axes, epsilon, dtype, permutation, residual=None) -> Any:
    """The normalised array; with a residual also the sum."""
    parameters = {}
    for role, leaf, place in zip(roles, leaves, places, strict=True):
        spread = expanded(leaf, place, x.ndim)
        whole = [d if a in axes else 1 for a, d in enumerate(x.shape)]
        parameters[role] = jnp.broadcast_to(spread, whole).reshape([x.shape[a] for a in axes])
    y = getattr(jaxops, op)(x, **parameters, axis=axes, epsilon=epsilon, residual=residual, dtype=dtype)
    y, *total = (y,) if residual is None else y
    y = y if permutation == tuple(range(x.ndim)) else jnp.transpose(y, permutation)
    return (y, *total) if total else y


def is_near(node: Node) -> str | None:
    """The op that a node resembles if no rule took it."""
    if node.name in ("rsqrt", "sqrt") or (node.name == "pow" and node.inputs[1].number() == -0.5):
        return "a norm" if next(_sums(node.inputs[0]), None) is not None else None
    return None

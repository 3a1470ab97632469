"""dot_general: products that contract something; matmul, gated_matmul, gated_mlp: products and what follows them.

Where the search begins: the product. Of a product alone nothing is assumed: value and derivative are the product's.
Products that contract nothing are multiplications, which XLA joins to what is around them, and stay; so do those with
an out_sharding, and of dtypes without a kernel. A transposition of the result's rows and columns is the product of the
operands in the other order.

Of what follows it is assumed: nothing else reads the product, or anything between it and the end; a bias has axes of
the second operand alone. The check on small rows decides which activation it is. A relu that is spelled as a maximum
has another derivative at 0. Of a gated MLP both products have the same first operand, and weights [k, n]. A third
product, of weights [n, d], completes it if its first operand is their result, which nothing else reads. All three have
one precision, and the dtype to which all operands promote.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops import _arguments as arguments
from jaxops._fuse import _arithmetic as numerics
from jaxops._fuse._cone import Cone, Refusal, core, ends, is_cast
from jaxops._fuse._graph import Graph, Node, Value
from jaxops._fuse._match import Match, Search
from jaxops._fuse._rules._norms import expanded
from jaxops.ops.matmul import general_product, why_no_kernel

ANCHORS = frozenset({"dot_general"})

OP, WITH_EPILOGUE, GATED, WHOLE = "dot_general", "matmul", "gated_matmul", "gated_mlp"

_OPTIONS = ("dimension_numbers", "precision", "preferred_element_type")

_TRIALS = ((1.0, 0.0), (0.3, 0.1), (3.0, 0.5))

#: The numbers in activations, unrounded.
_EXACT = (0.044715, math.sqrt(2 / math.pi), math.sqrt(0.5), math.sqrt(2))


def _gelu(x: numerics.Dual) -> numerics.Dual:
    return 0.5 * x * (1 + numerics.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


_REFERENCES = {
    None: lambda x: x,
    "gelu": _gelu,
    "gelu_exact": lambda x: 0.5 * x * numerics.erfc(-x * math.sqrt(0.5)),
    "silu": lambda x: x * numerics.logistic(x),
    "relu": lambda x: numerics.select(x.value > 0, numerics.Dual(np.zeros(x.shape)), x),
}

#: The primitives by which an activation is told.
_TOLD_BY = {"tanh": "gelu", "erf": "gelu_exact", "erfc": "gelu_exact", "logistic": "silu", "custom_jvp_call": "relu"}


def find(search: Search, node: Node) -> Match | None:
    """The product alone."""
    if not node.params["dimension_numbers"][0][0]:
        return None
    _check(node, node.avals[0].dtype)
    out, operands, options = Value(node, 0), node.inputs, {name: node.params[name] for name in _OPTIONS}
    nodes = [node]
    (user, *others) = search.graph.users_of(out)
    moved = not others and user is not None and user.name == "transpose" and user not in search.taken
    if moved and tuple(user.params["permutation"]) == _exchange(node):
        operands, options["dimension_numbers"] = _swapped(node)
        nodes, out = [node, user], Value(user, 0)
    return Match(OP, out, tuple(operands), functools.partial(jaxops.dot_general, **options), nodes)


def _check(node: Node, dtype: np.dtype) -> None:
    """Refuses a product with a result of this dtype, for which there is no kernel."""
    lhs, rhs = node.inputs
    if node.params.get("out_sharding") is not None:
        raise Refusal("out_sharding is left to XLA's dot")
    if why := why_no_kernel(lhs, rhs, dtype, node.params["precision"]):
        raise Refusal(why)
    if node.avals[0].weak_type:
        raise Refusal("its result is weakly typed")


def _groups(node: Node) -> tuple[int, int, int]:
    """How many axes of the result are of the batch, of the first operand and of the second."""
    (lhs, rhs), (contracted, batch) = node.inputs, node.params["dimension_numbers"]
    batches = len(batch[0])
    return batches, *(len(x.shape) - len(c) - batches for x, c in zip((lhs, rhs), contracted, strict=True))


def _exchange(node: Node) -> tuple[int, ...]:
    """The permutation that puts the second operand's axes of the result before those of the first."""
    batches, rows, columns = _groups(node)
    start = batches + rows
    return (*range(batches), *range(start, start + columns), *range(batches, start))


def _swapped(node: Node) -> tuple[list[Value], tuple]:
    """The operands in the other order, with the numbers of their axes."""
    return node.inputs[::-1], tuple(tuple(sides[::-1]) for sides in node.params["dimension_numbers"])


def find_with_epilogue(search: Search, node: Node) -> Match | None:
    """The product with a bias, an activation or both."""
    refusal = None
    for end in _ends(search.graph, node):
        try:
            return _with_epilogue(search, node, end)
        except Refusal as why:
            refusal = why if refusal is None else max(refusal, why, key=lambda r: r.stage)
    if refusal is not None:
        raise refusal
    return None


def _ends(graph: Graph, node: Node) -> Iterator[Value]:
    """Where what follows a product may end, the farthest first: something besides moves and casts is there."""
    z = Value(node, 0)
    if not node.params["dimension_numbers"][0][0] or not z.is_float:
        return
    found = []
    for end in ends(graph, z):
        if sorted(end.shape) != sorted(z.shape) or not end.is_float:
            break
        if end.name in ("add", "mul", "custom_jvp_call", "copy", "transpose") or is_cast(end.node):
            found.append(end)
    while found and (found[-1].name in ("transpose", "copy")):
        found.pop()
    yield from reversed(found)


def _activations(cone: Cone) -> list[str | None]:
    """What the activation may be."""
    told = dict.fromkeys(_TOLD_BY[n.name] for n in cone.nodes if n.name in _TOLD_BY)
    if len(told) > 1:
        raise Refusal("what follows is no activation that jaxops has")
    return list(told) or [None]


def _check_uses(search: Search, node: Node, cone: Cone) -> None:
    """Nothing of a product and what follows it may be read elsewhere: it is not there any more."""
    inside = set(cone.nodes)
    for made in (node, *cone.nodes[:-1]):
        if any(user not in inside for user in search.graph.users_of(Value(made, 0))):
            raise Refusal("its product is used elsewhere too", 1)


def _with_epilogue(search: Search, node: Node, end: Value) -> Match:
    z = Value(node, 0)
    cone = Cone(search.graph, end, z, exact=_EXACT)
    _check_uses(search, node, cone)
    _check(node, end.dtype)
    if end.aval.weak_type or cone.reduced:
        raise Refusal("its result is weakly typed")
    (activation,) = _activations(cone)
    if len(cone.leaves) > 1 or (activation is None and not cone.leaves):
        raise Refusal("what follows is neither a bias nor an activation")
    permutation, exchange = cone.permutation(), _exchange(node)
    rank = len(permutation)
    exchanged = permutation != tuple(range(rank))
    if exchanged and permutation != exchange:
        raise Refusal("what follows moves its axes")
    places = [cone.places(leaf) for leaf in cone.leaves]
    batches, rows, _ = _groups(node)
    others = range(batches + rows, rank) if exchanged else range(batches, batches + rows)
    for leaf, place in zip(cone.leaves, places, strict=True):
        if leaf.dtype.name not in arguments.FLOATS or {p for p in place if p is not None} & set(others):
            raise Refusal("what is added is no bias")

    def reference(x, *leaves):
        for leaf, place in zip(leaves, places, strict=True):
            x = x + leaf.map(lambda a, place=place: expanded(a, place, rank))
        return _REFERENCES[activation](x).map(lambda a: a.transpose(permutation))

    if not search.agrees(cone, (WITH_EPILOGUE, activation, permutation, *places), reference, _TRIALS):
        raise Refusal("what follows is no activation that jaxops has")
    (operands, numbers) = _swapped(node) if exchanged else (node.inputs, node.params["dimension_numbers"])
    build = functools.partial(
        _build_with_epilogue,
        numbers=numbers,
        precision=node.params["precision"],
        dtype=end.dtype,
        activation=activation,
        places=[tuple(None if p is None else permutation.index(p) for p in place) for place in places],
    )
    note = " and ".join(["bias"] * bool(places) + ([activation] if activation else []))
    return Match(WITH_EPILOGUE, end, (*operands, *cone.leaves), build, [node, *cone.nodes], f"with {note}")


def _build_with_epilogue(lhs, rhs, *leaves, numbers, precision, dtype, activation, places) -> jax.Array:
    rank = lhs.ndim + rhs.ndim - 2 * len(numbers[0][0]) - len(numbers[1][0])
    biases = [expanded(leaf, place, rank) for leaf, place in zip(leaves, places, strict=True)]
    return general_product(lhs, rhs, numbers, precision, dtype, bias=(biases or [None])[0], activation=activation)


def find_gated_mlp(search: Search, node: Node) -> Match | None:
    """What `find_gated` finds, and the product with w_down."""
    try:
        half = find_gated(search, node)
    except Refusal:
        return None  # find_gated refuses again, and says why
    if half is None:
        return None
    (down, *others) = search.graph.users_of(half.out)
    if others or down is None or down.name != "dot_general" or down in search.taken:
        return None
    hidden, w_down = down.inputs
    alike = all(down.params[name] == node.params[name] for name in ("dimension_numbers", "precision"))
    if hidden != half.out or w_down == half.out or len(w_down.shape) != 2 or not alike:
        return None
    dtype = jnp.result_type(*(v.dtype for v in (*half.operands, w_down)))
    if {dtype} != {half.out.dtype, down.avals[0].dtype}:
        return None
    _check(down, dtype)
    build = functools.partial(jaxops.gated_mlp, **half.build.keywords)
    return Match(WHOLE, Value(down, 0), (*half.operands, w_down), build, [*half.nodes, down], half.note)


def find_gated(search: Search, node: Node) -> Match | None:
    """activation(x w) times another product of x, of which the node is the first."""
    x, w = node.inputs
    rank = len(x.shape)
    if node.params["dimension_numbers"] != (((rank - 1,), (0,)), ((), ())) or len(w.shape) != 2:
        return None
    z = Value(node, 0)
    for end in _ends(search.graph, node):
        if end.name != "mul":
            continue
        others = [v for v in map(core, end.inputs) if v.name == "dot_general" and v != z]
        if len(others) == 1 and (match := _gated(search, node, others[0], end)) is not None:
            return match
    return None


def _gated(search: Search, node: Node, other: Value, end: Value) -> Match | None:
    (x, w), (also_x, up) = node.inputs, other.inputs
    options = [[made.params[name] for name in _OPTIONS] for made in (node, other.node)]
    if x != also_x or options[0] != options[1]:
        return None
    cone = Cone(search.graph, end, Value(node, 0), whole=(other,), exact=_EXACT)
    if cone.leaves != [other] or w.shape != up.shape or cone.permutation() != tuple(range(len(end.shape))):
        return None
    dtype = jnp.result_type(x.dtype, w.dtype, up.dtype)
    if {dtype} != {end.dtype, node.avals[0].dtype, other.dtype} or end.aval.weak_type or cone.reduced:
        return None
    _check(node, dtype)
    _check(other.node, dtype)
    _check_uses(search, node, cone)
    if any(user not in cone.nodes for user in search.graph.users_of(other)):
        raise Refusal("its second product is used elsewhere too", 1)
    (activation,) = _activations(cone)
    if activation is None:
        return None

    def reference(gate, up):
        return _REFERENCES[activation](gate) * up

    if not search.agrees(cone, (GATED, activation), reference, _TRIALS):
        raise Refusal("its activation is none that jaxops has", 1)
    build = functools.partial(jaxops.gated_matmul, activation=activation, precision=node.params["precision"])
    return Match(GATED, end, (x, w, up), build, [node, other.node, *cone.nodes], f"with {activation}")


def is_near(node: Node) -> str | None:
    """What a node that no rule took looks like."""
    return "a product" if node.name == "dot_general" and node.params["dimension_numbers"][0][0] else None

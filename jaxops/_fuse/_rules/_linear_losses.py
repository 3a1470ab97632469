"""linear_cross_entropy: losses with integer labels after a product whose result, the logits, nothing else reads.

Where the search begins: as for losses. The rule assumes that the weights have two axes, and that the tokens are at most
sliced between the product and the loss; that all losses are summed, with a factor for each or a mask: then three
products give the loss and its gradients, as many as with logits. A bias and a soft cap may follow the product. The
check on small rows is the check for losses, from the product on.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jaxops
from jaxops import _arguments as arguments
from jaxops._fuse import _arithmetic as numerics
from jaxops._fuse._cone import Cone, Refusal, is_cast
from jaxops._fuse._graph import Node, Value
from jaxops._fuse._match import Match, Search
from jaxops._fuse._rules import _losses

OP = "linear_cross_entropy"

ANCHORS = _losses.ANCHORS


def find(search: Search, node: Node) -> Match | None:
    """The loss whose label logits the node picks, from the product to the sum over all tokens."""
    try:
        loss = _losses.find(search, node)
    except Refusal:
        return None
    if loss is None:
        return None
    (logits, labels), end, given = loss.operands, loss.out, loss.build.keywords
    if (found := _product(logits)) is None:
        return None
    product, slices, between = found
    total, factor, masked, after = _sum(search, end)
    inside = {product, *([] if slices is None else [slices]), *between, *loss.nodes, *after}
    for made in inside - {total.node}:
        if any(user not in inside for user in search.graph.users_of(Value(made, 0))):
            raise Refusal("its logits or its losses are used elsewhere too", 1)
    _check_slice(product, slices, given["axis"])
    x, w = product.inputs
    if {x.dtype, w.dtype} != {product.avals[0].dtype} or product.params.get("out_sharding") is not None:
        raise Refusal("hidden states, weights and logits differ in dtype", 1)
    transposed = product.params["dimension_numbers"][0][1] == (1,)
    if w.name == "transpose":
        w, transposed = w.inputs[0], not transposed
    cap, bias = _bias_and_cap(search, Value(product if slices is None else slices, 0), logits, between)
    places = [place for place in given["order"] if place is not None]
    if places != sorted(places):
        raise Refusal("its losses lie in another order than its tokens", 1)
    build = functools.partial(
        _build,
        slices=None if slices is None else slices.params,
        options={"transposed": transposed, "logits_soft_cap": cap, "precision": product.params["precision"]},
        has=(bias is not None, factor is not None),
        masked=masked,
        outside=given["outside"],
        sign=given["sign"],
        labels_order=given["labels_order"],
        dtype=total.dtype,
    )
    operands = (x, w, labels, *(v for v in (bias, factor) if v is not None))
    notes = ["bias"] * (bias is not None) + ["soft cap"] * (cap is not None)
    note = f"with {' and '.join(notes)}" if notes else ""
    return Match(OP, total, operands, build, sorted(inside, key=lambda made: made.index), note)


def _product(logits: Value) -> tuple[Node, Node | None, list[Node]] | None:
    """The product of hidden states and weights behind the logits, a slice of its tokens, the operations between."""
    value, between = logits, []
    while value.name not in ("dot_general", "slice"):
        node = value.node
        between.append(node)
        if is_cast(node) or node.name in ("tanh", "copy"):
            made = node.inputs
        elif node.name in ("add", "mul", "div"):
            made = [v for v in node.inputs if v.shape == value.shape and v.number() is None]
            made = [v for v in made if v.name != "broadcast_in_dim"]
        else:
            return None
        if len(made) != 1 or len(between) > 8:
            return None
        value = made[0]
    slices = value.node if value.name == "slice" else None
    product = value.node if slices is None else slices.inputs[0].node
    if product.name != "dot_general":
        return None
    (x, w), (contracted, batch) = product.inputs, product.params["dimension_numbers"]
    if batch != ((), ()) or len(w.shape) != 2 or contracted[0] != (len(x.shape) - 1,) or len(contracted[1]) != 1:
        return None
    return (product, slices, between) if x.dtype.name in arguments.FLOATS else None


def _check_slice(product: Node, slices: Node | None, axis: int) -> None:
    """Refuses a loss that is not over the vocabulary, the last axis, and a slice that leaves out a part of it."""
    shape = product.avals[0].shape
    if axis != len(shape) - 1:
        raise Refusal("its loss is not over the weights' axis", 1)
    if slices is None:
        return
    params = slices.params
    if params["strides"] is not None and any(stride != 1 for stride in params["strides"]):
        raise Refusal("its tokens are sliced with a stride", 1)
    if params["start_indices"][-1] != 0 or params["limit_indices"][-1] != shape[-1]:
        raise Refusal("a part of the vocabulary is left out", 1)


def _sum(search: Search, end: Value) -> tuple[Value, Value | None, bool, list[Node]]:
    """The sum over all losses, each one's factor or mask, whether it is a mask, and the nodes on the way."""
    value, factor, masked, nodes = end, None, False, []
    refusal = Refusal("no sum of all its losses follows")
    while True:
        users = search.graph.users_of(value)
        if len(users) != 1 or (node := users[0]) is None:
            raise refusal
        nodes.append(node)
        if node.name == "reduce_sum":
            if len(node.params["axes"]) != len(value.shape) or not value.is_float or node.avals[0].weak_type:
                raise refusal
            return Value(node, 0), factor, masked, nodes
        if node.name == "mul" and factor is None and node.inputs[0] != node.inputs[1]:
            (factor,) = (v for v in node.inputs if v != value)
            if not factor.is_float:
                raise refusal
        elif node.name == "select_n" and factor is None and len(node.inputs) == 3:
            factor, no, yes = node.inputs
            masked = True
            if yes != value or no.number() != 0 or factor.dtype != jnp.bool_:
                raise refusal
        elif not is_cast(node) and node.name != "copy":
            raise refusal
        if factor is not None and factor.shape != value.shape:
            raise refusal
        value = Value(node, 0)


def _bias_and_cap(search: Search, z: Value, logits: Value, between: list[Node]) -> tuple[float | None, Value | None]:
    """The soft cap and the bias between product and loss: the check decides."""
    if all(is_cast(node) or node.name == "copy" for node in between):
        return None, None
    refusal = Refusal("what lies between its product and its loss is neither a bias nor a soft cap", 1)
    cone = Cone(search.graph, logits, z)
    if cone.reduced or len(cone.leaves) > 1 or cone.permutation() != tuple(range(len(z.shape))):
        raise refusal
    for bias in cone.leaves:
        places = [p for p in cone.places(bias) if p is not None]
        if places != [len(z.shape) - 1] or bias.dtype != z.dtype:
            raise refusal
    numbers = {abs(n) for node in between for v in node.inputs if (n := v.number())}
    capped = any(node.name == "tanh" for node in between)
    for cap in sorted(numbers, reverse=True) if capped else [None]:

        def reference(x, *leaves, cap=cap):
            for leaf in leaves:
                x = x + leaf.map(lambda a: a.reshape(-1))
            return x if cap is None else numerics.tanh(x / cap) * cap

        if search.agrees(cone, (OP, cap, len(cone.leaves)), reference, ((1.0, 0.0), (30.0, 5.0))):
            return cap, next(iter(cone.leaves), None)
    raise refusal


def _build(x, w, labels, *rest, slices, options, has, masked, outside, sign, labels_order, dtype) -> jax.Array:
    given = iter(rest)
    bias, factor = (next(given) if there else None for there in has)
    if slices is not None:
        limits = zip(slices["start_indices"][:-1], slices["limit_indices"][:-1], strict=True)
        x = x[tuple(slice(*pair) for pair in limits)]
    rows, columns = x.shape[:-1], w.shape[0 if options["transposed"] else 1]
    at = jnp.broadcast_to(_losses.in_rows(_losses.widened(labels), labels_order, rows), rows)
    inside = (at >= 0) & (at < columns)
    weights = jnp.ones(rows, jnp.promote_types(x.dtype, jnp.float32)) if factor is None else factor.reshape(rows)
    if outside == "nan":  # also for tokens with factor 0, but not for masked ones
        weights = jnp.where(inside | ~weights if masked else inside, weights, jnp.nan)
    elif outside == "zero":
        weights = jnp.where(inside, weights, 0)
    loss = getattr(jaxops, OP)(
        x,
        w,
        jnp.clip(at, 0, columns - 1),
        bias=None if bias is None else bias.reshape(-1),
        weights=weights.astype(jnp.promote_types(x.dtype, jnp.float32)),
        reduction="sum",
        **options,
    )
    return (sign * loss).astype(dtype)

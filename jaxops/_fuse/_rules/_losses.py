"""The cross entropy with integer labels: a row's logsumexp less the label's logit.

Where the search begins: a gather of single entries, or a sum over a one-hot array. The rule assumes that a maximum is
subtracted before the exponentials; that one axis is summed over, and the label indexes it; that log-probabilities and
exponentials are not used elsewhere. The check on small rows decides about the rest: log_softmax or logsumexp, which
sign, which order. An index out of range gives the same as before: NaN, the nearest entry, or, with a one-hot array, 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops import _arguments as arguments
from jaxops._fuse import _arithmetic as numerics
from jaxops._fuse._cone import Cone, Refusal, core, onward
from jaxops._fuse._graph import Node, Value
from jaxops._fuse._match import Match, Search
from jaxops._fuse._rules._softmaxes import less_maximum

ANCHORS = frozenset({"gather", "reduce_sum"})

OP = "softmax_cross_entropy_with_integer_labels"

_TRIALS = ((1.0, 0.0), (5.0, 3.0), (0.1, -2.0))


def _picked_from(node: Node) -> Value | None:
    """The array from which a label picks an entry."""
    if node.name == "gather":
        sizes = node.params["slice_sizes"]
        return node.inputs[0] if node.inputs[0].is_float and all(size == 1 for size in sizes) else None
    product = core(node.inputs[0])
    if product.name != "mul":
        return None
    for a, b in (product.inputs, product.inputs[::-1]):
        if a.name == "convert_element_type" and a.inputs[0].name == "eq":
            return b
    return None


def _inputs(value: Value) -> Iterator[Value]:
    """The values that may be the logits: the value itself, or the values from which maxima and logarithms were
    subtracted."""
    chain = [core(value)]
    while chain[-1].name == "sub" and len(chain) < 3:
        chain.append(core(chain[-1].inputs[0]))
    yield from reversed(chain)


def find(search: Search, node: Node) -> Match | None:
    """The loss whose label logits the node picks."""
    if (picked := _picked_from(node)) is None:
        return None
    refusal = None
    ends = [Value(node, 0), *onward(search.graph, Value(node, 0), 8)]
    for end in reversed([end for end in ends if end.is_float]):
        for x in _inputs(picked):
            try:
                return _match(search, x, end)
            except Refusal as why:
                refusal = why if refusal is None else max(refusal, why, key=lambda r: r.stage)
    assert refusal is not None
    raise refusal


def _match(search: Search, x: Value, end: Value) -> Match:
    cone = Cone(search.graph, end, x)
    exponentials = [n for n in cone.nodes if n.name == "exp"]
    if not exponentials:
        raise Refusal("no exponentials are summed")
    if any(less_maximum(n.inputs[0]) is None for n in exponentials):
        raise Refusal("no maximum of the same values is subtracted before the exponential", 1)
    labels = [leaf for leaf in cone.leaves if not leaf.is_float]
    if len(cone.leaves) != 1 or len(labels) != 1 or not jnp.issubdtype(labels[0].dtype, jnp.integer):
        raise Refusal("other arrays than logits and labels come in before its end", 1)
    if not cone.reduces_alike() or len(axes := cone.axes_of(x)) != 1:
        raise Refusal("its maximum and its sum are over different axes", 1)
    if x.dtype.name not in arguments.FLOATS or end.aval.weak_type:
        raise Refusal(f"there is no kernel for {x.dtype}")
    (axis,) = axes
    rows = [d for d in range(len(x.shape)) if d != axis]
    order, labels_order = (_order(cone, value, rows) for value in (end, labels[0]))
    fills = [n.params["fill_value"] for n in cone.nodes if n.name == "gather"]
    if any(fill is not None and fill == fill for fill in fills):  # not NaN
        raise Refusal("its labels out of range count as a number of their own", 2)
    modes = {str(n.params["mode"]).rpartition(".")[2] for n in cone.nodes if n.name == "gather"}
    for sign in (1, -1):
        reference = _reference(axis, sign, cone.small(end), order, labels_order)
        if search.agrees(cone, (OP, axis, sign, order, labels_order), reference, _TRIALS):
            break
    else:
        raise Refusal("its value or its derivative is not that of a cross entropy", 2)
    outside = "zero" if cone.one_hot else "nearest" if "CLIP" in modes else "nan"
    if outside == "zero" and not _is_of_log_probabilities(end, x):
        raise Refusal("labels out of range, which a one-hot array leaves out, would count otherwise", 2)
    build = functools.partial(
        _build, axis=axis, sign=sign, outside=outside, out=end.aval, order=order, labels_order=labels_order
    )
    return Match(OP, end, (x, labels[0]), build, cone.computed)


def _is_of_log_probabilities(end: Value, x: Value) -> bool:
    """Whether all of an end's sources go through the one-hot array: else a label out of range leaves a rest."""
    value = end
    while value.name in ("neg", "convert_element_type", "squeeze", "reshape", "copy"):
        value = value.inputs[0]
    return value.name == "reduce_sum"


def widened(labels: jax.Array) -> jax.Array:
    """Labels in a dtype that holds the number of columns, too."""
    return labels if labels.dtype.itemsize >= 4 else labels.astype(jnp.int32)


def _order(cone: Cone, value: Value, rows: list[int]) -> tuple[int | None, ...]:
    """For each axis of a value the rows' axis that it is; None: its size is 1."""
    places = {c: rows.index(d) for d, c in enumerate(cone.classes.of(cone.source)) if d in rows}
    found = [places.get(c) for c in cone.classes.of(value)]
    if any(p is None and size != 1 for p, size in zip(found, value.shape, strict=True)):
        raise Refusal("its labels are not one for each row")
    if {p for p in found if p is not None} < {i for i, d in enumerate(rows) if cone.source.shape[d] != 1}:
        raise Refusal("its labels are not one for each row")
    return tuple(found)


def in_rows(x, order, sizes):
    """An array with its axes in the rows' order."""
    kept = [i for i, p in enumerate(order) if p is not None]
    x = x.reshape([x.shape[i] for i in kept]).transpose(sorted(range(len(kept)), key=lambda i: order[kept[i]]))
    present = {order[i] for i in kept}
    return x.reshape([size if i in present else 1 for i, size in enumerate(sizes)])


def _as_out(loss, order, shape):
    """All rows' losses, with their axes as the result has them."""
    kept = [p for p in order if p is not None]
    rest = [i for i in range(loss.ndim) if i not in kept]  # with size 1
    return loss.transpose([*kept, *rest]).reshape(shape)


def _reference(axis, sign, shape, order, labels_order) -> numerics.Dual:
    def apply(x, labels):
        maximum = x.max((axis,))
        lse = numerics.log(numerics.exp(x - maximum).sum((axis,))) + maximum
        sizes = [size for d, size in enumerate(x.shape) if d != axis]
        at = in_rows(labels.value, labels_order, sizes)
        picked = x.map(lambda a: _take(a, at, axis))
        return (sign * (lse.map(lambda a: a.squeeze(axis)) - picked)).map(lambda a: _as_out(a, order, shape))

    return apply


def _take(x, labels, axis):
    shape = [d for a, d in enumerate(x.shape) if a != axis]
    return np.take_along_axis(x, np.expand_dims(np.broadcast_to(labels, shape), axis), axis).squeeze(axis)


def _build(x, labels, *, axis, sign, outside, out, order, labels_order) -> jax.Array:
    sizes = [d for a, d in enumerate(x.shape) if a != axis]
    at = jnp.broadcast_to(in_rows(widened(labels), labels_order, sizes), sizes)
    columns = x.shape[axis]
    inside = (at >= 0) & (at < columns)
    given = at if outside == "nan" else jnp.clip(at, 0, columns - 1)
    loss = getattr(jaxops, OP)(x, given, axis)
    if outside == "nan":
        # jaxops counts negative labels from the end, as indexing does before this.
        loss = jnp.where(at < 0, jnp.nan, loss)
    elif outside == "zero":
        loss = jnp.where(inside, loss, 0)
    return _as_out(sign * loss, order, out.shape).astype(out.dtype)


def is_near(node: Node) -> str | None:
    """The op that a node resembles if no rule took it."""
    if node.name != "gather" or (picked := _picked_from(node)) is None:
        return None
    return "a loss of integer labels" if any(x.name == "sub" for x in [core(picked)]) else None

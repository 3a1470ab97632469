"""Attention: a softmax between two products, whose scores and weights nothing else uses.

Where the search begins: the sum of a softmax's exponentials. The rule assumes that only these lie between the first
product and the softmax: factors (also on the query, before it), a soft cap, a bias, and masks that put a number of
-10000 or less in place of a key that is not seen, as logits are small against it, or that add it, if every query is
known to see a key. It assumes that only casts and transpositions lie between the softmax and the second product. With
-inf a query that sees no key gives NaN, but in jaxops the mean of all values: such masks are taken only if they are
causal. A mask is not read if it is known at trace time, and causal or True everywhere. The check on small rows decides
about the rest: factors, layout, masks. If `jnp.repeat` copies each head of the keys and values for several query heads,
the op gets the heads without their copies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from jaxops import _arguments as arguments
from jaxops._fuse import _arithmetic as numerics
from jaxops._fuse._cone import MOVES, Cone, Refusal, added_mask, core, is_cast, onward, widens
from jaxops._fuse._graph import COPIES, Node, Value
from jaxops._fuse._match import Match, Search
from jaxops._fuse._rules._softmaxes import exponentials, less_maximum

OP = "dot_product_attention"

ANCHORS = frozenset({"reduce_sum"})

_TRIALS = ((1.0, 0.2), (2.0, -0.5))


@dataclasses.dataclass
class _Logits:
    """The logits' origin: the first product, and the operations after it, the last first."""

    product: Node
    scale: float = 1.0
    cap: float | None = None
    bias: Value | None = None
    masks: tuple[tuple[Value, bool, float], ...] = ()  # the mask, its value for a key that is seen, the number
    added: Value | None = None  # which ones are added
    query_first: bool = True


def find(search: Search, node: Node) -> Match | None:
    """The attention whose softmax sum is the node."""
    if (exponential := exponentials(node)) is None or (x := less_maximum(exponential.inputs[0])) is None:
        return None
    if (logits := _logits(x)) is None:
        return None
    second = next(
        (v for v in onward(search.graph, Value(node, 0), 16, also=("dot_general",)) if v.name == "dot_general"), None
    )
    if second is None:
        raise Refusal("its weights do not go to one product alone", 1)
    if not second.node.params["dimension_numbers"][0][0]:
        raise Refusal("its weights are multiplied by others before the values", 1)
    weights = next(v for v in second.inputs if _depends(v, exponential))
    value = next(v for v in second.inputs if v != weights)
    refusal: Refusal | None = None
    ends = [second, *onward(search.graph, second, 3)]
    for end in (e for e in ends if e == second or is_cast(e.node)):
        for query, key, scaled in _queries(logits, value.dtype):
            try:
                return _match(search, query, key, value, end, scaled)
            except Refusal as why:
                refusal = why if refusal is None else max(refusal, why, key=lambda r: r.stage)
    assert refusal is not None
    raise refusal


def _queries(logits: _Logits, dtype: np.dtype) -> Iterator[tuple[Value, Value, _Logits]]:
    """The values that may be query and key: without casts to a wider dtype, and the query without factors; or as they
    are."""
    sides = logits.product.inputs
    for i in (0, 1):
        query, key = sides[i], sides[1 - i]
        given = dataclasses.replace(logits, query_first=not i)
        bare_query, factor = _unscaled(query, dtype)
        bare_key = core(key) if core(key).dtype == dtype else key
        if (bare_query, bare_key) != (query, key):
            yield bare_query, bare_key, dataclasses.replace(given, scale=logits.scale * factor)
        yield query, key, given


def _unscaled(value: Value, dtype: np.dtype) -> tuple[Value, float]:
    """The value, in the given dtype, that this is a multiple of, and the factor."""
    found, factor = (value, 1.0), 1.0
    while True:
        if value.name in COPIES or widens(value.node):
            value = value.inputs[0]
        elif value.name in ("mul", "div"):
            numbers = [v.number() for v in value.inputs]
            places = [i for i, n in enumerate(numbers) if n and (i == 1 or value.name == "mul")]
            if not places or value.inputs[1 - places[0]].shape != value.shape:
                return found
            number = numbers[places[0]]
            factor *= number if value.name == "mul" else 1 / number
            value = value.inputs[1 - places[0]]
        else:
            return found
        if value.dtype == dtype:
            found = value, factor


def _depends(value: Value, on: Value) -> bool:
    while value.node.index > on.node.index:
        if value.name in MOVES or is_cast(value.node):
            value = value.inputs[0]
        else:
            return any(core(v).node.index >= on.node.index for v in value.inputs)
    return value == on


def _logits(value: Value) -> _Logits | None:
    """The operations on a product of two arrays that give this value, if it begins with one."""
    while value.name in MOVES or is_cast(value.node):
        value = value.inputs[0]
    node = value.node
    if node.name == "dot_general":
        return _Logits(node)
    if node.name == "mul":
        for i in (0, 1):
            bounded = node.inputs[1 - i]
            if (cap := node.inputs[i].number()) is not None and cap > 0 and bounded.name == "tanh":
                found = _logits(bounded.inputs[0])
                if found is None or found.cap is not None or found.bias is not None or found.masks:
                    return None
                found.cap, found.scale = cap, found.scale * cap
                return found
    if node.name in ("mul", "div"):
        for i in (0, 1) if node.name == "mul" else (1,):
            if (factor := node.inputs[i].number()) is not None and (found := _logits(node.inputs[1 - i])):
                factor = factor if node.name == "mul" else 1 / factor if factor else math.nan
                if found.bias is None and not found.masks and found.cap is None:
                    found.scale *= factor
                    return found
                return None
        return None
    if node.name == "add":
        for a, b in (node.inputs, node.inputs[::-1]):
            if (found := _logits(a)) is not None:
                if (mask := added_mask(b)) is not None:
                    if found.added is not None:
                        return None
                    found.masks, found.added = (*found.masks, mask), mask[0]
                    return found
                if found.bias is not None or found.masks:
                    return None
                found.bias = b
                return found
        return None
    if node.name == "select_n" and len(node.inputs) == 3:
        mask, *cases = node.inputs
        for seen in (0, 1):
            number = cases[1 - seen].number()
            if number is not None and number <= -1e4 and (found := _logits(cases[seen])) is not None:
                found.masks += ((mask, bool(seen), number),)
                return found
        return None
    return None


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The axes of query, key, value and result by name: batches, (key) heads, groups, and the four others.

    Each is a tuple of names, one for each axis; "" is an axis of size 1 without a role.
    """

    batches: tuple[str, ...]
    sides: tuple[tuple[str, ...], ...]

    def to_four(self, x: Any, names: Sequence[str], rest: tuple[str, str], sizes: dict[str, int], spread: bool) -> Any:
        """[batch, rest[0], heads, rest[1]] for query, key and value; spread: [batch, heads, query, key] for a mask.

        Works for NumPy's arrays and for JAX's.
        """
        heads = ("head", "group") if "group" in sizes else ("head",)
        if spread:
            wanted = (*self.batches, *heads, *rest)
        else:
            wanted = (*self.batches, rest[0], *(h for h in heads if h in names), rest[1])
        kept = [i for i, name in enumerate(names) if name]
        x = x.reshape([x.shape[i] for i in kept])
        present = [names[i] for i in kept]
        x = x.transpose([present.index(name) for name in wanted if name in present])
        shape = [sizes[name] if name in present else 1 for name in wanted]
        x = x.reshape(shape)
        # Axes that become one must all be there, or none.
        merged = [[n for n in group if n in wanted] for group in (self.batches, heads)]
        for group in merged:
            if any(n in present for n in group):
                for n in group:
                    shape[wanted.index(n)] = sizes[n]
        numpy = np if isinstance(x, np.ndarray) else jnp
        x = numpy.broadcast_to(x, shape)
        joined = [math.prod(shape[wanted.index(n)] for n in group) for group in merged]
        others = [shape[wanted.index(n)] for n in rest]
        if spread:
            return x.reshape([*joined, *others])
        return x.reshape([joined[0], others[0], joined[1], others[1]])

    def from_four(self, x: Any, sizes: dict[str, int], shape: Sequence[int]) -> Any:
        """The result as it lies in the model, from [batch, query, heads, feature]."""
        heads = ("head", "group") if "group" in sizes else ("head",)
        names = (*self.batches, "query", *heads, "feature")
        x = x.reshape([sizes[name] for name in names])
        wanted = [name for name in self.sides[3] if name]
        rest = [name for name in names if name not in wanted]  # with size 1
        return x.transpose([names.index(name) for name in (*wanted, *rest)]).reshape(shape)


def _layout(cone: Cone, query: Value, key: Value, value: Value, logits: _Logits) -> tuple[_Layout, dict[str, int]]:
    """All axes' names and sizes."""
    classes = cone.classes
    q, k, v, out = (classes.of(x) for x in (query, key, value, cone.out))
    contracted, batch = logits.product.params["dimension_numbers"]
    depths = [q[d] for d in contracted[0 if logits.query_first else 1]]
    shared = [k[d] for d in sorted(batch[1 if logits.query_first else 0])]
    keys = [c for c in k if c not in depths and c not in shared]
    if len(depths) != 1 or len(keys) != 1 or len(set(q)) != len(q) or len(set(k)) != len(k):
        raise Refusal("its products contract other axes than those of attention")
    free = [(c, size) for c, size in zip(q, query.shape, strict=True) if c not in depths and c not in shared]
    sized = [c for c, size in free if size != 1]
    if keys[0] not in v or len(sized) > 2 or not free:
        raise Refusal("its products contract other axes than those of attention")
    names: dict[Any, str] = {depths[0]: "depth", keys[0]: "key"}
    queries = sized or [free[0][0]]
    names[queries[0]] = "query"
    if len(queries) == 2:
        names[queries[1]] = "group"
    heads = [c for c in shared if _size(c) != 1] or shared
    for i, c in enumerate(heads):
        names[c] = "head" if i == len(heads) - 1 else f"batch{i}"
    features = [c for c, size in zip(v, value.shape, strict=True) if c not in names and size != 1]
    features = features or [c for c in v if c not in names and c not in shared]
    if len(features) != 1 or not heads:
        raise Refusal("its second product is not that of attention")
    names[features[0]] = "feature"
    sizes = {name: _size(c) for c, name in names.items()}
    sides = []
    for x, given in ((query, q), (key, k), (value, v), (cone.out, out)):
        found = [names.get(c, "") for c in given]
        if any(not name and size != 1 for name, size in zip(found, x.shape, strict=True)):
            raise Refusal("an axis of one of its operands is none of attention's")
        sides.append(tuple(found))
    shared_names = {name for name in sizes if name == "head" or name.startswith("batch")}
    needed = (
        {"query", "depth"},
        {"key", "depth"},
        {"key", "feature"},
        {"query", "feature", *({"group"} & sizes.keys())},
    )
    needed = tuple(side | shared_names for side in needed)
    if {"query", "group"} & {*sides[2]}:
        raise Refusal("its second product is not that of attention")
    if not set().union(*needed) <= set(sizes):
        raise Refusal("axes of its operands coincide")
    for side, wanted in zip(sides, needed, strict=True):
        if {name for name in wanted if sizes[name] != 1} - set(side):
            raise Refusal("an axis of one of its operands is none of attention's")
    return _Layout(tuple(f"batch{i}" for i in range(len(heads) - 1)), tuple(sides)), sizes


def _size(axis: tuple[Value, int]) -> int:
    return axis[0].shape[axis[1]]


def _match(search: Search, query: Value, key: Value, value: Value, end: Value, logits: _Logits) -> Match:
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) != 1 or query.dtype.name not in arguments.FLOATS:
        raise Refusal("query, key and value differ in dtype, or there is no kernel for it", 1)
    if end.dtype.itemsize > query.dtype.itemsize or end.aval.weak_type:
        raise Refusal("its result is wider than its operands", 1)
    if key == query and value != query:
        raise Refusal("query and key are the same array", 1)
    cone = Cone(search.graph, end, query, whole=(key, value)) if key != query else None
    if cone is None:
        raise Refusal("query, key and value are the same array", 1)
    layout, sizes = _layout(cone, query, key, value, logits)
    masks, causal = [], False
    for mask, seen, number in logits.masks:
        if mask == logits.added and _shows(search, mask, seen, cone, layout, sizes) is None:
            # Its weights, all equal, still depend on the logits; with replaced logits they would not.
            raise Refusal("its mask is added, so that a query without keys has a derivative", 1)
        for part in cone.masks_of(mask) if seen else [mask]:
            shown = _shows(search, part, seen, cone, layout, sizes)
            if shown == "causal":
                causal = True
            elif shown == "all":
                continue  # it hides nothing, as in a batch without padding
            elif number == -math.inf:
                raise Refusal("a query that sees no key gives NaN", 1)
            else:
                masks.append((part, seen))
    # The check's leaves, and the leaf from which each operand is made.
    leaves = cone.leaves
    if key not in leaves or value not in leaves:
        raise Refusal("query, key and value depend on each other", 1)
    names = {
        c: name
        for x, side in zip((query, key, value), layout.sides, strict=False)
        for c, name in zip(cone.classes.of(x), side, strict=True)
        if name
    }
    extra = _Extras(logits, masks, causal, cone, names)
    plan = _Plan(layout, tuple(sorted(sizes.items())), logits.scale, logits.cap, causal, extra.roles, extra.sides)
    reference = _reference(plan, cone, leaves.index(key), leaves.index(value), extra.positions)
    what = (OP, plan, leaves.index(key), leaves.index(value), tuple(extra.positions))
    if not search.agrees(cone, what, reference, _TRIALS):
        raise Refusal("its value or its derivative is not that of attention", 2)
    key, value, repeats = _without_copies(key, value, layout)
    build = functools.partial(_build, plan=plan, repeats=repeats, out=end.aval)
    notes = ["causal"] * causal + [f"with {role}" for role in dict.fromkeys(extra.roles)]
    return Match(OP, end, (query, key, value, *extra.operands), build, cone.computed, ", ".join(notes))


def _without_copies(key: Value, value: Value, layout: _Layout) -> tuple[Value, Value, int]:
    """Key and value without the copies that `jnp.repeat` made of each head, and how many copies there were. Otherwise
    key and value as they are, and 1."""
    found = [_unrepeated(x) for x in (key, value)]
    if not all(found) or "group" in layout.sides[0]:
        return key, value, 1
    (of_key, key_axis, copies), (of_value, value_axis, others) = found
    if copies != others or (layout.sides[1][key_axis], layout.sides[2][value_axis]) != ("head", "head"):
        return key, value, 1
    return of_key, of_value, copies


def _unrepeated(value: Value) -> tuple[Value, int, int] | None:
    """The array whose entries are repeated one after the other along an axis, that axis, and how often; None if there
    is none."""
    if value.name != "reshape":
        return None
    spread = source = value.inputs[0]
    axes = list(range(len(spread.shape)))  # of `spread`, for each of the source's
    while source.name == "broadcast_in_dim" and len(source.inputs) == 1:
        axes = [axes[d] for d in source.node.params["broadcast_dimensions"]]
        source = source.inputs[0]
    new = [d for d in range(len(spread.shape)) if d not in axes]
    if len(new) != 1 or not new[0] or axes != sorted(axes) or source.shape != tuple(spread.shape[d] for d in axes):
        return None
    axis, copies = new[0] - 1, spread.shape[new[0]]
    merged = [size * copies if d == axis else size for d, size in enumerate(source.shape)]
    return (source, axis, copies) if value.shape == tuple(merged) else None


class _Extras:
    """Bias and masks: operands, their roles, their axes' names, and their leaves in the check."""

    def __init__(self, logits: _Logits, masks, causal: bool, cone: Cone, names: dict):
        del causal
        found = [("bias", logits.bias)] if logits.bias is not None else []
        found += [("mask" if seen else "hidden", mask) for mask, seen in masks]
        self.operands, self.roles, self.sides, self.positions = [], [], [], []
        for role, given in found:
            leaf = cone.leaf_of(given)
            if leaf is None:
                raise Refusal(f"its {role} is made of several arrays", 1)
            side = [names.get(c, "") for c in cone.classes.of(leaf)]
            if any(not name and size != 1 for name, size in zip(side, leaf.shape, strict=True)):
                raise Refusal(f"its {role} has an axis that is none of attention's", 1)
            self.operands.append(leaf)
            self.roles.append(role)
            self.sides.append(tuple(side))
            self.positions.append(cone.leaves.index(leaf))
        self.roles, self.sides = tuple(self.roles), tuple(self.sides)


@dataclasses.dataclass(frozen=True)
class _Plan:
    layout: _Layout
    sizes: tuple[tuple[str, int], ...]
    scale: float
    cap: float | None
    causal: bool
    roles: tuple[str, ...]
    sides: tuple[tuple[str, ...], ...]


def _shows(search: Search, mask: Value, seen: bool, cone: Cone, layout: _Layout, sizes: dict[str, int]) -> str | None:
    """How a mask known at trace time limits the keys: "causal"; "all": every query sees every key; "one": every query
    sees a key. None if neither holds, or the mask is not known.

    seen: the mask's value for a key that is seen.
    """
    places = {c: i for i, c in enumerate(cone.classes.of(mask))}
    names = {name: c for c, name in _named(cone, layout).items()}
    query, key = places.get(names["query"]), places.get(names["key"])
    lengths = (sizes["query"], sizes["key"])

    def compute() -> str | None:
        known = search.known(mask)
        if known is None:
            return None
        known = numerics.thin(numerics.Dual(known)).value
        known = known if seen else ~known
        if query is None or key is None:
            return "all" if known.all() else None
        moved = np.moveaxis(known, (query, key), (-2, -1)).reshape(-1, known.shape[query], known.shape[key])
        if moved.shape[1:] == lengths and (moved == np.tri(*lengths, dtype=bool)).all():
            return "causal"
        if known.all():
            return "all"
        return "one" if known.any(key).all() else None

    return search.remembered((OP, seen, query, key, lengths), mask, compute)


def _named(cone: Cone, layout: _Layout) -> dict[Any, str]:
    found = {}
    for x, side in zip((cone.source, cone.out), (layout.sides[0], layout.sides[3]), strict=True):
        found |= {c: name for c, name in zip(cone.classes.of(x), side, strict=True) if name}
    for x, side in zip(cone.whole, layout.sides[1:3], strict=True):
        found |= {c: name for c, name in zip(cone.classes.of(x), side, strict=True) if name}
    return found


def _reference(plan: _Plan, cone: Cone, key_at: int, value_at: int, positions: Sequence[int]) -> numerics.Reference:
    def apply(query, *leaves):
        layout = plan.layout
        small = {}
        for x, side in zip((query, leaves[key_at], leaves[value_at]), layout.sides, strict=False):
            small |= {name: size for name, size in zip(side, x.shape, strict=True) if name}
        for name, _ in plan.sizes:
            small.setdefault(name, 1)
        q, k, v = (
            x.map(functools.partial(layout.to_four, names=side, rest=rest, sizes=small, spread=False))
            for x, side, rest in (
                (query, layout.sides[0], ("query", "depth")),
                (leaves[key_at], layout.sides[1], ("key", "depth")),
                (leaves[value_at], layout.sides[2], ("key", "feature")),
            )
        )
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.map(lambda a: np.repeat(a, repeats, 2)) for x in (k, v))
        z = numerics.einsum(q, "bqhd", k, "bkhd", "bhqk") * plan.scale
        if plan.cap is not None:
            z = numerics.tanh(z / plan.cap) * plan.cap
        seen = np.ones(z.shape, bool)
        for role, side, at in zip(plan.roles, plan.sides, positions, strict=True):
            spread = leaves[at].map(
                functools.partial(layout.to_four, names=side, rest=("query", "key"), sizes=small, spread=True)
            )
            if role == "bias":
                z = z + spread
            else:
                seen = seen & (spread.value != 0 if role == "mask" else spread.value == 0)
        if plan.causal:
            seen = seen & np.tri(*seen.shape[-2:], dtype=bool)
        z = numerics.select(seen, numerics.Dual(np.full(z.shape, -1e30)), z)
        e = numerics.exp(z - z.max((3,)))
        weights = e / e.sum((3,))
        out = numerics.einsum(weights, "bhqk", v, "bkhf", "bqhf")
        return out.map(lambda a: layout.from_four(a, small, cone.small(cone.out)))

    return apply


def _build(query, key, value, *extras, plan: _Plan, repeats: int, out) -> jax.Array:
    layout, sizes = plan.layout, dict(plan.sizes)
    of_keys = sizes | {"head": sizes["head"] // repeats}
    q, k, v = (
        layout.to_four(x, side, rest, given, spread=False)
        for x, side, rest, given in (
            (query, layout.sides[0], ("query", "depth"), sizes),
            (key, layout.sides[1], ("key", "depth"), of_keys),
            (value, layout.sides[2], ("key", "feature"), of_keys),
        )
    )
    bias, mask = None, None
    for role, side, x in zip(plan.roles, plan.sides, extras, strict=True):
        spread = layout.to_four(x, side, ("query", "key"), sizes, spread=True)
        if role == "bias":
            bias = spread
        else:
            spread = spread != 0 if role == "mask" else spread == 0  # masks may be numbers
            mask = spread if mask is None else mask & spread
    y = getattr(jaxops, OP)(q, k, v, bias, mask, scale=plan.scale, is_causal=plan.causal, logits_soft_cap=plan.cap)
    return layout.from_four(y, sizes, out.shape).astype(out.dtype)


def is_near(node: Node) -> str | None:
    """A softmax between two products."""
    if (exponential := exponentials(node)) is None or (x := less_maximum(exponential.inputs[0])) is None:
        return None
    return "attention" if _logits(x) is not None else None

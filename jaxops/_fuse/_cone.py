"""The nodes between two values, how their dimensions correspond, and the numbers that they compute on small arrays."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from jaxops._fuse._arithmetic import ELEMENTWISE, Dual, evaluate, evaluate_jaxpr, thin
from jaxops._fuse._graph import COPIES, Graph, Node, Value, inner_jaxprs, is_of_jax

#: The most nodes that are looked at for one match.
_LIMIT = 300

#: The most entries of an array, such as a causal mask, that is computed at trace time.
_LARGEST = 2**26

MOVES = frozenset({"broadcast_in_dim", "transpose", "reshape", "squeeze", "expand_dims", *COPIES})
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max"})


class Refusal(Exception):  # noqa: N818 (it is no error)
    """Why a rule does not match, in words; stage: how far it came."""

    def __init__(self, why: str, stage: int = 0):
        super().__init__(why)
        self.stage = stage


def widens(node: Node) -> bool:
    """A cast between floats that loses nothing."""
    if node.name != "convert_element_type" or not node.inputs[0].is_float:
        return False
    given, made = node.inputs[0].dtype, node.avals[0].dtype
    return jax.numpy.issubdtype(made, np.floating) and np.promote_types(given, made) == made


def core(value: Value) -> Value:
    """The value whose wider copy this is."""
    while value.name in COPIES or widens(value.node):
        value = value.inputs[0]
    return value


def untransposed(value: Value) -> Value:
    """The value whose wider or transposed copy this is."""
    value = core(value)
    while value.name == "transpose":
        value = core(value.inputs[0])
    return value


def stripped(value: Value, *others: str) -> Value:
    """Through casts between floats, moves, and the primitives named."""
    while value.name in MOVES or value.name in others or is_cast(value.node):
        value = value.inputs[0]
    return value


def is_cast(node: Node) -> bool:
    return node.name == "convert_element_type" and node.inputs[0].is_float and Value(node, 0).is_float


def squared(value: Value) -> Value | None:
    """x if the value is its square."""
    node = value.node
    if node.name == "square" or (node.name == "integer_pow" and node.params["y"] == 2):
        return node.inputs[0]
    if node.name == "pow" and node.inputs[1].number() == 2:
        return node.inputs[0]
    return node.inputs[0] if node.name == "mul" and node.inputs[0] == node.inputs[1] else None


def onward(graph: Graph, value: Value, most: int = 12, also: Sequence[str] = ()) -> Iterator[Value]:
    """The values that follow from one through its only user, the user's only user and so on.

    also: primitives that are followed besides operations on single entries, moves and gathers.
    """
    for _ in range(most):
        users = graph.users_of(value)
        if len(users) != 1 or users[0] is None or len(users[0].avals) != 1:
            return
        if users[0].name not in (*ELEMENTWISE, *MOVES, "gather", *also):
            return
        value = Value(users[0], 0)
        yield value


def ends(graph: Graph, value: Value, most: int = 24) -> Iterator[Value]:
    """The values that all that is computed from one goes through, in order: single entries, copies and moves."""
    reached, through = {value}, {value}
    pending = [(user.index, user) for user in graph.users_of(value) if user is not None]
    if None in graph.users_of(value):
        return
    heapq.heapify(pending)
    for _ in range(most):
        if not pending:
            return
        node = heapq.heappop(pending)[1]
        if len(node.avals) != 1 or node.name not in (*ELEMENTWISE, *MOVES, "custom_jvp_call"):
            return
        through -= {v for v in node.inputs if all(u is not None and u.index <= node.index for u in graph.users_of(v))}
        out = Value(node, 0)
        reached.add(out)
        through.add(out)
        if through == {out}:
            yield out
        for user in graph.users_of(out):
            if user is None:
                if through != {out}:
                    return
                continue
            if all(other is not user for _, other in pending):
                heapq.heappush(pending, (user.index, user))
        if None in graph.users_of(out):
            return


def _is_spread(node: Node) -> bool:
    """Whether it has its operand's entries, perhaps in a wider dtype or along further axes."""
    squeezes = node.name == "broadcast_in_dim" or (
        node.name in ("reshape", "expand_dims") and math.prod(node.avals[0].shape) == math.prod(node.inputs[0].shape)
    )
    return widens(node) or node.name in COPIES or (squeezes and len(node.inputs) == 1)


class _Classes:
    """Which dimensions of values are the same one."""

    def __init__(self):
        self._parent: dict[tuple[Value, int], tuple[Value, int]] = {}

    def find(self, value: Value, dim: int) -> tuple[Value, int]:
        here = (value, dim)
        path = []
        while (above := self._parent.get(here, here)) != here:
            path.append(here)
            here = above
        for step in path:
            self._parent[step] = here
        return here

    def of(self, value: Value) -> list[tuple[Value, int]]:
        return [self.find(value, d) for d in range(len(value.shape))]

    def join(self, a: Value, i: int, b: Value, j: int) -> None:
        if a.shape[i] != b.shape[j]:
            raise Refusal(f"{b.name} changes the size of an axis")
        self._parent[self.find(a, i)] = self.find(b, j)

    def add(self, node: Node) -> None:
        """The relations between the dimensions of a node's operands and result."""
        out = Value(node, 0)
        if node.name in ELEMENTWISE or node.name in COPIES or node.name == "custom_jvp_call":
            for operand in node.inputs:
                if len(operand.shape) not in (0, len(out.shape)):
                    raise Refusal(f"the operands of {node.name} differ in rank")
                for d, size in enumerate(operand.shape):
                    if size == out.shape[d]:  # else it is 1
                        self.join(operand, d, out, d)
            return
        if node.name == "iota":
            return
        if node.name == "dot_general":
            self._add_product(node)
            return
        (operand, *others) = node.inputs
        if node.name == "gather":
            self._add_gather(node)
            return
        if others:
            raise Refusal(f"{node.name} with a size known only when it runs")
        match node.name:
            case "broadcast_in_dim":
                for i, d in enumerate(node.params["broadcast_dimensions"]):
                    if operand.shape[i] == out.shape[d]:
                        self.join(operand, i, out, d)
            case "transpose":
                for d, i in enumerate(node.params["permutation"]):
                    self.join(operand, i, out, d)
            case "reshape" | "squeeze" | "expand_dims":
                sides = [[d for d, size in enumerate(v.shape) if size != 1] for v in (operand, out)]
                if [operand.shape[d] for d in sides[0]] != [out.shape[d] for d in sides[1]]:
                    raise Refusal("a reshape that splits or joins axes lies between")
                for i, d in zip(*sides, strict=True):
                    self.join(operand, i, out, d)
            case "reduce_sum" | "reduce_max":
                kept = [i for i in range(len(operand.shape)) if i not in node.params["axes"]]
                for d, i in enumerate(kept):
                    self.join(operand, i, out, d)
            case name:
                raise Refusal(f"{name} lies between")

    def _add_product(self, node: Node) -> None:
        (lhs, rhs), out, (contracted, batch) = node.inputs, Value(node, 0), node.params["dimension_numbers"]
        for i, j in (*zip(*contracted, strict=True), *zip(*batch, strict=True)):
            self.join(lhs, i, rhs, j)
        rest = [
            [(v, d) for d in range(len(v.shape)) if d not in (*axes, *shared)]
            for v, axes, shared in zip((lhs, rhs), contracted, batch, strict=True)
        ]
        for d, (value, i) in enumerate([*((lhs, i) for i in batch[0]), *rest[0], *rest[1]]):
            self.join(value, i, out, d)

    def _add_gather(self, node: Node) -> None:
        """Joins a gather of single entries or whole axes: operand axes are batch, or indexed by their position."""
        operand, indices = node.inputs
        out, numbers = Value(node, 0), node.params["dimension_numbers"]
        batch = [d for d in range(len(out.shape)) if d not in numbers.offset_dims]  # where indices' axes are
        for d, place in enumerate(batch):
            self.join(indices, d, out, place)
        for axis, place in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            self.join(operand, axis, out, batch[place])
        removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        kept = [a for a in range(len(operand.shape)) if a not in removed]
        for axis, place in zip(kept, numbers.offset_dims, strict=True):
            if operand.shape[axis] == out.shape[place]:
                self.join(operand, axis, out, place)


class Cone:
    """The nodes between a source and a result, and the values that they read besides.

    Args:
      whole: leaves that are taken as they are.
      exact: numbers that the computation has rounded to a dtype; the check takes them unrounded.

    Attributes:
      nodes: in their order, the result's last.
      leaves: values that do not depend on the source, through casts that lose nothing and broadcasts; no scalars that
        are known.
      reduced: the dimension classes over which sums or maxima are taken.

    Raises:
      Refusal: a node's value or derivative is not known here.
    """

    def __init__(
        self, graph: Graph, out: Value, source: Value, whole: Sequence[Value] = (), exact: Sequence[float] = ()
    ):
        self.out, self.source, self.whole, self.exact = out, source, whole, exact
        self.nodes, frontier = _between(out, source)
        self.classes = _Classes()
        self.one_hot = False
        self._shared: set[Node] = set()  # which nothing but leaves is computed with
        for node in self.nodes:
            if node.has_effects or len(node.avals) != 1:
                raise Refusal(f"{node.name} lies between")
            self.classes.add(node)
        self._peeled = {}
        for value in frontier:
            self._read(value)
        self.leaves = list(dict.fromkeys(self._peeled.values()))
        self.reduced = {
            self.classes.find(node.inputs[0], a) for node in self.nodes if node.name in _REDUCTIONS for a in _axes(node)
        }
        self._sides: dict[tuple[Node, Value], set[bool]] = {}  # of each bound, which `evaluate` has met
        self._check_uses(graph)

    def _read(self, value: Value) -> None:
        """The source of a value outside the cone: a number, a leaf, a one-hot array, several masks."""
        if value.number() is not None or value in self._peeled:
            return
        chain, inner = [], value
        while (inner.name in MOVES or inner.name == "convert_element_type") and len(inner.inputs) == 1:
            chain.append(inner.node)
            inner = inner.inputs[0]
        masks = inner.inputs if inner.name == "and" and inner.dtype == np.bool_ else _compared(inner)
        if added := added_mask(value):
            masks = added[:1]
        if not masks:
            self._peeled |= self._expanded(value) or {
                value: value if self._is_spread_again(value) else self._peel(value)
            }
            return
        for node in (inner.node, *reversed(chain)):
            self.classes.add(node)
        self.nodes = [inner.node, *reversed(chain), *self.nodes]
        self._shared |= {inner.node, *chain}
        for mask in masks:
            self._read(mask)

    def masks_of(self, value: Value) -> list[Value]:
        """The leaves whose conjunction is this mask."""
        if value.number() == 1:
            return []
        while value not in self._peeled and (value.name in MOVES or value.name == "convert_element_type"):
            value = value.inputs[0]
        if value in self._peeled:
            return [self._peeled[value]]
        masks = value.inputs if value.name == "and" else _compared(value)
        return [leaf for mask in masks for leaf in self.masks_of(mask)] or [value]

    def _expanded(self, value: Value) -> dict[Value, Value] | None:
        """If the value is a one-hot array: its nodes join the cone, the labels are the leaf."""
        if value.name != "convert_element_type" or value.inputs[0].name != "eq":
            return None
        compared = value.inputs[0].node
        for labels, positions in (compared.inputs, compared.inputs[::-1]):
            chain = [value.node, compared]
            while positions.name in MOVES:
                chain.append(positions.node)
                positions = positions.inputs[0]
            if positions.name == "iota" and positions != labels:
                chain.append(positions.node)
                self.one_hot = True
                for node in reversed(chain):
                    self.classes.add(node)
                self.nodes = [*reversed(chain), *self.nodes]
                self._shared |= set(chain)
                return {labels: self._peel(labels)}
        return None

    def _is_spread_again(self, value: Value) -> bool:
        """Whether this is a mask made from one that is a leaf: of queries and keys, which are other axes here."""
        if not _holds_truths(value):
            return False
        while _is_spread(value.node):
            value = value.node.inputs[0]
        return value in self._peeled.values()

    def _peel(self, value: Value) -> Value:
        while value not in self.whole:
            node = value.node
            if not _is_spread(node):
                return value
            try:
                self.classes.add(node)
            except Refusal:
                return value
            value = node.inputs[0]
        return value

    def _check_uses(self, graph: Graph) -> None:
        inside = set(self.nodes)
        carriers: set[Value] = {self.source}
        for node in self.nodes[:-1]:
            value = Value(node, 0)
            if node in self._shared:
                continue
            if (node.name in MOVES or is_cast(node)) and node.inputs[0] in carriers:
                carriers.add(value)  # nothing is computed twice if others read it
            elif any(user not in inside for user in graph.users_of(value)):
                raise Refusal(f"the result of its {node.name} is used elsewhere too", 3)

    @property
    def computed(self) -> list[Node]:
        """The nodes that a replacement removes entirely."""
        return [node for node in self.nodes if node not in self._shared]

    def axes_of(self, value: Value) -> tuple[int, ...]:
        """The dimensions along which a value is reduced."""
        return tuple(d for d, c in enumerate(self.classes.of(value)) if c in self.reduced)

    def leaf_of(self, value: Value) -> Value | None:
        """The leaf that a node's operand copies."""
        while value not in self._peeled and value.name in (*MOVES, "convert_element_type"):
            value = value.inputs[0]
        return self._peeled.get(value, value if value in self.leaves else None)

    def reduces_alike(self) -> bool:
        """Whether all sums and maxima are over the same source dimensions."""
        wanted = {self.classes.find(self.source, d) for d in self.axes_of(self.source)}
        return bool(wanted) and all(
            {self.classes.find(node.inputs[0], a) for a in _axes(node)} == wanted
            for node in self.nodes
            if node.name in _REDUCTIONS
        )

    def permutation(self) -> tuple[int, ...]:
        """For each dimension of the result, the source's; a Refusal if they are not the same dimensions."""
        places = {c: d for d, c in enumerate(self.classes.of(self.source))}
        found = tuple(places.get(c, -1) for c in self.classes.of(self.out))
        if len(places) < len(self.source.shape) or sorted(found) != list(range(len(self.source.shape))):
            raise Refusal("its axes do not correspond to those of its input")
        return found

    def places(self, leaf: Value) -> tuple[int | None, ...]:
        """For each dimension of a leaf, the source's, None if its size is 1; a Refusal if a dimension is not the
        source's."""
        places = {c: d for d, c in enumerate(self.classes.of(self.source))}
        found = tuple(
            None if size == 1 else places.get(c, -1) for size, c in zip(leaf.shape, self.classes.of(leaf), strict=True)
        )
        if -1 in found:
            raise Refusal("an operand has an axis that the input has not")
        if len(kept := [p for p in found if p is not None]) != len(set(kept)):
            raise Refusal("an operand has an axis of the input twice")
        return found

    def key(self) -> tuple[Any, ...]:
        """Equal for cones that compute the same."""
        numbers: dict[Value, int] = {self.source: 0, **{leaf: i + 1 for i, leaf in enumerate(self._peeled)}}
        described = [(self.source.shape, str(self.source.dtype)), *((v.shape, str(v.dtype)) for v in self.leaves)]
        for node in self.nodes:
            read = [numbers[v] if v in numbers else (v.number(), str(v.dtype)) for v in node.inputs]
            params = [(k, str(v)) for k, v in node.params.items() if k in _TELLING]
            described.append((node.name, tuple(read), tuple(params), node.avals[0].shape, str(node.avals[0].dtype)))
            numbers[Value(node, 0)] = len(numbers)
        peeled = tuple(self.leaves.index(leaf) for leaf in self._peeled.values())
        return (*described, peeled)

    @property
    def tolerance(self) -> float:
        """By how much the constants are rounded."""
        widest = 2e-6
        if self.exact:
            return widest
        for node in self.nodes:
            for value in node.inputs:
                number = value.number()
                if number is None or not value.is_float or not math.isfinite(number):
                    continue
                if math.frexp(number)[0] * 16 % 1:  # more than four digits: it was rounded
                    widest = max(widest, 2 * float(jax.numpy.finfo(value.dtype).eps))
        return widest

    def small(self, value: Value) -> tuple[int, ...]:
        """A value's shape with two or three entries along dimensions that are not reduced."""
        return tuple(
            size if size == 1 or c in self.reduced else min(size, 3)
            for size, c in zip(value.shape, self.classes.of(value), strict=True)
        )

    def evaluate(self, source: Dual, leaves: Sequence[Dual]) -> Dual:
        """The result on small arrays, without the casts' roundings."""
        env = {self.source: source}
        given = dict(zip(self.leaves, leaves, strict=True))
        for value, leaf in self._peeled.items():
            env[value] = self._unpeeled(value, leaf, given[leaf])
        for node in self.nodes:
            operands = [env[v] if v in env else self._known(v) for v in node.inputs]
            value = Value(node, 0)
            if node.name == "custom_jvp_call":
                program = node.params["call_jaxpr"]
                results = evaluate_jaxpr(program.jaxpr, program.consts, operands)
                found = results[0] if results else None
            else:
                found = evaluate(node.name, node.params, operands, self.small(value))
            if found is None:
                raise Refusal(f"{node.name} lies between")
            env[value] = found
            for bound, operand in zip(node.inputs, operands, strict=True):
                if _is_bound(node, bound):
                    reached = found.value == operand.value if node.name in _LIMITS else found.value
                    self._sides.setdefault((node, bound), set()).update(np.unique(reached).tolist())
        return env[self.out]

    def check_bounds(self) -> None:
        """Refuses bounds, as in relu6, that `evaluate` always or never reached: the check has seen one side alone."""
        for (_, bound), sides in self._sides.items():
            if len(sides) < 2:
                number = bound.number()
                what = "a test for NaN or infinity" if number is None else f"a bound of {number:g}"
                raise Refusal(f"{what} lies between")
        if any(n.name == "is_finite" for n in self.nodes) and any(map(_guards_sum, self.nodes)):
            raise Refusal("rows without a finite entry count as 0")

    def _known(self, value: Value) -> Dual:
        """A number that is known at trace time, in the value's shape."""
        number = value.number()
        assert number is not None
        if value.is_float:
            of_dtype = np.dtype(value.dtype).type
            number = next((x for x in self.exact if float(of_dtype(x)) == number), number)
        return Dual(np.full(self.small(value), number, np.float64 if value.is_float else np.int64))

    def _unpeeled(self, value: Value, leaf: Value, given: Dual) -> Dual:
        if value == leaf:
            return given
        inner = self._unpeeled(value.inputs[0], leaf, given)
        found = evaluate(value.name, value.node.params, [inner], self.small(value))
        assert found is not None
        return found


#: Primitives that keep an operand within bounds, and that compare it with one.
_LIMITS = ("min", "max", "clamp")
_EQUALITIES = ("eq", "ne")
_COMPARISONS = ("gt", "ge", "lt", "le", *_EQUALITIES)
_BOUNDING = (*_LIMITS, *_COMPARISONS)


def _is_bounding(primitive: str, number: float) -> bool:
    """Limits that guard against 0 and overflow are no bounds: they change nothing beyond rounding."""
    return primitive in _EQUALITIES or (primitive in _COMPARISONS and number == 0) or 1e-20 < abs(number) < 1e30


def _guards_sum(node: Node) -> bool:
    """Whether the node keeps a sum from 0."""
    if node.name not in ("add", "max"):
        return False
    return any(
        number.number() not in (None, 0, -math.inf) and stripped(value).name == "reduce_sum"
        for number, value in (node.inputs, node.inputs[::-1])
    )


def _is_row_maximum(value: Value) -> bool:
    value = stripped(value)
    while value.name == "max":
        value = stripped(next((v for v in value.inputs if v.number() is None), value.inputs[0]))
    return value.name == "reduce_max"


def _is_bound(node: Node, operand: Value) -> bool:
    """Whether a number bounds the other operand or is compared with it, or an operand is tested for NaN or infinity.

    Softmaxes test their maximum, which matches compute alike.
    """
    if node.name == "ne" and node.inputs[0] == node.inputs[1]:
        return True
    if node.name == "is_finite":
        return not _is_row_maximum(operand)
    number = operand.number() if node.name in _BOUNDING and operand.is_float else None
    return number is not None and _is_bounding(node.name, number)


def _has_bounds(jaxpr: Jaxpr) -> bool:
    """Whether a function keeps a number within bounds, or may do so."""
    for equation in jaxpr.eqns:
        inner = [*inner_jaxprs(equation.params)]
        literals = [
            x.val for x in equation.invars if isinstance(x, Literal) and np.issubdtype(x.aval.dtype, np.floating)
        ]
        name = equation.primitive.name
        if (inner or name in _BOUNDING) and any(_is_bounding(name, float(x)) for x in literals):
            return True
        if any(map(_has_bounds, inner)):
            return True
    return False


def _compared(value: Value) -> list[Value]:
    """The mask if the value says where it, as numbers, is not 0."""
    if value.name not in ("gt", "ne") or value.inputs[1].number() != 0:
        return []
    return value.inputs[:1] if _holds_truths(value.inputs[0]) else []


def added_mask(value: Value) -> tuple[Value, bool, float] | None:
    """The mask if the value is 0 where a key is seen and a large negative number elsewhere.

    So large that a logit vanishes when this is added to it.

    Returns:
      The mask, its value for a key that is seen, the number.
    """
    value = stripped(value)
    if value.name != "select_n" or len(value.inputs) != 3 or not value.is_float:
        return None
    mask, *cases = value.inputs
    numbers = [case.number() for case in cases]
    for seen in (0, 1):
        number = numbers[1 - seen]
        if numbers[seen] == 0 and number is not None and -number * float(jax.numpy.finfo(value.dtype).eps) >= 64:
            return mask, bool(seen), number
    return None


#: The known primitives' parameters that change their values.
_TELLING = frozenset(
    {
        "axes",
        "permutation",
        "broadcast_dimensions",
        "new_dtype",
        "y",
        "exponent",
        "dimension",
        "name",
        "dimensions",
        "dimension_numbers",
        "mode",
    }
)


def _axes(node: Node) -> tuple[int, ...]:
    return tuple(node.params["axes"])


def _between(out: Value, source: Value) -> tuple[list[Node], list[Value]]:
    """The nodes between the source and `out`, in order; the other values that they read."""
    depends: dict[Value, bool] = {source: True}
    first = source.node.index
    stack = [out]
    while stack:
        value = stack[-1]
        if value in depends:
            stack.pop()
            continue
        node = value.node
        if node.index < 0 or node.index <= first:
            depends[value] = False
            continue
        pending = [v for v in node.inputs if v not in depends]
        if len(depends) > _LIMIT:
            raise Refusal("too much lies between")
        if pending:
            stack += pending
            continue
        depends[value] = any(depends[v] for v in node.inputs)
    if not depends[out]:
        raise Refusal("it does not depend on the input")
    nodes = sorted({v.node for v, yes in depends.items() if yes and v != source}, key=lambda node: node.index)
    for node in nodes:
        if node.name == "custom_jvp_call" and not _is_known_function(node):
            raise Refusal("a custom_jvp lies between")
    frontier = dict.fromkeys(v for node in nodes for v in node.inputs if not depends[v])
    return nodes, list(frontier)


def _is_known_function(node: Node) -> bool:
    """One of JAX's custom_jvp functions, such as relu, whose rule is the function's derivative."""
    if node.name != "custom_jvp_call":
        return False
    jaxpr = node.params["call_jaxpr"].jaxpr
    return is_of_jax(jaxpr) and not _has_bounds(jaxpr)


def known_value(value: Value, most: int = 40) -> np.ndarray | None:
    """The value if it is known at trace time: made from constants and positions, with `_LARGEST` entries or fewer at
    each step, not counting repetitions, as along the batch.
    """
    env: dict[Value, Dual] = {}

    def compute(value: Value) -> bool:
        if value in env:
            return True
        if len(env) > most:
            return False
        node = value.node
        if node.name == "constant":
            given = node.params["value"]
            if isinstance(given, jax.core.Tracer) or not _is_numbers(given):
                return False
            env[value] = Dual(np.asarray(given))
            return True
        if node.name == "input" or node.has_effects or len(node.avals) != 1 or not all(map(compute, node.inputs)):
            return False
        operands = [env[v] for v in node.inputs]
        if node.name in ELEMENTWISE:
            operands = [thin(x) for x in operands]
        if _entries(node, [x.shape for x in operands]) > _LARGEST:
            return False
        if node.name not in MOVES:
            operands = [
                Dual(x.value.astype(np.float64)) if v.is_float else x
                for x, v in zip(operands, node.inputs, strict=True)
            ]
        found = evaluate(node.name, node.params, operands, value.shape)
        if found is not None:  # rounded, or wrapped around, as the dtype is
            env[value] = Dual(np.broadcast_to(thin(found).value.astype(value.dtype), value.shape))
        return found is not None

    try:
        return env[value].value if compute(value) else None
    finally:
        env.clear()  # `compute` refers to itself, so that its large arrays would wait for the garbage collector


def _entries(node: Node, shapes: Sequence[tuple[int, ...]]) -> int:
    """How many entries NumPy computes or copies for a node with operands of these shapes."""
    if node.name in ELEMENTWISE:
        return math.prod(np.broadcast_shapes(*shapes))
    out = node.avals[0].shape
    moves = node.name in MOVES or node.name == "iota"
    if moves and (node.name != "reshape" or [d for d in out if d != 1] == [d for d in shapes[0] if d != 1]):
        return 0
    return max(math.prod(shape) for shape in (out, *shapes))


Known = Callable[[Value], np.ndarray | None]


def _is_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | jax.Array | bool | int | float)


def _holds_truths(value: Value) -> bool:
    """Whether it is a boolean array, or a boolean array converted to numbers."""
    while value.dtype != np.bool_ and (value.name in MOVES or value.name == "convert_element_type"):
        value = value.inputs[0]
    return value.dtype == np.bool_


def random_operands(cone: Cone, seed: int, scale: float, shift: float, known: Known) -> tuple[Dual, list[Dual]]:
    """Source rows, and leaves, with tangents, all different. Known masks and labels are given as they are."""
    rng = np.random.default_rng(seed)

    def draw(shape, scale, shift):
        return Dual(rng.standard_normal(shape) * scale + shift, rng.standard_normal(shape) * scale)

    source = draw(cone.small(cone.source), scale, shift)
    columns = min((cone.source.shape[a] for a in cone.axes_of(cone.source)), default=1)
    leaves = []
    for leaf in cone.leaves:
        shape, truths = cone.small(leaf), _holds_truths(leaf)
        if leaf.is_float and not truths:
            leaves.append(draw(shape, 1.0, 0.3))
        elif (value := known(leaf)) is not None:
            leaves.append(Dual(value[tuple(map(slice, shape))].astype(np.float64 if leaf.is_float else value.dtype)))
        elif truths:
            leaves.append(Dual((rng.random(shape) < 0.7).astype(np.float64 if leaf.is_float else leaf.dtype)))
        else:
            leaves.append(Dual(rng.integers(columns, size=shape)))
    return source, leaves


Reference = Callable[..., Dual]


def agrees(cone: Cone, reference: Reference, trials: Sequence[tuple[float, float]], known: Known) -> bool:
    """Whether a cone computes the same values and tangents as `reference`, on random rows with several magnitudes.

    trials: the source entries' standard deviation and mean; known: `known_value`, perhaps remembered.
    """
    for value in (cone.source, *cone.leaves):
        if not (value.is_float or value.dtype == np.bool_ or jax.numpy.issubdtype(value.dtype, np.integer)):
            raise Refusal(f"an operand has dtype {value.dtype}")
    if sum(math.prod(cone.small(v)) for v in (cone.source, *cone.leaves)) > 2**22:
        raise Refusal("its rows are too long for the check")
    tolerance = cone.tolerance
    with np.errstate(all="ignore"):
        for seed, (scale, shift) in enumerate(trials):
            source, leaves = random_operands(cone, seed, scale, shift, known)
            got, wanted = cone.evaluate(source, leaves), reference(source, *leaves)
            for a, b in ((got.value, wanted.value), (got.tangent, wanted.tangent)):
                if a.shape != b.shape or not np.isfinite(b).all():
                    return False
                if not np.abs(a - b).max(initial=0) <= tolerance * max(np.abs(b).max(initial=0), 1e-30):
                    return False
    cone.check_bounds()
    return True

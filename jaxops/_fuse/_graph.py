"""A jaxpr as a graph, in which rules look for ops: who uses a value, and the equations inside JAX's own small
functions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive

from jaxops._fuse._arithmetic import Dual, evaluate

_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep

#: A jitted function with at most so many equations, without a product or a loop, is seen through, whoever wrote it.
_SMALL = 16


#: Primitives that give their operand; `pvary` only types it, inside a shard_map.
COPIES = frozenset({"copy", "copy_p", "pvary", "pcast"})


class Value(NamedTuple):
    """A node's i-th result."""

    node: Node
    i: int

    @property
    def aval(self) -> ShapedArray:
        return self.node.avals[self.i]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype:
        return self.aval.dtype

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def is_float(self) -> bool:
        return jax.numpy.issubdtype(self.dtype, np.floating)

    @property
    def inputs(self) -> list[Value]:
        return self.node.inputs

    def number(self) -> float | None:
        """The value if it is a scalar known at trace time, or an array filled with one."""
        value, dtypes = self, []
        while value.name in ("broadcast_in_dim", "convert_element_type", "reshape", *COPIES):
            dtypes.append(value.dtype)
            value = value.inputs[0]
        found = value.node.params.get("value") if value.name == "constant" else None
        if found is None or isinstance(found, jax.core.Tracer) or np.ndim(found) or not _is_real(value.dtype):
            return None
        number = np.asarray(found)
        for dtype in reversed(dtypes):  # the roundings on the way
            number = number.astype(dtype)
        return float(number)


@dataclasses.dataclass(eq=False)
class Node:
    """An equation; or an input or a constant, which has no primitive."""

    name: str
    primitive: Primitive | None
    inputs: list[Value]
    params: dict[str, Any]
    avals: list[ShapedArray]
    index: int = -1
    has_effects: bool = False
    #: Its line and names, and the settings under which it was traced.
    source: Any = None
    names: Any = None
    context: Any = None

    @property
    def line(self) -> str:
        """Where in the user's code it is."""
        return source_info_util.summarize(self.source) if self.source is not None else ""


def _is_real(dtype: Any) -> bool:
    """Whether the dtype holds real numbers or truth values."""
    return dtype == np.bool_ or any(jax.numpy.issubdtype(dtype, kind) for kind in (np.floating, np.integer))


def constant(value: Any, aval: ShapedArray) -> Value:
    return Value(Node("constant", None, [], {"value": value}, [aval]), 0)


def description(value: Value, most: int = 40) -> tuple[Any, list[Any]]:
    """How a value is computed, hashable, and its source arrays and inputs, which stand by identity."""
    numbers: dict[Node, int] = {}
    described, made_of, stack = [], [], [value.node]
    while stack:
        if len(numbers) > most:
            return id(value.node), [value.node]
        node = stack[-1]
        pending = [v.node for v in node.inputs if v.node not in numbers]
        if pending and node not in numbers:
            stack += pending
            continue
        stack.pop()
        if node in numbers:
            continue
        numbers[node] = len(numbers)
        scalar = Value(node, 0).number() if node.name == "constant" else None
        if scalar is not None:
            what: Any = (scalar, str(node.avals[0].dtype))
        elif node.inputs or node.name == "iota":
            what = tuple(sorted(f"{k}={v}" for k, v in node.params.items()))
        else:
            made_of.append(node.params.get("value", node))
            what = id(made_of[-1])
        read = tuple((numbers[v.node], v.i) for v in node.inputs)
        described.append((node.name, what, read, node.avals[0].shape, str(node.avals[0].dtype)))
    return (value.i, *described), made_of


def inner_jaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def is_jit(equation_or_node: JaxprEqn | Node) -> bool:
    return equation_or_node.primitive is not None and equation_or_node.primitive.name in ("jit", "pjit")


def is_of_jax(jaxpr: Jaxpr) -> bool:
    """Whether JAX's own code defines the function behind the jaxpr."""
    where = getattr(jaxpr.debug_info, "func_src_info", None) or ""
    return where.rpartition(" at ")[2].startswith(_JAX)


def _is_small(jaxpr: Jaxpr) -> bool:
    """A few equations, and none for which anybody would compile a function once."""
    count = 0
    for equation in jaxpr.eqns:
        inner = list(inner_jaxprs(equation.params))
        if equation.primitive.name == "dot_general" or (inner and not is_jit(equation)):
            return False
        if not all(map(_is_small, inner)):
            return False
        count += sum(len(program.eqns) for program in inner) or 1
    return count <= _SMALL


def _is_transparent(equation: JaxprEqn) -> bool:
    """Whether a jit is no boundary to keep: JAX's own function or a small one, nothing placed or donated."""
    if not is_jit(equation):
        return equation.primitive.name in ("closed_call", "core_call")
    params, jaxpr = equation.params, equation.params["jaxpr"].jaxpr
    unspecified = all(
        type(sharding).__name__ == "UnspecifiedValue"
        for sharding in (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    )
    placed = any(x is not None for x in (*params.get("in_layouts", ()), *params.get("out_layouts", ())))
    if not unspecified or placed or any(params.get("donated_invars", ())) or params.get("compiler_options_kvs"):
        return False
    return is_of_jax(jaxpr) or _is_small(jaxpr)


_FOLDED = frozenset(
    ["add", "sub", "mul", "div", "neg", "max", "min", "sqrt", "rsqrt", "square", "integer_pow", "pow"]
).union(["gt", "ge", "lt", "le", "eq", "ne", "convert_element_type"])


class Graph:
    """A jaxpr's nodes in their order, transparent jits inlined, computations on known scalars folded."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any]):
        self.nodes: list[Node] = []
        self._rounded: dict[tuple | None, Node] = {}
        self.inputs = [Value(Node("input", None, [], {}, [v.aval]), 0) for v in jaxpr.invars]
        self.outputs = self._add(jaxpr, consts, self.inputs, None, None)
        self._find_users()

    def _add(
        self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value], names: Any, source: Any
    ) -> list[Value]:
        """source: the equation that calls one of JAX's own functions, whose lines tell a user nothing."""
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {v: constant(c, v.aval) for v, c in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom):
            return constant(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            stack = equation.source_info.name_stack
            stack = stack if names is None else names + stack
            if _is_transparent(equation):
                inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
                program, values = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
                caller = source or (equation.source_info if is_of_jax(program) else None)
                results = self._add(program, values, given, stack, caller)
            else:
                results = _folded(equation, given) or self._unmultiplied(equation, given, stack, source)
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _unmultiplied(self, equation: JaxprEqn, inputs: list[Value], names: Any, source: Any) -> list[Value]:
        """A node. A product that sums nothing and multiplies by ones, as by a mask that hides no head, becomes its
        other operand, transposed as the result is.
        """
        if equation.primitive is lax.dot_general_p:
            (contracted, _), batch = equation.params["dimension_numbers"]
            for i in (0, 1):
                ones, other, first = inputs[i], inputs[1 - i], batch[1 - i]
                if contracted or len(batch[i]) != len(ones.shape) or other.dtype != equation.outvars[0].aval.dtype:
                    continue
                if not _is_one(ones):
                    continue
                order = (*first, *(d for d in range(len(other.shape)) if d not in first))
                if order == tuple(range(len(order))):
                    return [other]
                params = {"permutation": order}
                equation = equation.replace(primitive=lax.transpose_p, params=params, invars=[equation.invars[1 - i]])
                return self._node(equation, [other], names, source)
        return self._node(equation, inputs, names, source)

    def _node(self, equation: JaxprEqn, inputs: list[Value], names: Any, source: Any) -> list[Value]:
        key = (*inputs, *equation.params.values()) if _rounds(equation, inputs) else None
        if (same := self._rounded.get(key)) is not None and same.context == equation.ctx:
            return [Value(same, 0)]
        # lax.reshape may transpose first; no rule takes that for a move.
        transposes = equation.primitive.name == "reshape" and equation.params.get("dimensions") is not None
        node = Node(
            name="reshape of a transpose" if transposes else equation.primitive.name,
            primitive=equation.primitive,
            inputs=inputs,
            params=equation.params,
            avals=[v.aval for v in equation.outvars],
            index=len(self.nodes),
            has_effects=bool(equation.effects),
            source=source or equation.source_info,
            names=names,
            context=equation.ctx,
        )
        self.nodes.append(node)
        if key is not None:
            self._rounded[key] = node
        return [Value(node, i) for i in range(len(node.avals))]

    def _find_users(self) -> None:
        """Of each value, the nodes that read it and are needed themselves; None stands for the program's results."""
        self.users: dict[Value, list[Node | None]] = {}
        needed = {value.node for value in self.outputs}
        for value in self.outputs:
            self.users.setdefault(value, []).append(None)
        self.live: list[Node] = []
        for node in reversed(self.nodes):
            if node not in needed and not node.has_effects:
                continue
            self.live.append(node)
            for value in dict.fromkeys(node.inputs):
                self.users.setdefault(value, []).append(node)
                needed.add(value.node)
        self.live.reverse()

    def users_of(self, value: Value) -> list[Node | None]:
        return self.users.get(value, [])


#: Through these, a parameter stays a parameter.
_SELECTIONS = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "dynamic_slice", "gather", *COPIES}
)


def _is_one(value: Value, most: int = 2**16) -> bool:
    """Whether all entries are 1, as is known at trace time; an array of constants has at most so many."""
    while value.number() is None and (value.name in _SELECTIONS - {"gather"} or value.name == "convert_element_type"):
        value = value.inputs[0]
    if (number := value.number()) is not None:
        return number == 1
    given = value.node.params.get("value") if value.name == "constant" else None
    if given is None or isinstance(given, jax.core.Tracer) or not _is_real(value.dtype) or np.size(given) > most:
        return False
    return bool(np.all(np.asarray(given) == 1))


def _rounds(equation: JaxprEqn, inputs: Sequence[Value]) -> bool:
    """Whether the equation rounds a computed f32 value to bfloat16. Layers in bfloat16 each round the same input.

    A parameter's casts stay, also those of its slices and transposes: its gradients are added in the parameter's dtype.
    """
    if equation.primitive.name != "convert_element_type":
        return False
    value = inputs[0]
    if (value.dtype, equation.outvars[0].aval.dtype) != (np.float32, jax.numpy.bfloat16):
        return False
    while value.name in _SELECTIONS:
        value = value.inputs[0]
    return value.node.primitive is not None


def _folded(equation: JaxprEqn, inputs: Sequence[Value]) -> list[Value] | None:
    """An equation's result if it is known without running it; `jnp.var` hands its ddof to a jit, and chooses by it."""
    name, avals = equation.primitive.name, [v.aval for v in equation.outvars]
    if name == "select_n" and (which := inputs[0].number()) is not None:
        chosen = inputs[1 + int(which)]
        return [chosen] if chosen.aval.shape == avals[0].shape else None
    if name not in _FOLDED or avals[0].shape or equation.effects:
        return None
    numbers = [value.number() for value in inputs]
    if None in numbers or not all(value.name == "constant" for value in inputs):
        return None
    if not _is_real(avals[0].dtype):
        return None
    known = [np.asarray(value.node.params["value"]) for value in inputs]
    found = evaluate(name, equation.params, [Dual(x.astype(np.float64)) for x in known])
    return None if found is None else [constant(np.asarray(found.value).astype(avals[0].dtype), avals[0])]

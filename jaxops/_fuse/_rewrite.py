"""A jaxpr with its matches replaced, as a function that JAX can transform: inner programs too, each once."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxops._fuse import _report, _rules
from jaxops._fuse._graph import Graph, Node, Value, is_jit
from jaxops._fuse._match import Match, Search
from jaxops._fuse._policies import translated

#: How many inner programs a fused function remembers.
_REMEMBERED = 1024

_LOOPS = ("scan", "while", "cond")
_REMATS = ("checkpoint", "remat", "remat2")
_OWN_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


class Rewriter:
    """Rewrites programs for one fused function.

    Inner programs are remembered by identity: a jitted layer that is called many times stays one function, and a
    function that is called again outside jit runs the compiled program.
    """

    def __init__(self, only: frozenset[str]):
        self.only = only
        self._checked: dict = {}
        self._inner: dict[Any, tuple[Any, ClosedJaxpr, _report.Found]] = {}

    def __call__(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Callable[..., list[Any]], _report.Found]:
        """A function of the program's inputs, and the parts that were found in it."""
        graph = Graph(jaxpr, consts)
        found = _report.Found()
        replaced: dict[Value, Match] = {}
        for item in self.search(graph):
            found.add(item)
            if isinstance(item, Match):
                replaced |= dict.fromkeys(item.results, item)
        steps = _ordered(graph, replaced)
        assert steps is not None
        prepared = {}
        for step in steps:
            if isinstance(step, Node):
                inner = _report.Found()
                prepared[step] = self._prepared(step, inner)
                found.add_node(step, inner)
        return functools.partial(_run, graph, steps, prepared), found

    def search(self, graph: Graph) -> list[Match | _rules.Miss]:
        """The matches; ops with several results only if all can still be computed in some order."""
        joins = True
        while True:
            items = list(_rules.search(Search(graph, self._checked), self.only, joins))
            matches = [item for item in items if isinstance(item, Match)]
            several = any(match.others for match in matches)
            if not several or _ordered(graph, {v: m for m in matches for v in m.results}) is not None:
                return items
            joins = False

    def _prepared(self, node: Node, found: _report.Found) -> Callable[..., Any]:
        """The function that computes a node: its primitive, with its inner programs rewritten."""
        params = node.params
        if is_jit(node):
            params = params | {"jaxpr": self._closed(params["jaxpr"], found)}
        elif node.name in _LOOPS:
            params = {name: self._in_loop(name, value, found) for name, value in params.items()}
            if node.name == "scan":
                found.repeat(params["length"])
            elif node.name == "while":
                found.repeat(None)
        elif node.name in _REMATS:
            inner = self._closed(params["jaxpr"], found)
            policy = translated(params["policy"])
            function = jax.extend.core.jaxpr_as_fun(inner)
            return jax.checkpoint(function, prevent_cse=params["prevent_cse"], policy=policy)
        elif node.name in _OWN_RULES and isinstance(params.get("call_jaxpr"), ClosedJaxpr):
            # The rules stay the user's: rewritten code runs only without differentiation.
            params = params | {"call_jaxpr": self._closed(params["call_jaxpr"], found)}
        elif node.name == "shard_map":
            function, inside = self(params["jaxpr"], ())
            found.include(inside)
            if inside.replaced:
                return _sharded(function, params)
        return functools.partial(_bind, node.primitive, params)

    def _in_loop(self, name: str, value: Any, found: _report.Found) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self._closed(value, found)
        if name == "branches":
            return tuple(self._closed(branch, found) for branch in value)
        return value

    def _closed(self, program: ClosedJaxpr | Jaxpr, found: _report.Found) -> ClosedJaxpr:
        """An inner program rewritten; itself if nothing in it matches."""
        if program not in self._inner:
            jaxpr, consts = (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
            function, inside = self(jaxpr, consts)
            closed = program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
            if inside.replaced:
                closed = jax.make_jaxpr(function)(*(v.aval for v in jaxpr.invars))
                _assert_same_types(jaxpr, closed.jaxpr)
            while len(self._inner) >= _REMEMBERED:
                del self._inner[next(iter(self._inner))]
            self._inner[program] = (program, closed, inside)
        _, closed, inside = self._inner[program]
        found.include(inside)
        return closed


def _sharded(function: Callable[..., Any], params: dict[str, Any]) -> Callable[..., Any]:
    """The function under the shard_map that an equation has."""
    manual = params["manual_axes"] if "manual_axes" in params else params["newly_manual_axes"]  # JAX 0.10, later
    return jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(manual),
        check_vma=params["check_vma"],
    )


def _assert_same_types(before: Jaxpr, after: Jaxpr) -> None:
    for old, new in zip(before.outvars, after.outvars, strict=True):
        a, b = old.aval, new.aval
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type), (a, b)


def _ordered(graph: Graph, replaced: dict[Value, Match]) -> list[Node | Match] | None:
    """The nodes that must run, as near to the program's order as possible; nodes that only replaced parts needed are
    left out.

    None: parts need each other's results.
    """

    def reads(step: Node | Match) -> list[Node | Match]:
        values = step.operands if isinstance(step, Match) else step.inputs
        steps = dict.fromkeys(replaced.get(value, value.node) for value in values)
        return [made for made in steps if isinstance(made, Match) or made.index >= 0]

    def place(step: Node | Match) -> int:
        return min(value.node.index for value in step.results) if isinstance(step, Match) else step.index

    effects = [node for node in graph.live if node.has_effects]
    waits: dict[Node | Match, set[Node | Match]] = {}
    stack = [replaced.get(value, value.node) for value in graph.outputs] + effects
    stack = [step for step in stack if isinstance(step, Match) or step.index >= 0]
    while stack:
        step = stack.pop()
        if step not in waits:
            waits[step] = set(before := reads(step))
            stack += before
    for earlier, later in itertools.pairwise(effects):
        waits[later].add(earlier)
    followers: dict[Node | Match, list[Node | Match]] = {}
    for step, before in waits.items():
        for made in before:
            followers.setdefault(made, []).append(step)
    numbers = {step: i for i, step in enumerate(waits)}
    ready = [(place(step), numbers[step], step) for step, before in waits.items() if not before]
    heapq.heapify(ready)
    steps = []
    while ready:
        step = heapq.heappop(ready)[-1]
        steps.append(step)
        for follower in followers.get(step, ()):
            waits[follower].discard(step)
            if not waits[follower]:
                heapq.heappush(ready, (place(follower), numbers[follower], follower))
    return steps if len(steps) == len(waits) else None


def _run(graph: Graph, steps: Sequence[Node | Match], prepared: dict[Node, Callable], *inputs: Any) -> list[Any]:
    env = dict(zip(graph.inputs, inputs, strict=True))

    def read(value: Value) -> Any:
        return value.node.params["value"] if value.name == "constant" else env[value]

    for step in steps:
        node = step.out.node if isinstance(step, Match) else step
        with _as_written(node):
            if isinstance(step, Match):
                built = step.build(*map(read, step.operands))
                env.update(zip(step.results, built if step.others else (built,), strict=True))
            else:
                results = prepared[node](*map(read, node.inputs))
                env.update((Value(node, i), result) for i, result in enumerate(results))
    return [read(value) for value in graph.outputs]


@contextlib.contextmanager
def _as_written(node: Node):
    """The line, the names and the settings with which the equation was traced."""
    names = source_info_util.current_name_stack() + node.names
    with source_info_util.user_context(node.source.traceback, name_stack=names), node.context.manager:
        yield


def _bind(primitive: Any, params: dict[str, Any], *operands: Any) -> Sequence[Any]:
    out = primitive.bind(*operands, **primitive.get_bind_params(params))
    return out if primitive.multiple_results else [out]

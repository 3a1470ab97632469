"""Mutates the code that `fuse` matches, and compares the fused function with the original: value, vjp and jvp.

    python tests/fuse_mutations.py --cases 10000 --rule norms

A mutation changes one or two equations in a spelling's jaxpr: it swaps operands, takes another operand with the same
type, moves axes, changes a constant, takes another function of the same kind, inserts a stop_gradient, or uses an inner
value a second time. The original runs in NumPy's float64, which compiles nothing, and so does the rest of the fused
function; the matched part runs on jaxops' ops, compiled once for all mutations with the same match. So the question is
whether the match equals the written code, not how the kernels round.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from support import fuse_cases

from jaxops._fuse import _arithmetic as numerics
from jaxops._fuse import _rules
from jaxops._fuse._graph import Graph, Node, Value
from jaxops._fuse._match import Match
from jaxops._fuse._rewrite import Rewriter

#: Each family's spellings, by how their names begin.
RULES = {
    "norms": ("rms_", "layer_"),
    "softmaxes": ("softmax_", "log_softmax_"),
    "losses": ("loss_",),
    "attention": ("attention_",),
    "products": ("epilogue_",),
    "gated": ("gated_",),
    "residuals": ("residual_",),
    "linear losses": ("linear_loss_",),
}

#: Products alone are not searched for: every product is one.
_REWRITER = Rewriter(frozenset(_rules.OPS) - {"dot_general"})

#: Options that halve the compilation time; programs on a few numbers run as fast.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

_OTHER = {
    "add": ("sub", "max"),
    "sub": ("add",),
    "mul": ("div", "add"),
    "div": ("mul", "sub"),
    "max": ("min", "add"),
    "exp": ("exp2", "tanh"),
    "log": ("sqrt",),
    "rsqrt": ("sqrt", "tanh"),
    "sqrt": ("rsqrt",),
    "square": ("abs", "exp"),
    "neg": ("exp", "abs"),
    "tanh": ("logistic",),
    "ge": ("gt", "le"),
    "gt": ("ge",),
}


#: The primitives that spellings have around a match, and no match has inside.
_MORE = {
    "sin": lambda _, x: numerics.Dual(np.sin(x.value), np.cos(x.value) * x.tangent),
    "cos": lambda _, x: numerics.Dual(np.cos(x.value), -np.sin(x.value) * x.tangent),
    "rem": lambda _, x, y: numerics.Dual(np.fmod(x.value, y.value)),
}


def programs(rule: str) -> list[tuple[str, ClosedJaxpr]]:
    """A family's spellings, traced to graphs."""
    found = []
    for name, case in fuse_cases.SPELLINGS.items():
        if name.startswith(RULES[rule]):
            args = [jax.ShapeDtypeStruct(shape, np.float64) for shape in case.shapes]
            found.append((name, jax.make_jaxpr(case.function)(*args)))
    return found


def of_type(graph: Graph, like: Value, before: int) -> list[Value]:
    """Values with a given type that are computed before an equation."""
    values = [*graph.inputs, *(Value(node, i) for node in graph.nodes[:before] for i in range(len(node.avals)))]
    return [v for v in values if v != like and (v.shape, v.dtype) == (like.shape, like.dtype)]


def mutate(graph: Graph, rng: np.random.Generator) -> str:
    """Changes a graph in place; says how. Empty: it could not."""
    node = graph.live[rng.integers(len(graph.live))]
    kind = rng.choice(["swap", "replace", "constant", "function", "stop", "use", "axis"])
    name = node.name
    if kind == "swap" and len(node.inputs) == 2 and node.inputs[0].aval == node.inputs[1].aval:
        node.inputs = node.inputs[::-1]
    elif kind == "replace" and node.inputs:
        i = rng.integers(len(node.inputs))
        if not (others := of_type(graph, node.inputs[i], node.index)):
            return ""
        node.inputs[i] = others[rng.integers(len(others))]
    elif kind == "constant":
        places = [i for i, v in enumerate(node.inputs) if v.is_float and v.name == "constant" and not v.shape]
        if not places:
            return ""
        i = places[rng.integers(len(places))]
        old = np.asarray(node.inputs[i].node.params["value"])
        new = old * rng.choice([0.5, 0.99, 1.02, 2.0, -1.0]) + rng.choice([0.0, 0.0, 1e-3, 1.0])
        aval = node.inputs[i].aval
        node.inputs[i] = Value(Node("constant", None, [], {"value": new.astype(old.dtype)}, [aval]), 0)
    elif kind == "function" and name in _OTHER:
        node.name = str(rng.choice(_OTHER[name]))
    elif kind == "stop" and node.inputs:
        i = rng.integers(len(node.inputs))
        if not node.inputs[i].is_float or node.inputs[i].name == "constant":
            return ""
        _insert(graph, node, i, "stop_gradient")
    elif kind == "use" and node.avals[0].shape is not None and Value(node, 0).is_float:
        out = graph.outputs[0]
        added = Node("sum_all_and_add", None, [out, Value(node, 0)], {}, [out.aval], len(graph.nodes))
        added.source, added.names, added.context = node.source, node.names, node.context
        graph.nodes.append(added)
        graph.outputs[0] = Value(added, 0)
    elif kind == "axis" and "axes" in node.params and len(node.inputs[0].shape) > 1:
        operand = node.inputs[0].shape
        choices = [a for a in range(len(operand)) if (a,) != tuple(node.params["axes"])]
        shaped = [a for a in choices if tuple(d for i, d in enumerate(operand) if i != a) == node.avals[0].shape]
        if not shaped:
            return ""
        node.params = dict(node.params) | {"axes": (int(shaped[rng.integers(len(shaped))]),)}
    elif kind == "axis" and name == "dot_general":
        side, (contracted, batch) = rng.integers(2), node.params["dimension_numbers"]
        operands = [value.shape for value in node.inputs]
        found = []
        for axis in range(len(operands[side])):
            changed = [(axis,) if i == side else axes for i, axes in enumerate(contracted)]
            if len(contracted[side]) == 1 and axis not in (*contracted[side], *batch[side]):
                found.append((tuple(changed), batch))
        found = [numbers for numbers in found if _product_shape(*operands, numbers) == node.avals[0].shape]
        if not found:
            return ""
        node.params = dict(node.params) | {"dimension_numbers": found[rng.integers(len(found))]}
    elif kind == "axis" and name == "transpose":
        permutation = list(node.params["permutation"])
        i, j = rng.choice(len(permutation), 2, replace=False)
        if node.avals[0].shape[i] != node.avals[0].shape[j]:
            return ""
        permutation[i], permutation[j] = permutation[j], permutation[i]
        node.params = dict(node.params) | {"permutation": tuple(permutation)}
    else:
        return ""
    return f"{kind} at {name} {node.index}"


def _product_shape(lhs: tuple[int, ...], rhs: tuple[int, ...], numbers: Any) -> tuple[int, ...] | None:
    """The shape of a product; None: the contracted axes differ in size."""
    sizes = [[shape[a] for a in axes] for shape, axes in zip((lhs, rhs), numbers[0], strict=True)]
    if sizes[0] != sizes[1]:
        return None
    free = [
        [d for a, d in enumerate(shape) if a not in (*contracted, *batch)]
        for shape, contracted, batch in zip((lhs, rhs), *numbers, strict=True)
    ]
    return (*(lhs[a] for a in numbers[1][0]), *free[0], *free[1])


def _insert(graph: Graph, node: Node, i: int, name: str) -> None:
    given = node.inputs[i]
    made = Node(name, None, [given], {}, [given.aval], node.index)
    made.source, made.names, made.context = node.source, node.names, node.context
    graph.nodes.insert(graph.nodes.index(node), made)
    for index, other in enumerate(graph.nodes):
        other.index = index
    node.inputs[i] = Value(made, 0)


def run(graph: Graph, given: list[numerics.Dual], replaced: dict[Value, object]) -> numerics.Dual | None:
    """The value and the tangent of a graph's result; replaced: matches, which run by their references."""
    env: dict[Value, numerics.Dual] = dict(zip(graph.inputs, given, strict=True))

    def value_of(value: Value) -> numerics.Dual | None:
        if value in env:
            return env[value]
        if value.name == "constant":
            known = np.asarray(value.node.params["value"])
            wide = known.astype(np.float64) if value.is_float else known
            return numerics.Dual(wide)
        match = replaced.get(value)
        if match is not None:
            operands = [value_of(v) for v in match.operands]
            if None in operands:
                return None
            env.update(zip(match.results, by_op(match, operands), strict=True))
            return env[value]
        node = value.node
        operands = [value_of(v) for v in node.inputs]
        if any(x is None for x in operands):
            return None
        if node.name == "sum_all_and_add":
            found = operands[0] + numerics.Dual(
                *(np.sum(np.sin(x)) for x in (operands[1].value,)),
                np.sum(np.cos(operands[1].value) * operands[1].tangent),
            )
        elif node.name in _MORE:
            found = _MORE[node.name](node.params, *operands)
        elif node.name == "custom_jvp_call":
            program = node.params["call_jaxpr"]
            found = (numerics.evaluate_jaxpr(program.jaxpr, program.consts, operands) or [None])[0]
        else:
            found = numerics.evaluate(node.name, node.params, operands, value.shape)
        if found is None:
            return None
        env[value] = found
        return found

    return value_of(graph.outputs[0])


#: The compiled function of a match and its tangent, by everything that tells it from others.
_COMPILED: dict[tuple, Callable] = {}


def by_op(match: Match, operands: list[numerics.Dual]) -> list[numerics.Dual]:
    """A match's results and their tangents, by jaxops' op itself."""
    arrays = [jnp.asarray(x.value) for x in operands]
    moving = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def function(arrays, tangents):
        def of_floats(*floats):
            given = dict(zip(moving, floats, strict=True))
            built = match.build(*(given.get(i, x) for i, x in enumerate(arrays)))
            return built if match.others else (built,)

        return jax.jvp(of_floats, tuple(arrays[i] for i in moving), tangents)

    key = (match.op, str(described(match.build)), *((x.shape, str(x.dtype)) for x in arrays))
    if key not in _COMPILED:
        while len(_COMPILED) >= 256:
            del _COMPILED[next(iter(_COMPILED))]
        _COMPILED[key] = jax.jit(function, compiler_options=QUICK)
    made = _COMPILED[key](arrays, tuple(jnp.asarray(operands[i].tangent, arrays[i].dtype) for i in moving))
    return [numerics.Dual(*map(np.asarray, pair)) for pair in zip(*made, strict=True)]


def described(build: Any) -> Any:
    """The key of a match's function."""
    if isinstance(build, functools.partial):
        return build.func.__qualname__, [*map(described, build.args)], sorted(build.keywords.items(), key=str)
    return build.__qualname__


def close(a: np.ndarray, b: np.ndarray, tolerance: float) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max(initial=0) <= tolerance * max(1, np.abs(b).max(initial=0)))


def check(jaxpr: ClosedJaxpr, rng: np.random.Generator) -> tuple[str, str]:
    """One mutation's result: the outcome and, if the fused function differs, how it was made."""
    graph = Graph(jaxpr.jaxpr, jaxpr.consts)
    done = [mutate(graph, rng) for _ in range(rng.integers(1, 3))]
    done = [how for how in done if how]
    if not done:
        return "none", ""
    graph._find_users()
    given = [numerics.Dual(rng.standard_normal(v.shape), rng.standard_normal(v.shape)) for v in graph.inputs]
    with np.errstate(all="ignore"):
        try:
            wanted = run(graph, given, {})
        except (ValueError, IndexError, TypeError):
            return "none", ""
        if wanted is None or not all(np.abs(x).max(initial=0) < 1e6 for x in (wanted.value, wanted.tangent)):
            return "none", ""  # infinite, NaN, or divided by almost 0, which magnifies roundings
        found = [item for item in _REWRITER.search(graph) if isinstance(item, Match)]
        matches = {value: match for match in found for value in match.results}
        if not matches:
            return "refused", ""
        got = run(graph, given, matches)
    alike = close(got.value, wanted.value, 1e-5) and close(got.tangent, wanted.tangent, 1e-5)
    return ("matched", "") if alike else ("WRONG", "; ".join(done))


def main(arguments: list[str] | None = None) -> int:
    """Runs the mutations; returns how many are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10000, help="mutations of each family")
    parser.add_argument("--rule", choices=RULES, action="append", help="families; all by default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with jax.enable_x64(True):
        return sum(mutate_spellings(rule, options.cases, options.seed) for rule in options.rule or RULES)


def mutate_spellings(rule: str, cases: int, seed: int) -> int:
    """Prints the outcomes of a family's mutations; returns how many are wrong."""
    sources, counts, start = programs(rule), collections.Counter(), time.perf_counter()
    rng = np.random.default_rng([seed, list(RULES).index(rule)])
    while sum(counts.values()) < cases:
        name, jaxpr = sources[rng.integers(len(sources))]
        state = rng.bit_generator.state
        outcome, how = check(jaxpr, rng)
        if outcome == "none":
            continue
        counts[outcome] += 1
        if outcome == "WRONG":
            print(f"{rule}: {name}: {how} (generator {state['state']['state']})", flush=True)
    seconds = time.perf_counter() - start
    told = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
    print(f"{rule}: {sum(counts.values())} mutations of {len(sources)} spellings: {told}; {seconds:.0f} s", flush=True)
    return counts["WRONG"]


if __name__ == "__main__":
    sys.exit(bool(main()))

"""The cost of one small call inside jit: a jitted chain's wall time, by the number of dependent calls in it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich import table
from support.ops import COMPARISONS

from benchmarks import harness
from jaxops._kernel import HANDLERS, target_name

SHAPE = (32, 128)
LENGTH = 100

#: Instructions that launch nothing.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"}


def chain(step: Callable[[jax.Array], jax.Array], length: int) -> Callable[[jax.Array], jax.Array]:
    """`length` calls, each on the result before."""

    def run(x):
        for _ in range(length):
            x = step(x)
        return x

    return run


def _bare(x):
    """The softmax kernel's target called directly, over the last axis."""
    absent = {"has_scale": False, "has_bias": False, "has_where": False, "has_parts": False}
    return jax.ffi.ffi_call(target_name("softmax_fwd"), jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x, axes=np.array([x.ndim - 1]), query_axis=np.int64(-1), key_axis=np.int64(-1), **absent
    )


def _separate(step):
    """The step, with a barrier behind it that XLA does not fuse across."""
    return lambda x: jax.lax.optimization_barrier(step(x))


@dataclasses.dataclass(frozen=True)
class Contender:
    """A chain: its row's label, its step, and the chain's operand."""

    label: str
    step: Callable[[jax.Array], jax.Array]
    operand: jax.Array


def contenders() -> dict[str, Contender]:
    """The chains by name."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32)
    parameters = [jnp.asarray(p) for p in COMPARISONS["layer_norm"].operands(rng, SHAPE, np.dtype("float32"))[1:]]
    softmax, layer_norm = COMPARISONS["softmax"], COMPARISONS["layer_norm"]

    def normalise(function):
        return lambda x: function(x, *parameters)

    found = {
        "softmax": Contender("jaxops.softmax", softmax.ours, x),
        "bare": Contender("its FFI target, called directly", _bare, x),
        "xla_softmax": Contender("XLA's softmax, kept apart by barriers", _separate(softmax.reference), x),
        "xla_fused": Contender("XLA's softmax, free to fuse across calls", softmax.reference, x),
        "layer_norm": Contender("jaxops.layer_norm", normalise(layer_norm.ours), x),
        "xla_layer_norm": Contender(
            "XLA's layer_norm, kept apart by barriers", _separate(normalise(layer_norm.reference)), x
        ),
    }
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    if "softmax_fwd" not in HANDLERS.get(platform, ()):
        del found["bare"]
    return found


def kernels(hlo: str) -> int:
    """How many kernels and handlers a compiled program launches, from its text: instructions outside fusions.

    A loop's body counts once.
    """
    bodies: dict[str, list[str]] = {}
    entry = body = None
    for line in hlo.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            body = bodies.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif body is not None and " = " in line:
            body.append(line.split(" = ", 1)[1])

    @functools.cache
    def count(name):
        total = 0
        for instruction in bodies.get(name, ()):
            opcode = re.search(r"(?:^|[\s)}])([a-z][a-z0-9\-]*)\(", instruction)
            if opcode is None or opcode[1] in _FREE or opcode[1].endswith("-done"):
                continue
            called = re.search(r"\b(?:to_apply|body)=%?([\w.\-]+)", instruction)
            total += count(called[1]) if opcode[1] in ("call", "while") and called else 1
        return total

    return count(entry)


def run(settings: harness.Settings, length: int = LENGTH) -> bool:
    """Times the chains in turns and prints microseconds a call, and how many kernels the program launches a call."""
    found = dict(settings.select(contenders().items(), lambda item: f"calls {item[1].label}"))
    programs, launches = {}, {}
    for name, contender in found.items():
        program = jax.jit(chain(contender.step, length)).lower(contender.operand).compile()
        launches[name] = kernels(program.as_text())
        programs[name] = harness.Calls(program, [(contender.operand,)])
    clock = harness.LatencyClock()
    times = harness.alternate(clock, programs, settings.seconds * len(programs), 3 * settings.rounds)
    times = {name: seconds / length * 1e6 for name, seconds in times.items()}

    shape = "x".join(map(str, SHAPE))
    title = f"calls: wall time a call in a jitted chain of {length} dependent calls on f32 [{shape}]"
    shown = table.Table(title=title, title_justify="left")
    shown.add_column("chain")
    for heading in ("us a call", "kernels in the chain", "x XLA's softmax", "x the bare target"):
        shown.add_column(heading, justify="right")
    for name, taken in times.items():
        ratios = [f"{taken / times[base]:.2f}" if base in times else "" for base in ("xla_softmax", "bare")]
        shown.add_row(found[name].label, f"{taken:.3f}", str(launches[name]), *ratios)
    settings.console.print(shown)

    for op in ("softmax", "layer_norm"):
        if not {op, f"xla_{op}"} <= times.keys():
            continue
        row = harness.Row.of(
            op=op,
            direction="forward",
            shape=f"{shape} chain of {length}",
            dtype="float32",
            ours=times[op],
            xla=times[f"xla_{op}"],
            unit="us/call",
            ceiling=times.get("bare") if op == "softmax" else None,
            ratio=times[f"xla_{op}"] / times[op],
            timing=clock.name,
        )
        harness.record(settings.results / "calls.csv", row)
    return True

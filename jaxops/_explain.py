"""Which kernels a function runs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.interpreters import partial_eval

from jaxops._kernel import COMPOSITES, KERNELS, PLATFORMS, why_no_handler

_PREFIX = "jaxops_"


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One kernel call in a function.

    Attributes:
      kernel: the kernel's name, as in HLO's custom-call targets without prefix and version.
      scope: the `jax.named_scope` names and transformations around the call.
      operands: the operands' shapes and dtypes, such as `bf16[8,128]`.
      results: the results' shapes and dtypes.
      times: how often one call of the function runs the kernel; None if a `while` loop decides.
      runs_on: "jaxops", or "XLA" if the platform has no such kernel or jaxops chose XLA.
      detail: the kernel's parameters or choices, such as a matmul's tile or a row op's layout.
      bytes: the operands' and results' total size, which is the fewest bytes that one run moves.
      flops: multiplications and additions in one run of a matrix product; 0 for other kernels.
    """

    kernel: str
    scope: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    times: int | None
    runs_on: str
    detail: str
    bytes: int
    flops: int

    @property
    def times_or_once(self) -> int:
        """`times`, or 1 if a `while` loop decides."""
        return 1 if self.times is None else self.times


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The kernel calls in a function; prints as a table.

    Attributes:
      platform: "cpu", "cuda" or another that JAX lowers for.
      calls: the calls to jaxops' kernels, in the program's order.
      xla_products: how many products the program has besides, as JAX's own dot_general; they run on XLA.
    """

    platform: str
    calls: tuple[KernelCall, ...]
    xla_products: int

    @property
    def bytes(self) -> int:
        """All calls' bytes; calls in `while` loops count once."""
        return sum(call.bytes * call.times_or_once for call in self.calls)

    @property
    def flops(self) -> int:
        """All calls' operations; calls in `while` loops count once."""
        return sum(call.flops * call.times_or_once for call in self.calls)

    def __str__(self) -> str:
        rows = [("kernel", "times", "runs on", "operands -> results", "bytes", "flops", "call")]
        for call in self.calls:
            times = "loop" if call.times is None else str(call.times)
            arrays = f"{' '.join(call.operands)} -> {' '.join(call.results)}"
            work = quantity(call.bytes), quantity(call.flops) if call.flops else ""
            note = " ".join(part for part in (call.detail, f"@{call.scope}" if call.scope else "") if part)
            rows.append((call.kernel, times, call.runs_on, arrays, *work, note))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        products = f"{self.xla_products} dot_general of XLA's own besides" if self.xla_products else ""
        count = f"{len(self.calls)} call{'s' * (len(self.calls) != 1)}"
        total = f"{count} on {self.platform}: {quantity(self.bytes)}B, {quantity(self.flops)}FLOP"
        return "\n".join([*lines, ", ".join(part for part in (total, products) if part)])

    __repr__ = __str__


def quantity(number: Any) -> str:
    """Three digits and a decimal prefix; symbolic numbers are not changed."""
    if not isinstance(number, int):
        return f"{number} "
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {prefix}"
    return f"{number} "


def array_type(aval: Any) -> str:
    name = aval.dtype.name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")
    return f"{name}[{','.join(map(str, aval.shape))}]"


def _jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def _walk(jaxpr: Jaxpr, platform: str, times: int | None, scope: str) -> Iterator[tuple[JaxprEqn, int | None, str]]:
    """The equations without inner programs, how often they run, and the names around them.

    It leaves out equations whose results nothing uses.
    """
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        stack = str(equation.source_info.name_stack)
        here = "/".join(part for part in (scope, stack) if part)
        own = name.removeprefix(_PREFIX)
        composite, avals = COMPOSITES.get(own), [variable.aval for variable in equation.invars]
        if own in KERNELS and KERNELS[own].is_composed(platform, *avals, **equation.params):
            composite = KERNELS[own]
        if composite is not None:  # it was not transposed, so its composition runs
            inner = [jax.make_jaxpr(functools.partial(composite.composed, **equation.params))(*avals).jaxpr]
        else:
            inner = list(_jaxprs(equation))
        if (own in KERNELS and composite is None) or not inner:
            yield equation, times, here
            continue
        if name == "scan":
            times_inside = None if times is None else times * equation.params["length"]
        else:
            times_inside = None if name == "while" else times
        for program in inner:
            yield from _walk(program, platform, times_inside, here)


#: The note on a log_softmax if only gathers read its result.
_LOSS_HINT = "only gathered from: softmax_cross_entropy_with_integer_labels writes no array of this size"


def _gathered(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The log_softmax calls if only gathers read their result, in a program and the programs inside it."""
    users: dict[Any, set[str]] = {}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        name = str(equation.params.get("name", name)) if name in ("pjit", "jit") else name
        for variable in equation.invars:
            if not isinstance(variable, Literal):
                users.setdefault(variable, set()).add(name)
        for inner in _jaxprs(equation):
            yield from _gathered(inner)
    for variable in jaxpr.outvars:
        if not isinstance(variable, Literal):
            users.setdefault(variable, set()).add("the result")
    for equation in jaxpr.eqns:
        if equation.primitive.name == f"{_PREFIX}log_softmax_fwd":
            found = users.get(equation.outvars[0], set())
            if found and found <= {"gather", "take_along_axis"}:
                yield equation


def _is_array(value: Any) -> bool:
    """Whether a value is traced. Other values, such as an axis or a dtype, are options."""
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct | ShapedArray)


def explain(function: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Lists the jaxops kernels that a function runs, with shapes, bytes and operations.

    The function is traced, not run. Calls inside jit, scan, remat and other transformations count. To see the backward
    pass, explain the gradient: `jaxops.explain(jax.grad(loss), x)`. The report lists both branches of a `cond`. It
    leaves out calls whose results nothing uses, because XLA removes them.

    Args:
      function: a function of arrays, jitted or not.
      *args: its arguments. Arrays and `jax.ShapeDtypeStruct` are traced, in any structure; other values are options.
      platform: "cpu", "cuda", "rocm" or "tpu"; by default the default device's platform.
      **kwargs: its keyword arguments.

    Returns:
      An :class:`Explanation`, which prints as a table.

    Raises:
      TypeError: `function` is not callable. Errors from tracing pass through.
      ValueError: `platform` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, jaxops
      >>> a, b = jnp.ones((8, 4)), jnp.ones((4, 2))
      >>> found = jaxops.explain(jax.jit(jaxops.matmul), a, b, platform="cuda")
      >>> [(call.kernel, call.operands, call.results, call.flops) for call in found.calls]
      [('matmul', ('f32[8,4]', 'f32[4,2]'), ('f32[8,2]',), 128)]
    """
    if not callable(function):
        raise TypeError(f"explain: function must be callable, got {type(function).__name__}")
    if platform not in (None, *PLATFORMS):
        raise ValueError(f"explain: platform must be one of {', '.join(PLATFORMS)} or None, got {platform!r}")
    if platform is None:
        platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    leaves, structure = jax.tree.flatten((args, kwargs))
    traced = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def of_arrays(*arrays):
        given = dict(zip(traced, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(structure, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    # A new function, because an earlier trace may have used other settings.
    jaxpr = jax.make_jaxpr(of_arrays)(*(leaves[i] for i in traced)).jaxpr
    # With the equations that _walk leaves out: a gradient's program does not use the loss.
    calls, products, gathered = [], 0, {*map(id, _gathered(jaxpr))}
    for equation, times, scope in _walk(jaxpr, platform, 1, ""):
        name = equation.primitive.name
        products += name == "dot_general"
        name = name.removeprefix(_PREFIX)
        kernel = KERNELS.get(name)
        if kernel is None:
            continue
        avals, results = ([variable.aval for variable in side] for side in (equation.invars, equation.outvars))
        available = why_no_handler(kernel.handler, platform) is None and all(math.prod(aval.shape) for aval in avals)
        available = available and kernel.is_chosen(*avals, **equation.params)
        detail = kernel.explain(*avals, **equation.params)
        calls.append(
            KernelCall(
                kernel=name,
                scope=scope,
                operands=tuple(map(array_type, avals)),
                results=tuple(map(array_type, results)),
                times=times,
                runs_on="jaxops" if available else "XLA",
                detail=f"{detail}; {_LOSS_HINT}" if id(equation) in gathered else detail,
                bytes=sum(aval.dtype.itemsize * math.prod(aval.shape) for aval in (*avals, *results)),
                flops=kernel.flops(*avals, **equation.params),
            )
        )
    return Explanation(platform, tuple(calls), products)

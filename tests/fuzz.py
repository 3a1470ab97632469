"""Random calls of every op against float64: `make fuzz` runs 10,000 per op, tests/ops/test_fuzz.py a few;
`make fuzz ARGS='--jobs 16'` on a large machine.

A case is data: its repr, pasted into tests/ops/test_fuzz.py, is the test for a past failure. Compiling costs most, so
several calls are compiled into one program, and each runs with several kinds of numbers.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).parents[1]))

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from support import attention_cases, gpus, loss_cases, oracle
from support.ops import CASES, FUZZED

import jaxops

#: Ops whose calls are separate programs: how a random call is drawn and checked.
SEPARATE = {
    "attention": (attention_cases.random_case, attention_cases.check),
    "cross_entropy": (functools.partial(loss_cases.random_case, linear=False), loss_cases.check),
    "linear_cross_entropy": (functools.partial(loss_cases.random_case, linear=True), loss_cases.check),
}
OPS = tuple(dict.fromkeys((*FUZZED, *SEPARATE)))

FLOATS = ("float32", "bfloat16", "float16")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")

#: The largest error in a value or derivative, in units of `oracle.error`. Accuracy tests have narrower bounds.
LIMITS = {"value": 4.0, "vjp": 8.0, "jvp": 8.0}

#: Calls in one program, and sets of numbers for each call; a call with its numbers is a case.
CALLS, DRAWS = 12, 10


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an op, with several kinds of numbers.

    Attributes:
      op: its name.
      operands: each one's (name, shape, dtype), in the derivatives' order; "where" is boolean.
      options: (name, value) for each static argument.
      values: how the operands' numbers are distributed, see `draw`: one each time that it runs.
      derivative: "value", "vjp" or "jvp"; the latter two come with the value.
      mapped: (name, axis) for each operand that vmap maps.
      layout: how the first operand lies in memory, see `_LAYOUTS`.
      eager: outside jit.
      seed: the numbers' seed.
    """

    op: str
    operands: tuple[tuple[str, tuple[int, ...], str], ...]
    options: tuple[tuple[str, Any], ...] = ()
    values: tuple[str, ...] = ("normal",)
    derivative: str = "value"
    mapped: tuple[tuple[str, int], ...] = ()
    layout: str = "as it is"
    eager: bool = False
    seed: int = 0

    @property
    def family(self) -> str:
        """The op's."""
        return CASES[self.op].family

    @property
    def names(self) -> list[str]:
        """Of the operands that have derivatives."""
        return [name for name, _, dtype in self.operands if jnp.issubdtype(dtype, jnp.floating)]


# --- operands ---

_SPECIAL = {"-inf": -np.inf, "inf": np.inf, "nan": np.nan}


def draw(values: str, rng: np.random.Generator, shape, dtype, largest: float) -> np.ndarray:
    """One kind of numbers; largest: the largest "huge" one."""
    x = rng.standard_normal(shape)
    tiny = float(jnp.finfo(dtype).tiny)
    with np.errstate(all="ignore"):
        if values == "wide":
            x = x * 10.0 ** rng.uniform(-4, 4, shape)
        elif values == "logits":
            x = x * 30
        elif values == "offset":
            x = 1e4 + x
        elif values == "tiny":
            x = x * max(1e-15, tiny * 1e3)
        elif values == "denormal":
            x = x * tiny * 0.1
        elif values == "huge":
            x = np.clip(x, -1, 1) * min(largest, 0.5 * float(jnp.finfo(dtype).max))
        elif values == "far":  # a mean whose square overflows f32
            x = 3e19 + 1e17 * x if float(jnp.finfo(dtype).max) > 1e20 else 1e3 + x
        elif values in ("equal", "forty"):
            x = np.full(shape, 3.3 if values == "equal" else 40.0)
        elif values == "one hot":
            x = np.where(rng.random(shape) < 0.1, 100.0, x)
        elif values == "zero":
            x = np.zeros(shape)
        elif values in _SPECIAL:
            x = np.where(rng.random(shape) < 0.15, _SPECIAL[values], x)
        return x.astype(dtype)


#: By name: how x is stored, and how it is made from the stored array.
_LAYOUTS = {
    "as it is": (lambda x: x, lambda x: x),
    "Fortran": (lambda x: np.array(x, order="F"), lambda x: x),
    "transposed": (lambda x: np.ascontiguousarray(x.T), jnp.transpose),
    "behind": (lambda x: np.concatenate([x[..., :1], x], -1), lambda x: x[..., 1:]),
    "every second": (lambda x: np.repeat(x, 2, -1), lambda x: x[..., ::2]),
    "backwards": (lambda x: np.flip(x).copy(), jnp.flip),
    "below": (lambda x: np.concatenate([x[:1], x]), lambda x: x[len(x) > 0 :]),  # adjacent, at any address
}


def _numbers(case: Case, values, rng, name, shape, dtype):
    if dtype == "bool":
        return rng.random(shape) < 0.7
    if jnp.issubdtype(dtype, jnp.integer):
        return rng.integers(-5, 5, shape).astype(dtype)
    if case.family == "norm" and name in ("scale", "bias"):
        return draw("normal", rng, shape, dtype, 1.0)
    if name.endswith("scale") or name == "bias":
        x = 2 * rng.standard_normal(shape)
        x = 0.01 * x if values == "forty" else x
        if values == "hidden" and case.family == "logits" and name == "bias" and _varies(case):
            x = np.where(rng.random(shape) < 0.15, -np.inf, x)
        return x.astype(dtype)
    # Squares and products must not overflow.
    largest = 1e30 if case.family == "logits" else 1e100 if dtype == "float64" else 1e15
    x = draw(values, rng, shape, dtype, largest)
    if values == "wide" and dtype == "float16" and case.family == "product":
        x = np.clip(x, -8, 8)  # at an infinite sum an activation has no derivative, jax.nn's neither
    return x


def _varies(case: Case) -> bool:
    """Whether the bias varies within a row: if not, its gradient is 0, whatever the row holds."""
    shapes = {name: shape for name, shape, _ in case.operands}
    rank = max(map(len, shapes.values()))
    sizes = (1,) * (rank - len(shapes["bias"])) + shapes["bias"]
    return any(sizes[a] > 1 for a in _axes(dict(case.options)["axis"], rank))


def _arrays(case: Case, values: str, rng) -> dict[str, np.ndarray]:
    """The operands; mapped operands get another axis, with size 2."""
    mapped = dict(case.mapped)
    found = {}
    for name, shape, dtype in case.operands:
        if name in mapped:
            shape = (*shape[: mapped[name]], 2, *shape[mapped[name] :])
        found[name] = _numbers(case, values, rng, name, shape, np.dtype(dtype).name)
    if case.op == "layer_norm" and "where" in found:  # a row without a position that counts is NaN
        _let_rows_count(case, found, mapped)
    return found


def _let_rows_count(case, found, mapped):
    options = dict(case.options)
    rank = len(next(shape for name, shape, _ in case.operands if name == "x"))
    axes = _axes(options["axis"], rank)
    mask = found["where"]
    mask = np.moveaxis(mask, mapped["where"], 0) if "where" in mapped else mask[None]
    own = tuple(a - rank + mask.ndim for a in axes if a - rank + mask.ndim >= 1)
    mask = mask | ~mask.any(own, keepdims=True)
    found["where"] = np.moveaxis(mask, 0, mapped["where"]) if "where" in mapped else mask[0]


def _axes(axis, rank) -> tuple[int, ...]:
    given = range(rank) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(sorted(a % rank for a in given))


# --- the call and its expected results ---


def _call(case: Case, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    positional = [x for name, x in arrays.items() if name in ("x", "a", "b")]
    rest = {name: x for name, x in arrays.items() if name not in ("x", "a", "b")}
    out = getattr(jaxops, case.op)(*positional, **rest, **dict(case.options))
    return out if isinstance(out, tuple) else (out,)


def _exact(case: Case, arrays: dict[str, np.ndarray]):
    """The oracle for a call without mapped axes."""
    options = dict(case.options)
    dtype = options.pop("dtype", None)
    if case.family == "rows":
        return oracle.Sampled(_reference(case.op, case.options), arrays)
    if case.family == "product":
        dtype = options.pop("preferred_element_type", None) or jnp.result_type(*(arrays[n].dtype for n in "ab"))
        multiply = _multiply(arrays, options.pop("precision", None))
        if case.op == "matmul":
            return oracle.Matmul(**arrays, **options, multiply=multiply, dtype=dtype)
        return oracle.DotGeneral(arrays["a"], arrays["b"], options["dimension_numbers"], multiply=multiply, dtype=dtype)
    if case.family == "logits":
        x = arrays["x"] if arrays["x"].dtype.kind not in "iu" else arrays["x"].astype(np.float32)
        shape = np.broadcast_shapes(*(np.shape(v) for name, v in arrays.items() if name != "scale"))
        options["axes"] = _axes(options.pop("axis"), len(shape))
        return oracle.Logits(case.op, **arrays | {"x": x}, **options, dtype=dtype or x.dtype)
    floats = [v.dtype for name, v in arrays.items() if name != "where"]
    options["axes"] = _axes(options.pop("axis"), arrays["x"].ndim)
    return oracle.Norm(case.op, **arrays, **options, dtype=dtype or functools.reduce(jnp.promote_types, floats))


@functools.cache
def _reference(op: str, options: tuple[tuple[str, Any], ...]):
    case = CASES[op]
    return functools.partial(case.oracle or case.reference, **dict(options))


def _multiply(arrays, precision) -> float:
    """The relative rounding of a product's factors on this machine; XLA and the kernels do the same."""
    dtypes = {x.dtype.name for name, x in arrays.items() if name in "ab"}
    if jax.default_backend() != "gpu":
        return 0.0
    if dtypes <= set(EIGHT_BITS):
        return 2.0**-12  # the tensor cores keep 14 bits of a sum
    common = np.dtype(functools.reduce(jnp.promote_types, dtypes))
    if common.itemsize == 2:
        return oracle.eps(common)  # XLA's small products are sums of rounded products
    return 2.0**-10 if common == np.float32 and precision != "highest" else 0.0


def _directions(case: Case, rng) -> dict[str, np.ndarray]:
    """The operands' tangents."""
    return {
        name: rng.standard_normal(shape).astype(dtype) for name, shape, dtype in case.operands if name in case.names
    }


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A case with numbers: the computation, its arrays, and the expected results."""

    case: Case
    stored: dict[str, np.ndarray]
    directions: Any
    wanted: list[oracle.Wanted]
    dtypes: list[np.dtype]

    def compute(self, stored, directions, call=None):
        """The op's results, or the results of `call`, which stands for it."""
        call = call or _call
        case, mapped = self.case, dict(self.case.mapped)
        first = case.operands[0][0]
        arrays = stored | {first: _LAYOUTS[case.layout][1](stored[first])}

        def one(arrays):
            fixed = {name: x for name, x in arrays.items() if name not in case.names}
            xs = [arrays[name] for name in case.names]
            f = lambda *xs: call(case, dict(zip(case.names, xs, strict=True)) | fixed)  # noqa: E731
            if case.derivative == "value":
                return list(f(*xs))
            if case.derivative == "jvp":
                value, moved = jax.jvp(f, tuple(xs), tuple(directions[name] for name in case.names))
                return [*value, *moved]
            value, pullback = jax.vjp(f, *xs)
            return [*value, *pullback(tuple(directions))]

        return jax.vmap(one, ({name: mapped.get(name) for name in arrays},))(arrays) if mapped else one(arrays)

    def check(self, got) -> str | None:
        """The first wrong result; None: nothing."""
        count = 2 if any(name == "residual" for name, *_ in self.case.operands) else 1
        if len(got) != len(self.wanted):
            return f"{len(got)} results instead of {len(self.wanted)}"
        for i, (mine, wanted, dtype) in enumerate(zip(got, self.wanted, self.dtypes, strict=True)):
            what = f"value {i}" if i < count else f"{self.case.derivative} {i - count}"
            if mine.dtype != dtype:
                return f"{what} has dtype {mine.dtype} instead of {dtype}"
            if mine.shape != wanted.value.shape:
                return f"{what} has shape {mine.shape} instead of {wanted.value.shape}"
            limit = LIMITS["value" if i < count else self.case.derivative]
            if not (off := oracle.error(mine, wanted)) <= limit:
                return f"{what} is {off:.3g} units off, allowed {limit}"
        return None


def _prepare(case: Case, values: str) -> _Prepared:
    rng = np.random.default_rng(case.seed)
    arrays, mapped = _arrays(case, values, rng), dict(case.mapped)
    count = 2 if mapped else 1
    slices = [
        {name: np.take(x, j, mapped[name]) if name in mapped else x for name, x in arrays.items()} for j in range(count)
    ]
    exact = [_exact(case, slice_) for slice_ in slices]
    values = exact[0].value()
    dtypes = [exact[0].dtype if hasattr(exact[0], "dtype") else exact[0].product.dtype]
    if len(values) == 2:
        dtypes.append(exact[0].total)
    directions: Any = ()
    if case.derivative == "jvp":
        directions = _directions(case, rng)
    elif case.derivative == "vjp":
        directions = [rng.standard_normal(v.value.shape).astype(dtype) for v, dtype in zip(values, dtypes, strict=True)]
    wanted = []
    for one in exact:
        results = list(one.value())
        if case.derivative == "vjp":
            found = one.vjp(*directions)
            results += [found[name] for name in case.names]
        elif case.derivative == "jvp":
            results += one.jvp(directions)
        wanted.append(results)
    if case.derivative == "vjp":
        dtypes += [np.dtype(dtype) for name, _, dtype in case.operands if name in case.names]
    elif case.derivative == "jvp":
        dtypes += dtypes
    if mapped:
        stacked = [oracle.Wanted(*map(np.stack, zip(*parts, strict=True))) for parts in zip(*wanted, strict=True)]
    else:
        stacked = wanted[0]
    first = case.operands[0][0]
    stored = arrays | {first: _LAYOUTS[case.layout][0](arrays[first])}
    # A boolean is its lowest bit. XLA agrees, except where it converts a mask to numbers, transposes it alone (to map
    # it), or, on GPUs, selects in a reduction: there, every byte counts that is not 0. Tangents in plain JAX do this.
    counted = case.derivative == "jvp" or "where" in mapped
    if "where" in stored and case.seed % 2 and not counted:
        others = rng.integers(0, 128, stored["where"].shape, np.uint8) << 1
        stored["where"] = np.asarray(others | stored["where"]).view(bool)
    return _Prepared(case, stored, directions, stacked, dtypes)


def failures(cases: list[Case]) -> list[str]:
    """Runs the cases and says which fail. Cases that are not eager share one program."""
    x64 = any(dtype == "float64" for case in cases for _, _, dtype in case.operands)
    x64 = x64 or any(value == "float64" for case in cases for _, value in case.options)
    found = []
    with jax.enable_x64(x64), np.errstate(all="ignore"):
        rounds = [
            [_prepare(case, values) for case, values in zip(cases, several, strict=True)]
            for several in zip(*(case.values for case in cases), strict=True)
        ]
        compiled = [p for p in rounds[0] if not p.case.eager]
        program = jax.jit(lambda inputs: [p.compute(*xs) for p, xs in zip(compiled, inputs, strict=True)])
        for i, prepared in enumerate(rounds):
            results = iter(program([(p.stored, p.directions) for p in prepared if not p.case.eager]))
            for p in prepared:
                got = p.compute(*jax.tree.map(jnp.asarray, (p.stored, p.directions))) if p.case.eager else next(results)
                if (what := p.check(got)) is not None:
                    found.append(f"{p.case!r}\n  {what} with {p.case.values[i]!r}")
    return found


def check(cases: list[Case]) -> None:
    assert not (wrong := failures(cases)), "\n".join(wrong)


# --- strategies ---

_SIZES = st.one_of(
    st.integers(1, 9), st.sampled_from((0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130))
)
_LONG = st.sampled_from((1, 3, 8, 127, 128, 129, 255, 256, 257, 511, 1000, 1023, 1024, 1025, 2047, 4096, 4097))
_AXES_OF_ONE = st.lists(st.booleans(), min_size=4, max_size=4)
_MAX_SIZE = 12000


@st.composite
def _shape(draw, min_rank=0):
    """A shape with some elements; the last axis, or another, may be long."""
    shape = [draw(_SIZES) for _ in range(draw(st.integers(min_rank, 4)))]
    if shape and draw(st.integers(0, 3)) == 0:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(_LONG)
    while math.prod(shape) > _MAX_SIZE:
        largest = shape.index(max(shape, key=lambda d: d if d < 1000 else 0))
        shape[largest] = (shape[largest] + 1) // 4 if shape.count(shape[largest]) < len(shape) else 2
    return tuple(shape)


@st.composite
def _broadcast(draw, shape):
    """A shape that broadcasts to `shape`."""
    ones = draw(_AXES_OF_ONE)
    found = tuple(1 if one else d for d, one in zip(shape, ones, strict=False))
    return found[draw(st.integers(0, len(found))) :] if draw(st.booleans()) else found


@st.composite
def _common(draw, operands, values, derivatives=True):
    """The fields that cases of all ops share."""
    mapped = []
    if draw(st.integers(0, 2)) == 0:
        for name, shape, _ in operands:
            if draw(st.booleans()) or (name == operands[-1][0] and not mapped):
                mapped.append((name, draw(st.integers(0, len(shape)))))
    layouts = [name for name in _LAYOUTS if operands[0][1] or mapped or name in ("as it is", "Fortran")]
    if mapped and mapped[0][0] != operands[0][0] and not operands[0][1]:
        layouts = ["as it is"]
    return {
        "operands": tuple(operands),
        "values": tuple(draw(st.lists(st.sampled_from(values), min_size=DRAWS, max_size=DRAWS))),
        "derivative": draw(st.sampled_from(("value", "vjp", "jvp", "vjp") if derivatives else ("value",))),
        "mapped": tuple(mapped),
        "layout": draw(st.sampled_from(layouts)) if draw(st.booleans()) else "as it is",
        "eager": draw(st.integers(0, 24)) == 0,
        "seed": draw(st.integers(0, 2**16)),
    }


_LOGITS_VALUES = ("normal", "logits", "offset", "tiny", "denormal", "equal", "one hot", "zero", "wide")


def _axis(draw, rank):
    """An axis, some, or all; a scalar has only none or all."""
    if not rank:
        return draw(st.sampled_from((None, ())))
    kind = draw(st.integers(0, 5))
    if kind < 3:
        return -1
    if kind == 3:
        return draw(st.integers(-rank, rank - 1))
    if kind == 4:
        return tuple(draw(st.permutations(range(rank)))[: draw(st.integers(0, rank))])
    return None


@st.composite
def _logits_case(draw, op, floats):
    joint = draw(_shape())
    operands = [("x", joint, draw(st.sampled_from((*floats, *floats, "int8", "int32"))))]
    if draw(st.integers(0, 3)) == 0:  # a scalar has no axis, even if others enlarge it
        operands[0] = ("x", draw(_broadcast(joint)) or joint, operands[0][2])
    if draw(st.integers(0, 3)) == 0:
        operands.append(("scale", (), draw(st.sampled_from(floats))))
    if draw(st.integers(0, 3)) == 0:
        operands.append(("bias", draw(_broadcast(joint)), draw(st.sampled_from(floats))))
    if draw(st.integers(0, 3)) == 0:
        operands.append(("where", draw(_broadcast(joint)), "bool"))
    given = {name for name, *_ in operands}
    more = ("hidden",) if "bias" in given else ("huge",) if "scale" in given else ("huge", "-inf", "inf", "nan")
    common = draw(_common(operands, (*_LOGITS_VALUES, *more)))
    rank = len(np.broadcast_shapes(*(shape for _, shape, _ in operands)))
    options = [("axis", _axis(draw, rank))]
    if rank >= 2 and draw(st.integers(0, 3)) == 0:
        options.append(("causal", True))
    if draw(st.integers(0, 3)) == 0:
        options.append(("dtype", draw(st.sampled_from(floats))))
    return Case(op, options=tuple(options), **common)


_NORM_VALUES = ("normal", "offset", "tiny", "denormal", "huge", "equal", "one hot", "zero", "wide", "inf", "nan")


@st.composite
def _norm_case(draw, op, floats):
    shape = draw(_shape(min_rank=1))
    axis = _axis(draw, len(shape))
    axes = _axes(axis, len(shape))
    dtype = draw(st.sampled_from(floats))
    operands = [("x", shape, dtype)]
    for name in ("scale", "bias") if op == "layer_norm" else ("scale",):
        if draw(st.integers(0, 2)):
            operands.append((name, tuple(shape[a] for a in axes), draw(st.sampled_from(floats))))
    if op == "layer_norm" and draw(st.integers(0, 3)) == 0:
        operands.append(("where", draw(_broadcast(shape)), "bool"))
    if draw(st.integers(0, 3)) == 0:
        operands.append(("residual", shape, draw(st.sampled_from((dtype, dtype, *floats)))))
    options = [("axis", axis), ("epsilon", draw(st.sampled_from((1e-6, 1e-5, 0.5, 1e-12))))]
    if draw(st.integers(0, 3)) == 0:
        options.append(("dtype", draw(st.sampled_from(floats))))
    values = (*_NORM_VALUES, "far") if op == "layer_norm" else _NORM_VALUES
    return Case(op, options=tuple(options), **draw(_common(operands, values)))


_MATMUL_VALUES = ("normal", "normal", "wide", "equal", "zero", "nan", "tiny")
_DIMENSIONS = st.one_of(st.integers(1, 9), st.sampled_from((0, 1, 16, 17, 31, 32, 33, 40)))


def _product_options(draw, floats, dtypes):
    """precision and preferred_element_type for which there is a kernel."""
    options = []
    eight = dtypes[0] in EIGHT_BITS
    if draw(st.booleans()):
        options.append(("precision", draw(st.sampled_from(("highest", "default")))))
    if eight:
        options.append(("preferred_element_type", draw(st.sampled_from(("float32", "bfloat16")))))
    elif set(dtypes) == {"bfloat16", "float16"} or draw(st.integers(0, 3)) == 0:
        common = np.dtype(jnp.promote_types(*dtypes))
        options.append(("preferred_element_type", "float64" if common == np.float64 else "float32"))
    return options


def _product_dtypes(draw, floats):
    if draw(st.integers(0, 7)) == 0:
        return [draw(st.sampled_from(EIGHT_BITS)) for _ in range(2)]
    first = draw(st.sampled_from(floats))
    return [first, draw(st.sampled_from((first, first, *floats)))]


@st.composite
def _matmul_case(draw, op, floats):
    del op
    dtypes = _product_dtypes(draw, floats)
    m, k, n = (draw(_DIMENSIONS) for _ in range(3))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    a = (k,) if draw(st.integers(0, 7)) == 0 else (*draw(_broadcast(batch)), m, k)
    b = (k,) if draw(st.integers(0, 7)) == 0 else (*draw(_broadcast(batch)), k, n)
    operands = [("a", a, dtypes[0]), ("b", b, dtypes[1])]
    options = _product_options(draw, floats, dtypes)
    if draw(st.booleans()):
        out = np.broadcast_shapes(a[:-2], b[:-2]) + a[-2:-1] + (b[-1:] if len(b) > 1 else ())
        operands.append(("bias", draw(_broadcast(out)), draw(st.sampled_from(floats))))
    for name in ("lhs_scale", "rhs_scale"):
        if draw(st.integers(0, 5)) == 0:
            operands.append((name, (), "float64" if "float64" in floats else "float32"))
    if draw(st.booleans()):
        options.append(("activation", draw(st.sampled_from(("relu", "gelu", "gelu_exact", "silu")))))
    common = draw(_common(operands, _MATMUL_VALUES, derivatives=dtypes[0] not in EIGHT_BITS))
    return Case("matmul", options=tuple(options), **common)


@st.composite
def _dot_general_case(draw, op, floats):
    del op
    dtypes = _product_dtypes(draw, floats)
    batch, free, other, contracted = (
        draw(st.lists(st.integers(0, 5) if i else st.integers(1, 3), max_size=2)) for i in range(4)
    )
    lhs, rhs = [*batch, *free, *contracted], [*batch, *other, *contracted]
    orders = [draw(st.permutations(range(len(x)))) for x in (lhs, rhs)]
    places = [[order.index(i) for i in range(len(order))] for order in orders]
    nb = len(batch)
    numbers = (
        tuple(tuple(p[len(p) - len(contracted) :]) for p in places),
        tuple(tuple(p[:nb]) for p in places),
    )
    operands = [
        (name, tuple(x[i] for i in order), dtype)
        for name, x, order, dtype in zip("ab", (lhs, rhs), orders, dtypes, strict=True)
    ]
    options = [("dimension_numbers", numbers), *_product_options(draw, floats, dtypes)]
    common = draw(_common(operands, _MATMUL_VALUES, derivatives=dtypes[0] not in EIGHT_BITS))
    return Case("dot_general", options=tuple(options), **common)


ROW_VALUES = ("normal", "offset", "tiny", "equal", "one hot", "zero", "wide", "nan")


@st.composite
def _row_case(draw, op, floats):
    """For any function of rows: x, and its axis if it has one."""
    shape = draw(_shape(min_rank=1))
    options = (("axis", _axis(draw, len(shape))),) if CASES[op].axis else ()
    return Case(op, options=options, **draw(_common([("x", shape, draw(st.sampled_from(floats)))], ROW_VALUES)))


def _strategy(op: str):
    if op == "dot_general":
        return _dot_general_case
    return {"rows": _row_case, "logits": _logits_case, "norm": _norm_case, "product": _matmul_case}[CASES[op].family]


def batches(op: str, size: int = CALLS):
    """Lists of cases that share a program; some use float64, which is a mode for the whole program."""

    def of(floats):
        return st.lists(_strategy(op)(op, floats), min_size=size, max_size=size)

    return st.one_of(of(FLOATS), of(FLOATS), of((*FLOATS, "float64")))


def _run_separate(op: str, count: int, seed: int, told) -> list[str]:
    """Does the same for ops whose calls are separate programs."""
    draw, check = SEPARATE[op]
    for done in range(0, count, DRAWS):
        name = (seed, done)
        rng, dtype = np.random.default_rng(name), FLOATS[done // DRAWS % len(FLOATS)]
        case = draw(rng, dtype)
        try:
            with jax.default_matmul_precision("highest"):
                check(case, rng, min(DRAWS, count - done))
        except AssertionError as error:
            shapes = {name: (x.shape, x.dtype.name) for name, x in case.arrays.items()}
            fields = (field.name for field in dataclasses.fields(case) if field.name != "arrays")
            rest = {name: getattr(case, name) for name in fields}
            return [f"{op}, numpy.random.default_rng({name}), {dtype}: {shapes}, {rest}", str(error)]
        told(done + DRAWS)
    return []


def run(op: str, count: int, seed: int, told=lambda done: None) -> list[str]:
    """Runs about `count` cases of an op, and calls `told` with the number done; the shrunk failures, if any."""
    if op in SEPARATE:
        return _run_separate(op, count, seed, told)
    done, begun = 0, False

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=1 + math.ceil(count / (CALLS * DRAWS)),
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],  # a failure names its case; shrinking whole programs takes long
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(batches(op))
    def every(cases):
        nonlocal done, begun
        if not begun:  # hypothesis begins with the simplest calls of all
            begun = True
            return
        wrong = failures(cases)
        done += sum(len(case.values) for case in cases)
        told(done)
        assert not wrong, "\n".join(wrong)

    try:
        every()
    except AssertionError as error:
        return str(error).splitlines()
    return []


def _begin(started: Any) -> None:
    """In a process of a pool: takes another GPU than the process before."""
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    os.environ.update(gpus.of_worker({**os.environ, "PYTEST_XDIST_WORKER": f"gw{number}"}))


def _run_part(op: str, count: int, seed: int) -> tuple[int, list[str]]:
    """As `run`; also how many cases ran."""
    done = [0]
    wrong = run(op, count, seed, done.append)
    return done[-1], wrong


def main(arguments: list[str]) -> int:
    """Prints the failures and the counts; returns how many ops failed."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help=f"ops to fuzz: {', '.join(OPS)}; default: all")
    parser.add_argument("--cases", type=int, default=10_000, help="of each op (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="default: another in each run")
    parser.add_argument("--jobs", type=int, default=1, help="processes, spread over the GPUs (default: %(default)s)")
    options = parser.parse_args(arguments)
    if unknown := set(options.ops) - set(OPS):
        parser.error(f"ops must be of {', '.join(OPS)}, got {', '.join(unknown)}")
    ops, size = options.ops or OPS, CALLS * DRAWS
    counts = range(0, options.cases, size)
    parts = [(op, min(size, options.cases - at), options.seed + at) for op in ops for at in counts]
    if options.jobs > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPUs' memory
    start, failed = time.perf_counter(), 0
    columns = TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with contextlib.ExitStack() as stack:
        results = map(_run_part, *zip(*parts, strict=True))
        if options.jobs > 1:
            context = multiprocessing.get_context("spawn")
            started = (context.Value("i", 0),)
            pool = stack.enter_context(concurrent.futures.ProcessPoolExecutor(options.jobs, context, _begin, started))
            results = pool.map(_run_part, *zip(*parts, strict=True))
        print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, seed {options.seed}", flush=True)
        progress = stack.enter_context(Progress(*columns, transient=True))
        for op in ops:
            task, done, wrong = progress.add_task(op, total=options.cases), 0, []
            for count, found in itertools.islice(results, len(parts) // len(ops)):
                done, wrong = done + count, wrong + found
                progress.update(task, completed=min(done, options.cases))
            progress.remove_task(task)
            verdict = "FAILED" if wrong else "all within bounds"
            progress.console.print(f"{op:20} {done:6} cases by {time.perf_counter() - start:.0f} s: {verdict}")
            progress.console.print("\n".join(wrong), end="\n" if wrong else "", markup=False, soft_wrap=True)
            failed += bool(wrong)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

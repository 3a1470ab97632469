"""The errors for every op, option and dtype over ordinary and adversarial inputs, their bounds, and jax.nn's errors.

`make accuracy` measures on the device at hand, writes the figures into benchmarks/results/accuracy.csv, replacing the
device's older ones, and docs/accuracy.md from all figures; tests/ops/test_accuracy.py enforces the bounds.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
from fuzz import Case
from support import oracle
from support.ops import CASES

#: The ops whose errors are bounded here. Attention and losses have bounds case by case, in
#: support/attention_cases.py and support/loss_cases.py.
OPS = tuple(op for op in fuzz.OPS if op not in fuzz.SEPARATE)

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "accuracy.csv", ROOT / "docs" / "accuracy.md"
DTYPES = ("float32", "bfloat16", "float16", "float64")


class Bound(NamedTuple):
    """Bounds for the four numbers in a cell in docs/accuracy.md."""

    ulp: float
    units: float
    norm: float
    gradient_units: float


#: The bounds for every op, whatever its options.
BOUNDS = {
    "rows, 16 bits": Bound(0.6, 1.0, 2.0, 2.0),
    "rows, 32 or 64 bits": Bound(1.5, 1.5, 16.0, 6.0),
    # Logits up to 5 are rounded before the exponential: 5 times its unit.
    "rows with scale and bias, 32 or 64 bits": Bound(5.0, 1.5, 16.0, 6.0),
    "rows of 2^20, 16 bits": Bound(0.6, 1.0, 20.0, 2.0),  # the softmax's gradients are denormal in f16
    "rows of 2^20, 32 or 64 bits": Bound(2.5, 12.0, 16.0, 6.0),
    "products, 8 bits": Bound(8.0, 4.0, 0.0, 0.0),
    "products, 8 bits, GPU": Bound(2048.0, 4.0, 0.0, 0.0),  # the tensor cores keep 14 bits of a sum
    "products, 16 bits": Bound(1.0, 1.0, 2.0, 1.0),
    "products with bias and activation, 16 bits": Bound(1.0, 8.0, 2.0, 1.0),  # where XLA's dot rounds the product
    "products, 32 or 64 bits": Bound(8.0, 6.0, 32.0, 4.0),
    "products in TF32": Bound(4000.0, 4.0, 4000.0, 4.0),
}


def bound(op: str, dtype: str, options: str, on_gpu: bool) -> Bound:
    if options == "default precision" and on_gpu:
        return BOUNDS["products in TF32"]
    if dtype in fuzz.EIGHT_BITS:
        return BOUNDS["products, 8 bits, GPU" if on_gpu else "products, 8 bits"]
    kind = "products" if CASES[op].family == "product" else "rows of 2^20" if "2^20" in options else "rows"
    if kind == "products" and options.startswith("bias") and np.dtype(dtype).itemsize == 2:
        kind = "products with bias and activation"
    wide = np.dtype(dtype).itemsize > 2 or options == "float32 result"
    if wide and CASES[op].family == "logits" and options == "scale, bias":
        kind = "rows with scale and bias"
    return BOUNDS[f"{kind}, 32 or 64 bits" if wide else f"{kind}, 16 bits"]


# --- inputs ---

LOGITS = ("normal", "logits", "wide", "offset", "tiny", "denormal", "huge", "equal", "one hot", "zero", "-inf", "inf")
LOGITS += ("nan",)
NORMS = ("normal", "wide", "offset", "tiny", "denormal", "huge", "equal", "one hot", "zero", "inf", "nan")
PRODUCTS = ("normal", "wide", "tiny", "equal", "zero", "nan")


def _row_cases(op: str, dtype: str, long: bool) -> dict[str, list[Case]]:
    """By options: a row op's cases, each with several kinds of values."""
    family = CASES[op].family
    logits = family == "logits"
    values = {"rows": fuzz.ROW_VALUES, "logits": LOGITS, "norm": NORMS}[family]
    scaled = tuple(v for v in values if v not in ("huge", "-inf", "inf", "nan")) if logits else values
    wide = "float64" if dtype == "float64" else "float32"
    x, n = (6, 1000), 1000
    takes_axis = family == "norm" or CASES[op].axis

    def case(*operands, shape=x, values=values, axis=-1, **options):
        options = ({"axis": axis} if takes_axis else {}) | ({"epsilon": 1e-6} if family == "norm" else {}) | options
        return Case(op, (("x", shape, dtype), *operands), tuple(options.items()), values, "vjp")

    found = {"": [case(), *([case(shape=(129, 5), axis=0)] if takes_axis else [])]}
    if long:
        found["rows of 2^20"] = [case(shape=(1, 2**20), values=("normal", "offset", "equal", "one hot"))]
    if family == "rows":
        return found
    if logits:
        where = ("where", (6, 1000), "bool")
        found["where"] = [case(where)]
        found["causal"] = [case(causal=True)]
        found["scale, bias"] = [case(("scale", (), wide), ("bias", (n,), wide), values=scaled)]
    else:
        parameters = [("scale", (n,), wide), ("bias", (n,), wide)][: 2 if op == "layer_norm" else 1]
        found["scale, bias" if op == "layer_norm" else "scale"] = [case(*parameters, dtype=dtype)]
        found["residual"] = [case(*parameters[:1], ("residual", x, dtype), dtype=dtype, values=NORMS[:-2])]
        if op == "layer_norm":
            found["where"] = [case(("where", x, "bool"))]
    if dtype in ("bfloat16", "float16"):
        found["float32 result"] = [case(dtype="float32")]
    return found


def _product_cases(op: str, dtype: str) -> dict[str, list[Case]]:
    wide = "float64" if dtype == "float64" else "float32"
    m, n, k = 33, 40, 513

    def case(*operands, precision="highest", values=PRODUCTS, **options):
        options["precision"] = precision
        shapes = {"a": (m, k), "b": (k, n)} if op == "matmul" else {"a": (k, m), "b": (n, k)}
        if op == "dot_general":
            options["dimension_numbers"] = (((0,), (1,)), ((), ()))
        given = (*((name, shape, dtype) for name, shape in shapes.items()), *operands)
        derivative = "value" if dtype in fuzz.EIGHT_BITS else "vjp"
        return Case(op, given, tuple(options.items()), values, derivative)

    if dtype in fuzz.EIGHT_BITS:
        return {"float32 result": [case(preferred_element_type="float32")]}
    found = {"": [case()]}
    if dtype == "float32":
        found["default precision"] = [case(precision="default")]
    if dtype in ("bfloat16", "float16"):
        found["float32 result"] = [case(preferred_element_type="float32")]
    if op == "matmul":
        # The preactivations that the derivatives start from must be finite.
        values = tuple(v for v in PRODUCTS if v != "wide") if dtype == "float16" else PRODUCTS
        for activation in ("relu", "gelu", "gelu_exact", "silu"):
            found[f"bias, {activation}"] = [case(("bias", (n,), wide), activation=activation, values=values)]
    return found


def cases(op: str, dtype: str, long: bool = True) -> dict[str, list[Case]]:
    """By options; long: also rows with 2^20 elements."""
    return _product_cases(op, dtype) if CASES[op].family == "product" else _row_cases(op, dtype, long)


# --- references ---


def reference(case: Case, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """The form that a user would write without jaxops: jax.nn and jnp."""
    options = dict(case.options)
    dtype, axis = options.get("dtype"), options.get("axis")
    if case.family == "rows":
        return (CASES[case.op].reference(arrays["x"], **options),)
    if case.family == "product":
        more = {name: options[name] for name in ("precision", "preferred_element_type") if name in options}
        if case.op == "dot_general":
            return (jax.lax.dot_general(arrays["a"], arrays["b"], options["dimension_numbers"], **more),)
        out = jnp.matmul(arrays["a"], arrays["b"], **more)
        if "bias" in arrays:
            out = out + arrays["bias"].astype(out.dtype)
        gelu = {"gelu": True, "gelu_exact": False}
        activation = options.get("activation")
        if activation in gelu:
            return (jax.nn.gelu(out, approximate=gelu[activation]),)
        return (getattr(jax.nn, activation)(out) if activation else out,)
    x, where = arrays["x"], arrays.get("where")
    if case.family == "logits":
        x = x if dtype is None else x.astype(dtype)
        x = x * arrays["scale"].astype(x.dtype) if "scale" in arrays else x
        x = x + arrays["bias"].astype(x.dtype) if "bias" in arrays else x
        if options.get("causal"):
            causal = jnp.tril(jnp.ones(x.shape[-2:], bool))
            where = causal if where is None else where & causal
        return (getattr(jax.nn, case.op)(x, axis, where),)
    return _flax_norm(case.op, x, arrays.get("scale"), arrays.get("bias"), where, arrays.get("residual"), options)


def _flax_norm(op, x, scale, bias, where, residual, options):
    """Flax's layer, with the variance that its documentation calls the stable one."""
    import flax.linen as nn

    x = x if residual is None else x + residual
    axis = options["axis"]
    attributes = {"reduction_axes": axis, "feature_axes": axis, "use_scale": scale is not None}
    attributes |= {"epsilon": options["epsilon"], "dtype": options.get("dtype")}
    params = {name: value for name, value in (("scale", scale), ("bias", bias)) if value is not None}
    if op == "layer_norm":
        layer = nn.LayerNorm(use_bias=bias is not None, use_fast_variance=False, **attributes)
    else:
        layer = nn.RMSNorm(use_fast_variance=False, **attributes)
    y = layer.apply({"params": params}, x, mask=where)
    return (y,) if residual is None else (y, x)


# --- measuring ---


@dataclasses.dataclass
class Errors:
    """A cell's four numbers. worst: the input that gave the last number."""

    ulp: float = 0.0
    units: float = 0.0
    norm: float = 0.0
    gradient_units: float = 0.0
    worst: str = ""

    def take(self, values: str, prepared: fuzz._Prepared, got: list[jax.Array]) -> None:
        count = 2 if any(name == "residual" for name, *_ in prepared.case.operands) else 1
        for i, (mine, wanted) in enumerate(zip(got, prepared.wanted, strict=True)):
            units, exact = oracle.error(mine, wanted), wanted.value
            if values == "normal":
                finite = np.isfinite(exact)
                off, exact = (oracle.wide(mine, exact.dtype) - exact)[finite], exact[finite]
                eps = oracle.eps(mine.dtype, prepared.case.operands[0][2]) if i >= count else oracle.eps(mine.dtype)
            if i >= count:
                self.gradient_units = max(self.gradient_units, units)
                if values == "normal":
                    self.norm = max(self.norm, float(np.linalg.norm(off) / (eps * np.linalg.norm(exact))))
            else:
                if units > self.units:
                    self.units, self.worst = units, values
                if values == "normal":
                    self.ulp = max(self.ulp, float(np.max(np.abs(off)) / (eps * np.max(np.abs(exact)))))


def measure(several: list[Case], functions=(fuzz._call, reference)) -> list[Errors]:
    """Each function's errors in some cases."""
    found = [Errors() for _ in functions]
    for case in several:
        x64 = any("float64" in operand for operand in case.operands)
        with jax.enable_x64(x64), np.errstate(all="ignore"):
            programs = None
            for values in case.values:
                prepared = fuzz._prepare(case, values)
                inputs = prepared.stored, prepared.directions
                if programs is None:
                    programs = [jax.jit(functools.partial(prepared.compute, call=f)) for f in functions]
                for errors, program in zip(found, programs, strict=True):
                    errors.take(values, prepared, program(*inputs))
    return found


FIGURES = ("ulp", "units", "norm", "gradient_units")


class Row(NamedTuple):
    """A line in the results: the op's Errors, then the reference's Errors."""

    device: str
    op: str
    options: str
    dtype: str
    worst: str
    ulp: float
    units: float
    norm: float
    gradient_units: float
    reference_ulp: float
    reference_units: float
    reference_norm: float
    reference_gradient_units: float

    def __str__(self) -> str:
        return ",".join(f"{v:.3g}" if isinstance(v, float) else v for v in self)

    def within(self) -> bool:
        limits = bound(self.op, self.dtype, self.options, on_gpu=self.device != "CPU")
        return not any(getattr(self, name) > limit for name, limit in limits._asdict().items())


def measure_all(ops: Sequence[str] = OPS) -> Iterator[Row]:
    """A row for each op, option and dtype, on this device."""
    device = "CPU" if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    for op in ops:
        for dtype in (*DTYPES, *(fuzz.EIGHT_BITS[:1] if op == "matmul" else ())):
            for options, several in cases(op, dtype).items():
                ours, theirs = measure(several)
                numbers = [getattr(errors, name) for errors in (ours, theirs) for name in FIGURES]
                yield Row(device, op, options, dtype, ours.worst, *numbers)


def read(path: Path = RESULTS) -> list[Row]:
    if not path.exists():
        return []
    with path.open() as file:
        found = csv.DictReader(file)
        numbers = Row._fields[5:]
        return [Row(**row | {name: float(row[name]) for name in numbers}) for row in found]


def write(rows: list[Row], path: Path = RESULTS) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows([f"{v:.3g}" if isinstance(v, float) else v for v in row] for row in rows)


# --- the page ---

_HEAD = """# Accuracy

The tables compare values and gradients with the same computation in float64 (for float64, in 80-bit arithmetic).
`make accuracy` measures the errors on your device and writes this page; the tests enforce the bounds in the first
table.

Inputs are random and adversarial: normally distributed numbers, magnitudes over eight decades, numbers near 1e4 with
small differences, tiny, denormal and huge numbers, rows with infinities and NaN, rows of 2^20 elements, and rows that
are constant, one-hot or zero.

Each cell has two numbers, followed in brackets by the same two numbers for `jax.nn`, `jax.numpy` or Flax:

- **value**, first number: the largest error for normally distributed inputs, in units in the last place (ulp) of the
  result's largest element.
- **value**, second number: the largest error for inputs of all kinds, where each element has its own unit. The unit is
  the element's ulp, plus the first-order effect of rounding once each value that the op keeps in float32 (float64 for
  float64): the logits' distance from the maximum, the mean of a row whose offset exceeds its spread, the terms of a
  sum. For a sum of k products, the effect is half the root of k times the effect of one product.
- **gradient**, first number: the Euclidean norm of the error, divided by the exact gradient's norm, for normally
  distributed inputs. The unit is eps (the relative rounding step) of the gradient's dtype, or of x's dtype if that is
  coarser.
- **gradient**, second number: as the second number of **value**, for gradients.

If an op has several results, gradients or inputs, the cell shows the worst. Some conventions apply:

- Denormal float32 operands count as zero, as everywhere in XLA.
- On a GPU, float32 products in the default precision use TF32.
- Infinities and NaN must be where float64 has them; otherwise the cell says "differs".
- Norms square the centred values, and the squares must be finite in float32, so inputs of norms go up to 1e18.
- "\N{EN DASH}" means not measured.
"""


def _number(value: float) -> str:
    """Two significant digits."""
    if math.isnan(value):
        return "\N{EN DASH}"
    return "differs" if math.isinf(value) else f"{float(f'{value:.2g}'):g}"


def _pairs(numbers: Sequence[float], gradients: bool) -> list[str]:
    """The figures for values, and for gradients if they were measured."""
    texts = list(map(_number, numbers))
    value, gradient = (",\N{NO-BREAK SPACE}".join(texts[i : i + 2]) for i in (0, 2))
    return [value, gradient if gradients else "\N{EN DASH}"]


def _cells(row: Row | None) -> list[str]:
    """Of one device: values and gradients, the reference's in brackets."""
    if row is None:
        return ["\N{EN DASH}"] * 2
    gradients = row.dtype not in fuzz.EIGHT_BITS
    both = ([getattr(row, prefix + name) for name in FIGURES] for prefix in ("", "reference_"))
    ours, theirs = (_pairs(numbers, gradients) for numbers in both)
    return [f"{ours[0]} ({theirs[0]})", f"{ours[1]} ({theirs[1]})" if gradients else ours[1]]


def page(rows: list[Row]) -> str:
    """docs/accuracy.md."""
    devices = sorted({row.device for row in rows})
    text = [_HEAD, "| dtype | value bounds | gradient bounds |", "|---|---|---|"]
    for kind, limits in BOUNDS.items():
        text.append(f"| {kind} | {' | '.join(_pairs(limits, gradients='8 bits' not in kind))} |")
    for op in OPS:
        mine = [row for row in rows if row.op == op]
        columns = [f"{device}: {what}" for device in devices for what in ("value", "gradient")]
        text += [f"\n## {op}\n", f"| options | dtype | {' | '.join(columns)} |", f"|{'---|' * (2 + len(columns))}"]
        for options, dtype in dict.fromkeys((row.options, row.dtype) for row in mine):
            cells = [options or "none", dtype]
            for device in devices:
                row = next((r for r in mine if (r.device, r.options, r.dtype) == (device, options, dtype)), None)
                cells += _cells(row)
            text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def main(arguments: list[str]) -> int:
    """Measures on this device; returns how many rows are out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", default=OPS, help=f"ops to measure: {', '.join(OPS)}; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV file to update (default: %(default)s)")
    options = parser.parse_args(arguments)
    rows = {row[:4]: row for row in read(options.results)}
    for row in measure_all(options.ops):
        print(row, flush=True)
        rows[row[:4]] = row
        write(list(rows.values()), options.results)
    rows = list(rows.values())
    if options.results == RESULTS:
        PAGE.write_text(page(read()))
    wrong = [row for row in rows if not row.within()]
    print(*(f"out of bounds: {row}" for row in wrong), sep="\n", end="\n" if wrong else "")
    print(f"{len(rows) - len(wrong)} of {len(rows)} rows within bounds")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))

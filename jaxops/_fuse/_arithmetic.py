"""Forward-mode differentiation on small arrays in NumPy, which checks a match when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


class Dual:
    """A float64 array (or integers, or truth values) and its tangent in one direction."""

    __array_priority__ = 1

    def __init__(self, value: Any, tangent: Any = 0.0):
        self.value = np.asarray(value)
        self.tangent = np.broadcast_to(np.asarray(tangent, np.float64), self.value.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __add__(self, other):
        other = dual(other)
        return Dual(self.value + other.value, self.tangent + other.tangent)

    def __sub__(self, other):
        other = dual(other)
        return Dual(self.value - other.value, self.tangent - other.tangent)

    def __mul__(self, other):
        other = dual(other)
        return Dual(self.value * other.value, self.tangent * other.value + self.value * other.tangent)

    def __truediv__(self, other):
        other = dual(other)
        quotient = self.value / other.value
        return Dual(quotient, (self.tangent - quotient * other.tangent) / other.value)

    def __neg__(self):
        return Dual(-self.value, -self.tangent)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other):
        return dual(other) - self

    def __rtruediv__(self, other):
        return dual(other) / self

    def map(self, move: Callable[[np.ndarray], np.ndarray]) -> Dual:
        """A linear function of the entries: it moves or adds them."""
        return Dual(move(self.value), move(self.tangent))

    def sum(self, axes) -> Dual:
        return self.map(lambda x: x.sum(axes, keepdims=True))

    def mean(self, axes) -> Dual:
        return self.map(lambda x: x.mean(axes, keepdims=True))

    def max(self, axes) -> Dual:
        value = self.value.max(axes, keepdims=True)
        at = self.value == value
        return Dual(value, (self.tangent * at).sum(axes, keepdims=True) / at.sum(axes, keepdims=True))


Reference = Callable[..., Dual]


def dual(x: Any) -> Dual:
    return x if isinstance(x, Dual) else Dual(x)


_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _smooth(function: Callable, derivative: Callable) -> Callable[[Dual], Dual]:
    """A function on one array; derivative: from the argument and the result."""

    def apply(x: Dual) -> Dual:
        y = function(x.value)
        return Dual(y, derivative(x.value, y) * x.tangent)

    return apply


exp = _smooth(np.exp, lambda x, y: y)
log = _smooth(np.log, lambda x, y: 1 / x)
sqrt = _smooth(np.sqrt, lambda x, y: 0.5 / y)
rsqrt = _smooth(lambda x: 1 / np.sqrt(x), lambda x, y: -0.5 * y / x)
tanh = _smooth(np.tanh, lambda x, y: 1 - y * y)
logistic = _smooth(lambda x: 1 / (1 + np.exp(-x)), lambda x, y: y * (1 - y))
erf = _smooth(_erf, lambda x, y: 2 / math.sqrt(math.pi) * np.exp(-x * x))
erfc = _smooth(_erfc, lambda x, y: -2 / math.sqrt(math.pi) * np.exp(-x * x))


def select(which: Any, no: Any, yes: Any) -> Dual:
    no, yes = dual(no), dual(yes)
    value = np.where(which, yes.value, no.value)
    return Dual(value, np.where(which, yes.tangent, no.tangent) if value.dtype.kind == "f" else 0.0)


def thin(x: Dual) -> Dual:
    """The entries without repetition: axes along which a broadcast repeats them have size 1."""
    value, tangent = (a[tuple(slice(None) if step else slice(1) for step in a.strides)] for a in (x.value, x.tangent))
    return Dual(np.broadcast_to(value, np.broadcast_shapes(value.shape, tangent.shape)), tangent)


def maximum(a: Dual, b: Dual) -> Dual:
    """With half of each tangent if both are equal, as in JAX."""
    equal = a.value == b.value
    larger = select(a.value > b.value, b, a)
    return Dual(larger.value, np.where(equal, (a.tangent + b.tangent) / 2, larger.tangent))


def power(x: Dual, y: float) -> Dual:
    return Dual(x.value**y, y * x.value ** (y - 1) * x.tangent)


_UNARY: dict[str, Callable[[Dual], Dual]] = {
    "exp": exp,
    "exp2": lambda x: exp(x * math.log(2)),
    "log": log,
    "log1p": lambda x: log(x + 1),
    "expm1": lambda x: exp(x) - 1,
    "sqrt": sqrt,
    "rsqrt": rsqrt,
    "tanh": tanh,
    "logistic": logistic,
    "erf": erf,
    "erfc": erfc,
    "neg": lambda x: -x,
    "square": lambda x: x * x,
    "abs": _smooth(np.abs, lambda x, y: np.sign(x)),
    "sign": lambda x: Dual(np.sign(x.value)),
    "stop_gradient": lambda x: Dual(x.value),
    **dict.fromkeys(("copy", "copy_p", "pvary", "pcast"), lambda x: x),
    "is_finite": lambda x: Dual(np.isfinite(x.value)),
    "not": lambda x: Dual(~x.value),
}

_BINARY: dict[str, Callable[[Dual, Dual], Dual]] = {
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": maximum,
    "min": lambda a, b: -maximum(-a, -b),
    "gt": lambda a, b: Dual(a.value > b.value),
    "ge": lambda a, b: Dual(a.value >= b.value),
    "lt": lambda a, b: Dual(a.value < b.value),
    "le": lambda a, b: Dual(a.value <= b.value),
    "eq": lambda a, b: Dual(a.value == b.value),
    "ne": lambda a, b: Dual(a.value != b.value),
    "and": lambda a, b: Dual(a.value & b.value),
    "or": lambda a, b: Dual(a.value | b.value),
}

#: Primitives that compute each entry from the operands' entries at the same place.
ELEMENTWISE = frozenset({*_UNARY, *_BINARY, "convert_element_type", "integer_pow", "pow", "select_n", "clamp"})


def _converted(x: Dual, dtype: Any) -> Dual | None:
    """Between floats nothing is rounded here."""
    if dtype == np.bool_:
        return Dual(x.value != 0)
    if np.dtype(dtype).kind in "iu":
        return Dual(x.value.astype(dtype))
    return Dual(x.value.astype(np.float64), x.tangent)


def evaluate(name: str, params: dict[str, Any], operands: Sequence[Dual], shape: Sequence[int] = ()) -> Dual | None:
    """A primitive's result; shape: the result's shape if the operands do not tell it. None: the result is not known
    here."""
    first = operands[0] if operands else None
    if name in _UNARY and len(operands) == 1:
        return _UNARY[name](first)
    if name in _BINARY and len(operands) == 2:
        return _BINARY[name](*operands)
    match name:
        case "convert_element_type":
            return _converted(first, params["new_dtype"])
        case "integer_pow":
            return power(first, params["y"])
        case "pow":
            exponent = operands[1].value
            return power(first, float(exponent)) if np.ndim(exponent) == 0 and not operands[1].tangent.any() else None
        case "select_n":
            return select(first.value.astype(bool), *operands[1:]) if len(operands) == 3 else None
        case "clamp":
            low, x, high = operands
            return -maximum(-maximum(low + 0 * x, x), -high)
        case "reduce_sum":
            return first.map(lambda x: x.sum(tuple(params["axes"])))
        case "reduce_max":
            found = first.max(tuple(params["axes"]))
            return found.map(lambda x: x.reshape([d for a, d in enumerate(x.shape) if a not in params["axes"]]))
        case "transpose":
            return first.map(lambda x: x.transpose(params["permutation"]))
        case "reshape" | "squeeze" | "expand_dims":
            return first.map(lambda x: x.reshape(shape))
        case "broadcast_in_dim":
            spread = [1] * len(shape)
            for axis, size in zip(params["broadcast_dimensions"], first.shape, strict=True):
                spread[axis] = size
            return first.map(lambda x: np.broadcast_to(x.reshape(spread), shape))
        case "slice":
            steps = params["strides"] or [1] * len(first.shape)
            at = tuple(map(slice, params["start_indices"], params["limit_indices"], steps))
            return first.map(lambda x: x[at])
        case "dot_general":
            return product(*operands, params["dimension_numbers"])
        case "concatenate":
            values, tangents = ([getattr(x, part) for x in operands] for part in ("value", "tangent"))
            return Dual(*(np.concatenate(parts, params["dimension"]) for parts in (values, tangents)))
        case "gather":
            return _gathered(first, operands[1].value, params)
        case "iota":
            axis = params["dimension"]
            positions = np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
            return Dual(np.broadcast_to(positions, shape))
    return None


def product(a: Dual, b: Dual, dimension_numbers: Any) -> Dual:
    """The batch axes first, then a's and b's free axes."""
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    names_a = [f"a{d}" for d in range(len(a.shape))]
    names_b = [f"b{d}" for d in range(len(b.shape))]
    for i, j in zip((*contract_a, *batch_a), (*contract_b, *batch_b), strict=True):
        names_b[j] = names_a[i]
    free_a = [n for d, n in enumerate(names_a) if d not in (*contract_a, *batch_a)]
    free_b = [n for d, n in enumerate(names_b) if d not in (*contract_b, *batch_b)]
    return einsum(a, names_a, b, names_b, [*(names_a[d] for d in batch_a), *free_a, *free_b])


def einsum(a: Dual, names_a: Sequence[Any], b: Dual, names_b: Sequence[Any], names: Sequence[Any]) -> Dual:
    """For two operands, whose axes have names."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys([*names_a, *names_b]))}
    sides = [[numbers[name] for name in axes] for axes in (names_a, names_b, names)]

    def multiplied(x, y):
        return np.einsum(x, sides[0], y, sides[1], sides[2], optimize=True)

    tangent = multiplied(a.tangent, b.value) + multiplied(a.value, b.tangent)
    return Dual(multiplied(a.value, b.value), tangent)


def _gathered(x: Dual, indices: np.ndarray, params: dict[str, Any]) -> Dual | None:
    """A gather that takes single entries, or whole axes of size 1."""
    numbers = params["dimension_numbers"]
    if any(size != 1 for size in _gathered_sizes(x.shape, params)):
        return None
    batch = indices.shape[:-1]
    at = [np.zeros(batch, np.int64) for _ in x.shape]
    for axis, column in zip(numbers.start_index_map, np.moveaxis(indices, -1, 0), strict=True):
        at[axis] = column
    for axis, place in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        at[axis] = np.arange(x.shape[axis]).reshape([-1 if d == place else 1 for d in range(len(batch))]) + at[axis]
    # Whole axes: with all their entries, before the batch.
    whole = [axis for axis in range(len(x.shape)) if _is_whole(x.shape, params, axis)]
    rank = len(whole) + len(batch)
    for axis in whole:
        at[axis] = np.arange(x.shape[axis]).reshape([-1] + [1] * (rank - 1 - whole.index(axis)))
    inside = np.ones(batch, bool)
    for axis in numbers.start_index_map:
        if axis not in whole:
            inside &= (at[axis] >= 0) & (at[axis] < x.shape[axis])
            at[axis] = np.clip(at[axis], 0, x.shape[axis] - 1)
    if "CLIP" not in str(params["mode"]) and not inside.all():
        return None  # the labels are always inside
    kept = [a for a in range(len(x.shape)) if a not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]

    def move(values):
        found = np.broadcast_to(values[tuple(at)], [*(x.shape[a] for a in whole), *batch])
        # The slices' axes stand where offset_dims says, the batch's between them.
        offsets = dict(zip(kept, numbers.offset_dims, strict=True))
        sizes = [offsets[a] for a in kept if a not in whole]
        found = np.moveaxis(found, range(len(whole)), [-len(whole) + i for i in range(len(whole))]) if whole else found
        rank = len(batch) + len(kept)
        slots = [d for d in range(rank) if d not in numbers.offset_dims]
        order = slots + [offsets[a] for a in whole]
        out = np.expand_dims(found, [len(order) + i for i in range(len(sizes))]) if sizes else found
        return out.transpose(np.argsort([*order, *sizes]))

    return x.map(move)


def _is_whole(shape: Sequence[int], params: dict[str, Any], axis: int) -> bool:
    """An axis that a gather takes whole."""
    numbers = params["dimension_numbers"]
    indexed = (*numbers.start_index_map, *numbers.operand_batching_dims, *numbers.collapsed_slice_dims)
    return axis not in indexed


def _gathered_sizes(shape: Sequence[int], params: dict[str, Any]) -> list[int]:
    return [size for a, size in enumerate(params["slice_sizes"]) if not _is_whole(shape, params, a)]


def evaluate_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Dual]) -> list[Dual] | None:
    """The results of one of JAX's elementwise functions, such as relu."""
    env = dict(zip(jaxpr.invars, operands, strict=True)) | {
        v: dual(np.asarray(c)) for v, c in zip(jaxpr.constvars, consts, strict=True)
    }

    def read(atom):
        return Dual(np.asarray(atom.val).astype(np.float64)) if isinstance(atom, Literal) else env[atom]

    for equation in jaxpr.eqns:
        given, inner = [read(atom) for atom in equation.invars], equation.params.get("jaxpr")
        if isinstance(inner, ClosedJaxpr):
            found = evaluate_jaxpr(inner.jaxpr, inner.consts, given)
        else:
            shape = equation.outvars[0].aval.shape
            result = evaluate(equation.primitive.name, equation.params, given, shape)
            found = None if result is None else [result]
        if found is None:
            return None
        env.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

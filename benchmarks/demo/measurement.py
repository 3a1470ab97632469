"""Error and time of every op beside its reference."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from support.ops import COMPARISONS, OpCase, exact, ulps, value_and_gradients

DTYPES = ("float32", "bfloat16")

#: An error up to this many ulp is rounding, whatever the reference achieves.
ROUNDING = 2.0

#: A sample of a time holds as many calls as fill this many seconds, so that the clock and its noise do not count.
_SAMPLE_SECONDS = 2e-3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The first operand's shapes, [rows, columns] and [m, k], and how many samples are taken of a time.

    error_*: for errors, small enough for float64 on the CPU. timed_*: for times; on an accelerator large enough that a
    call takes longer than its dispatch.
    """

    error_rows: tuple[int, int]
    error_matrices: tuple[int, int]
    timed_rows: tuple[int, int]
    timed_matrices: tuple[int, int]
    samples: int

    @classmethod
    def of(cls, platform: str, quick: bool) -> Sizes:
        """Sizes for a platform ("cpu" or another)."""
        rows, matrices, samples = ((128, 500), (128, 256), 5) if quick else ((512, 1000), (256, 512), 21)
        if platform == "cpu":
            return cls(rows, matrices, rows, matrices, samples)
        timed = ((2048, 4096), (2048, 2048)) if quick else ((8192, 4096), (4096, 4096))
        return cls(rows, matrices, *timed, samples)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A quantity for jaxops and for the reference."""

    jaxops: float
    reference: float

    @property
    def ratio(self) -> float:
        """The reference's over jaxops'. For times, above 1 if jaxops is faster."""
        return self.reference / self.jaxops


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of one op and one dtype of its first operand.

    value_error, gradient_error: the largest |got - wanted| / (eps max |wanted|), where `wanted` is the reference in
    float64, eps the result's machine epsilon, and the gradient that errs most counts: ulp of the largest value.
    forward, forward_and_backward: seconds a call of the jitted function, median.
    """

    op: str
    dtype: str
    value_error: Pair
    gradient_error: Pair
    forward: Pair
    forward_and_backward: Pair

    @staticmethod
    def allows(error: Pair) -> bool:
        """Whether jaxops errs by no more than rounding or by no more than the reference; NaN is an error."""
        return error.jaxops <= ROUNDING or error.jaxops <= error.reference

    @property
    def worse(self) -> bool:
        """Whether the value's error or the gradients' is more than allowed."""
        return not (self.allows(self.value_error) and self.allows(self.gradient_error))


def _draw(case: OpCase, rng, shape, dtype):
    """Operands on the device, and a cotangent of the result."""
    operands = [jnp.asarray(x) for x in case.operands(rng, shape, jnp.dtype(dtype))]
    result = jax.eval_shape(case.ours, *operands)
    return operands, jnp.asarray(rng.standard_normal(result.shape).astype(result.dtype))


def _jitted(case: OpCase) -> tuple[Pair, Pair]:
    """The forward functions of the operands, and the forward and backward ones of the operands and a cotangent."""

    def both(function):
        return jax.jit(lambda *xs: value_and_gradients(function, xs[:-1], xs[-1]))

    functions = case.ours, case.reference
    return Pair(*map(jax.jit, functions)), Pair(*map(both, functions))


def _errors(results, wanted: list[np.ndarray]) -> tuple[float, float]:
    """Error of the value and the largest of the gradients, both in ulp of the value's dtype."""
    unit = float(jnp.finfo(results[0].dtype).eps)
    value, *gradients = (
        ulps(got, target) * float(jnp.finfo(got.dtype).eps) / unit for got, target in zip(results, wanted, strict=True)
    )
    return value, float(np.max(gradients))


def alternating_times(functions: Pair, operands, samples: int) -> Pair:
    """Median seconds a call of two jitted functions, sampled in turn so that both meet the same conditions."""

    def seconds(function: Callable, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*operands)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    pair = functions.jaxops, functions.reference
    for function in pair:
        seconds(function, 1)  # compiles
    calls = [max(1, min(200, int(_SAMPLE_SECONDS / seconds(function, 2)))) for function in pair]
    taken: tuple[list[float], list[float]] = [], []
    for sample in range(samples):
        for i in (0, 1) if sample % 2 else (1, 0):
            taken[i].append(seconds(pair[i], calls[i]))
    return Pair(*map(statistics.median, taken))


def measure(case: OpCase, dtype: str, sizes: Sizes, seed: int) -> Row:
    """Measures one op; products of f32 in full precision, as a GPU's default is TF32."""
    with jax.default_matmul_precision("highest"):
        return _measure(case, dtype, sizes, seed)


def _measure(case, dtype, sizes, seed):
    rng = np.random.default_rng(seed)
    is_matrix = case.family == "product"  # [m, k] @ [k, m]
    forward, both = _jitted(case)

    operands, cotangent = _draw(case, rng, sizes.error_matrices if is_matrix else sizes.error_rows, dtype)
    wanted = exact(case, operands, cotangent)
    errors = [_errors(function(*operands, cotangent), wanted) for function in (both.jaxops, both.reference)]

    timed = sizes.timed_matrices if is_matrix else sizes.timed_rows
    if timed != operands[0].shape:
        operands, cotangent = _draw(case, rng, timed, dtype)
    return Row(
        case.name,
        dtype,
        *(Pair(*values) for values in zip(*errors, strict=True)),
        alternating_times(forward, operands, sizes.samples),
        alternating_times(both, (*operands, cotangent), sizes.samples),
    )


def measure_all(sizes: Sizes, seed: int) -> Iterator[Row]:
    """Measures every op in every dtype; there are `len(COMPARISONS) * len(DTYPES)`."""
    for case in COMPARISONS.values():
        for dtype in DTYPES:
            yield measure(case, dtype, sizes, seed)

"""softmax, log_softmax, layer_norm and rms_norm: bytes a second, beside the ceiling that XLA's elementwise kernels set.

Effective bytes are the fewest that an op must move: forward reads x and writes y, 2 N; backward reads two tensors and
writes one, 3 N; `Form` tells how many its options add or spare. The ceilings move as many: -x over f32 words (1 read :
1 write) and x + y (2 reads : 1 write).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.ops import COMPARISONS, ROW_OPS

import jaxops
from benchmarks import harness

COLUMNS = {
    "gpu": (
        *(64, 127, 256, 768, 1000, 1024, 2048, 4096, 4097, 5120, 8192, 16384),
        *(20001, 32768, 50257, 65536, 131072, 262144),
    ),
    "cpu": (64, 127, 1024, 4097, 50257),
}
QUICK_COLUMNS = (127, 1024)

#: Bytes of x.
SIZES = {"gpu": 256 << 20, "cpu": 16 << 20}
QUICK_SIZES = {"gpu": 16 << 20, "cpu": 1 << 20}


@dataclasses.dataclass(frozen=True)
class Case:
    """x's shape and the reduction's axis."""

    shape: tuple[int, ...]
    axis: int = -1

    def __str__(self):
        return "x".join(map(str, self.shape)) + ("" if self.axis == -1 else f" axis {self.axis}")


AXIS_CASES = {
    "gpu": (
        Case((64, 1024, 1024), 1),
        Case((256, 128, 32, 32), 1),
        Case((16, 4096, 1024), 1),
        Case((8192, 8192), 0),
        Case((65536, 1024), 0),
    ),
    "cpu": (Case((16, 256, 1024), 1), Case((4096, 1024), 0)),
}


#: Few rows, as in inference.
FEW_ROWS = {
    "gpu": tuple(Case((rows, columns)) for columns in (347, 1024, 4096, 8192) for rows in (8, 64, 256)),
    "cpu": (),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """An op with options.

    operands: from a generator and a dtype. differentiable: how many operands, from the first, have gradients; None:
    all. tensors: the tensors read and written, forward and backward, counted in the first operand's size; broadcast
    operands do not count. narrow: only for 16-bit operands.
    """

    op: str
    name: str
    ours: Callable[..., Any]
    reference: Callable[..., Any]
    operands: Callable[[Any, np.dtype], tuple]
    differentiable: int | None
    tensors: tuple[float, float]
    narrow: bool = False


#: Attention logits: batch, heads, queries, keys; the first with every form.
ATTENTION = {"gpu": ((8, 16, 1024, 1024), (128, 16, 256, 256), (1, 8, 4096, 4096)), "cpu": ((2, 4, 256, 256),)}
SCALE = 0.125


def _shapes():
    return ATTENTION[harness.backend()]


def _scores(rng, dtype, number=0):
    return (8 * rng.standard_normal(_shapes()[number])).astype(dtype)


def _padding(rng, number=0):
    """Which keys each batch element has: about 7 in 8."""
    batch, _, _, keys = _shapes()[number]
    return rng.standard_normal((batch, 1, 1, keys)) < 1.15


def _biased(rng, dtype):
    _, heads, queries, keys = _shapes()[0]
    bias = rng.standard_normal((1, heads, queries, keys)).astype(dtype)
    return _scores(rng, dtype), bias, _padding(rng)


def _masked_by_hand(scores):
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(visible, scores * SCALE, jnp.finfo(scores.dtype).min))


def _rows_of_4096(op, rng, dtype):
    size = SIZES[harness.backend()] // np.dtype(dtype).itemsize
    return COMPARISONS[op].operands(rng, (size // 4096, 4096), dtype)


def _residual_form(op):
    def ours(x, residual, *parameters):
        return getattr(jaxops, op)(x, *parameters, residual=residual, dtype=x.dtype)

    def reference(x, residual, *parameters):
        return COMPARISONS[op].reference(x + residual, *parameters), x + residual

    def operands(rng, dtype):
        x, *parameters = _rows_of_4096(op, rng, dtype)
        return (x, rng.standard_normal(x.shape).astype(dtype), *parameters)

    return Form(op, "residual", ours, reference, operands, None, (4, 4))


def _widening_form(op):
    """16 bits in, f32 out."""
    ours = getattr(jaxops, op)
    if COMPARISONS[op].axis:
        ours = functools.partial(ours, dtype=jnp.float32)
    reference = COMPARISONS[op].reference
    operands = functools.partial(_rows_of_4096, op)
    widened = lambda x, *parameters: reference(x.astype(jnp.float32), *parameters)  # noqa: E731
    return Form(op, "to float32", ours, widened, operands, None, (3, 4), narrow=True)


def _masked_forms(number):
    """Causal, and with a mask on keys; number: the shape's."""
    causal = Form(
        "softmax",
        "scale causal",
        lambda s: jaxops.softmax(s, scale=SCALE, causal=True),
        _masked_by_hand,
        lambda rng, dtype: (_scores(rng, dtype, number),),
        1,
        (1.5, 2),
    )
    where = Form(
        "softmax",
        "scale where",
        lambda s, pad: jaxops.softmax(s, where=pad, scale=SCALE),
        lambda s, pad: jax.nn.softmax(s * SCALE, where=pad),
        lambda rng, dtype: (_scores(rng, dtype, number), _padding(rng, number)),
        1,
        (2, 3),
    )
    return causal, where


def forms() -> tuple[Form, ...]:
    """The forms for the device at hand."""
    return (*itertools.chain.from_iterable(map(_masked_forms, range(len(_shapes())))), *FORMS)


FORMS = (
    Form(
        "softmax",
        "scale bias where",
        lambda s, bias, pad: jaxops.softmax(s, where=pad, scale=SCALE, bias=bias),
        lambda s, bias, pad: jax.nn.softmax(s * SCALE + bias, where=pad),
        _biased,
        2,
        (2, 3),
    ),
    _residual_form("layer_norm"),
    _residual_form("rms_norm"),
    *(_widening_form(op) for op in ROW_OPS if COMPARISONS[op].family != "rows"),
)


def cases(op: str, dtype: str, quick: bool) -> list[Case]:
    """The shapes for the device at hand."""
    backend = harness.backend()
    size = (QUICK_SIZES if quick else SIZES)[backend] // jnp.dtype(dtype).itemsize
    found = [Case((max(1, size // columns), columns)) for columns in (QUICK_COLUMNS if quick else COLUMNS[backend])]
    if quick:
        return found
    return [*found, *FEW_ROWS[backend], *(AXIS_CASES[backend] if COMPARISONS[op].axis else ())]


@functools.lru_cache(maxsize=1)
def _words(count):
    """Sets with two operands of `count` f32 words each."""
    draw = harness.drawing(lambda rng: (rng.standard_normal((count,)), rng.standard_normal((count,))))
    first = draw(0)
    return [first, *(draw(seed) for seed in range(1, harness.copies(first[:1])))]


def ceiling(size: int, direction: str) -> harness.Calls:
    """An elementwise XLA kernel that reads one `size`-byte tensor (forward) or two (backward) and writes one.

    Rounded down to whole vectors: XLA's kernels are slow on odd element counts.
    """
    words = max(size // 4 // 1024 * 1024, 1)
    if direction == "backward":
        return harness.Calls(harness.compiled(jnp.add), _words(words))
    return harness.Calls(harness.compiled(jnp.negative), [operands[:1] for operands in _words(words)])


def tasks(op: str, settings: harness.Settings) -> list[harness.Task]:
    """The op's measurements."""
    comparison = COMPARISONS[op]
    found = []
    for dtype in settings.dtypes:
        for case in cases(op, dtype, settings.quick):
            axis = {} if case.axis == -1 else {"axis": case.axis}
            size = math.prod(case.shape) * jnp.dtype(dtype).itemsize
            draw = harness.drawing(functools.partial(comparison.operands, shape=case.shape, dtype=np.dtype(dtype)))
            for direction, tensors in (("forward", 2), ("backward", 3)):
                found.append(
                    harness.Task(
                        op=op,
                        direction=direction,
                        shape=str(case),
                        dtype=dtype,
                        ours=functools.partial(comparison.ours, **axis),
                        reference=functools.partial(comparison.reference, **axis),
                        draw=draw,
                        work=tensors * size,
                        unit="TB/s",
                        ceiling=functools.partial(ceiling, size, direction),
                    )
                )
        for form in forms():
            if form.op != op or settings.quick or (form.narrow and jnp.dtype(dtype).itemsize > 2):
                continue
            draw = harness.drawing(functools.partial(form.operands, dtype=np.dtype(dtype)))
            first = jax.eval_shape(draw, 0)[0]
            size = math.prod(first.shape) * first.dtype.itemsize
            for direction, tensors, moved in zip(("forward", "backward"), form.tensors, (2, 3), strict=True):
                found.append(
                    harness.Task(
                        op=op,
                        direction=direction,
                        shape=f"{'x'.join(map(str, first.shape))} {form.name}",
                        dtype=dtype,
                        ours=form.ours,
                        reference=form.reference,
                        draw=draw,
                        work=tensors * size,
                        unit="TB/s",
                        ceiling=functools.partial(ceiling, int(tensors * size / moved), direction),
                        differentiable=form.differentiable,
                    )
                )
    return found


def run(op: str, clock: harness.Clock, settings: harness.Settings) -> bool:
    """Measures one op; False if a measurement failed."""
    title = f"{op}; ceiling: -x forward, x + y backward, over as many bytes"
    return harness.run(title, tasks(op, settings), clock, settings)

"""softmax, log_softmax and their gradients in float64, and the comparison with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from support import contract
from support.ops import value_and_gradients
from support.row_cases import assert_matches

OPS = {
    "softmax": (jaxops.softmax, jax.nn.softmax, 0.0),
    "log_softmax": (jaxops.log_softmax, jax.nn.log_softmax, -np.inf),
}
every_op = pytest.mark.parametrize("op", OPS)
INF, NAN = np.inf, np.nan


def wide(x):
    return np.asarray(x).astype(np.float64)


def exact(op, logits, cotangent, axes=-1, mask=True):
    """Value, and gradient with respect to the logits, in float64; mask: which entries take part.

    Also the sizes of terms that cancel in the gradient; its error counts in their ulp.
    """
    shape = np.broadcast_shapes(np.shape(logits), np.shape(mask))
    axes = tuple(range(len(shape))) if axes is None else axes
    axes = tuple(axes) if isinstance(axes, (list, tuple)) else (axes,)
    mask = np.broadcast_to(mask, shape)
    z = wide(logits)
    if np.asarray(logits).dtype == np.float64:  # a judge for float64 must be better than float64
        z = z.astype(np.longdouble)
    z = np.where(mask, z, -INF)
    dy = np.where(mask, wide(cotangent).astype(z.dtype), 0)
    with np.errstate(all="ignore"):
        shifted = z - z.max(axes, keepdims=True, initial=-INF)
        exponentials = np.exp(shifted)
        total = exponentials.sum(axes, keepdims=True)
        p = exponentials / total
        if op == "softmax":
            value, gradient = p, p * (dy - (p * dy).sum(axes, keepdims=True))
            terms = p * (np.abs(dy) + (p * np.abs(dy)).sum(axes, keepdims=True))
        else:
            value, gradient = shifted - np.log(total), dy - p * dy.sum(axes, keepdims=True)
            norm = np.sqrt(np.square(dy).sum(axes, keepdims=True))
            terms = np.abs(dy) + p * (np.abs(dy.sum(axes, keepdims=True)) + norm)
        results = np.where(mask, value, OPS[op][2]), np.where(mask, gradient, 0), np.where(mask, terms, 0)
        return tuple(result.astype(np.float64) for result in results)


def assert_matches_exact(got, wanted, what="", slack=1.0, reference=None):
    """Value and gradient, or the value alone, against the result of `exact`; reference() is another implementation."""
    value, gradient, terms = wanted
    assert_matches(got[0], value, f"{what} value", slack * contract.ROUNDING, reference and (lambda: reference()[0]))
    if len(got) > 1:
        rounding = slack * contract.GRADIENT_ROUNDING
        by_reference = reference and (lambda: reference()[1])
        assert_matches(got[1], gradient, f"{what} gradient", rounding, by_reference, terms)


def unbroadcast(gradient, shape):
    """The gradient summed over the axes along which a `shape` operand was broadcast."""
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    return gradient.sum(tuple(a for a, d in enumerate(shape) if d != gradient.shape[a]), keepdims=True)


def run(function, *operands, cotangent):
    return jax.jit(lambda *xs: value_and_gradients(function, xs[:-1], xs[-1]))(*operands, jnp.asarray(cotangent))

"""The contract that every op must satisfy, as functions that take its OpCase (see support/ops.py)."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

from support.ops import OpCase, exact, ulps, value_and_gradients

DTYPES = ("float32", "bfloat16", "float16", "float64")

#: The first operand's shapes: single elements, rows and columns, sizes around vector and tile boundaries.
SHAPES = ((1, 3), (1, 127), (130, 3), (3, 8), (5, 257), (2, 3, 33), (65, 1000), (4, 1, 4097))

#: Errors up to this many ulp of the result's dtype are rounding, whatever the reference achieves: for values, and for
#: gradients, which are computed from rounded values.
ROUNDING, GRADIENT_ROUNDING = 2.0, 4.0


@contextlib.contextmanager
def precision_of(dtype):
    """float64 needs x64 mode."""
    with jax.enable_x64(np.dtype(dtype) == np.float64):
        yield


def draw(case: OpCase, rng, shape, dtype):
    """Operands on the device, and a cotangent for the result, as numpy."""
    operands = [jnp.asarray(x) for x in case.operands(rng, shape, np.dtype(dtype))]
    out = jax.eval_shape(case.ours, *operands)
    return operands, rng.standard_normal(out.shape).astype(out.dtype)


def assert_close(got, wanted, reference=None, what="result", rounding=ROUNDING, least=0.0, times=2.0):
    """`got` equals the float64 values `wanted` within rounding, or is about as near to them as reference().

    The reference runs only if `got` is not within rounding, because compiling it takes as long as compiling the op.
    least: a number that is rounded on the way to `got`, if it may be larger than all of `wanted`. times: how many times
    the reference's error is about as near.
    """
    assert got.shape == wanted.shape, f"{what}: shape {got.shape} instead of {wanted.shape}"
    error, allowed = ulps(got, wanted, least), rounding
    if not error <= allowed and reference is not None:
        # Where a result is small beside the terms that cancel in it, both are off.
        allowed = max(rounding, times * np.nan_to_num(ulps(reference(), wanted, least)))
    assert error <= allowed, f"{what}: {error:.2f} ulp, allowed {allowed:.2f}"


def check_value_and_gradients(case: OpCase, rng, shape, dtype):
    with precision_of(dtype):
        operands, cotangent = draw(case, rng, shape, dtype)
        wanted = exact(case, operands, cotangent)
        value_dtype = jax.eval_shape(case.reference, *operands).dtype

    @functools.cache
    def run(function):
        with precision_of(dtype):
            jitted = jax.jit(lambda *xs: value_and_gradients(function, xs[:-1], xs[-1]))
            return jitted(*operands, jnp.asarray(cotangent))

    x = operands[0]
    rows, columns = (x.size // x.shape[-1], x.shape[-1]) if x.size else (1, 1)
    for i, (got, target) in enumerate(zip(run(case.ours), wanted, strict=True)):
        what = "value" if i == 0 else f"gradient of operand {i - 1}"
        assert got.dtype == (operands[i - 1].dtype if i else value_dtype), what
        # Sums of n rounded products cannot be nearer than about sqrt(n) / 2 ulp: matrix products and their gradients,
        # and the parameters' gradients; the latter in ulp of the cotangents that they sum.
        terms = max(rows, columns) if case.family == "product" else rows if i >= 2 else 0
        rounding = (GRADIENT_ROUNDING if i else ROUNDING) + 0.5 * terms**0.5
        rounding *= float(jnp.finfo(x.dtype).eps / jnp.finfo(got.dtype).eps)
        if dtype == "float64":  # the wanted values have equally large rounding errors
            rounding *= 8
        # softmax's gradient y (dy - <dy, y>) comes from a rounded y, and may cancel.
        least = np.max(np.abs(cotangent * wanted[0])) if case.name == "softmax" and i else 0
        assert_close(got, target, lambda i=i: run(case.reference)[i], what, rounding, float(least))


def check_jit(case: OpCase, rng, shape):
    """Inside jit the result is the same to the bit."""
    operands, _ = draw(case, rng, shape, "float32")
    np.testing.assert_array_equal(case.ours(*operands), jax.jit(case.ours)(*operands))


def check_slices(case: OpCase, rng, shape, dtype):
    """Operands and results that begin anywhere in a vector, as `ravel_pytree` makes them; XLA may not copy them."""
    operands, cotangent = draw(case, rng, shape, dtype)
    given = [*operands, jnp.asarray(cotangent)]

    @jax.jit
    def sliced(vectors):
        whole = [v[1:].reshape(x.shape) for v, x in zip(vectors, given, strict=True)]
        found = value_and_gradients(case.ours, whole[:-1], whole[-1])
        return [jnp.full(x.size + 1, 7, x.dtype).at[1:].set(x.ravel()) for x in found]

    results = sliced([jnp.concatenate([jnp.full(1, 7, x.dtype), x.ravel()]) for x in given])
    for got, wanted in zip(results, value_and_gradients(case.ours, operands, given[-1]), strict=True):
        assert got[0] == 7
        rounding = {4: 64, 2: 4}[wanted.dtype.itemsize] * float(jnp.finfo(wanted.dtype).eps)
        np.testing.assert_allclose(
            np.asarray(got[1:], np.float64),
            np.asarray(wanted, np.float64).ravel(),
            rtol=0,
            atol=rounding * float(jnp.max(jnp.abs(wanted))),
        )


def check_vmap(case: OpCase, rng, shape, ways):
    """vmap equals a loop, for values and gradients; one launch.

    ways: pairs, the numbers of the mapped operands and the mapped axis.
    """
    operands, cotangent = draw(case, rng, shape, "float32")
    size = 3
    draws = [case.operands(rng, shape, np.dtype("float32")) for _ in range(size)]

    @jax.jit
    def run(*xs):
        return value_and_gradients(case.ours, xs, jnp.asarray(cotangent))

    launches = count_launches(run, *operands)
    assert launches > 0
    for mapped, axis in ways:
        in_axes = [axis % (x.ndim + 1) if i in mapped else None for i, x in enumerate(operands)]
        given = [
            x if a is None else jnp.stack([jnp.asarray(values[i]) for values in draws], a)
            for i, (x, a) in enumerate(zip(operands, in_axes, strict=True))
        ]
        traced = jax.jit(jax.vmap(run, in_axes)).trace(*given)
        assert count_launches_of(traced.jaxpr) == launches, "vmap changed the number of launches"
        got = traced.lower().compile()(*given)
        for j in range(size):
            picked = [x if a is None else jnp.take(x, j, a) for x, a in zip(given, in_axes, strict=True)]
            for value, wanted in zip(got, run(*picked), strict=True):
                atol = 2e-5 * float(jnp.max(jnp.abs(wanted)))
                np.testing.assert_allclose(value[j], wanted, rtol=2e-5, atol=atol, err_msg=f"{mapped}, axis {axis}")


def count_launches(function, *operands) -> int:
    """How many kernels a function binds."""
    return count_launches_of(jax.make_jaxpr(function)(*operands))


def count_launches_of(jaxpr) -> int:
    """How many kernels a traced function binds. A loop fails."""
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        assert equation.primitive.name not in ("while", "scan"), "a kernel runs in a loop"
        total += equation.primitive.name.startswith("jaxops_")
        for value in equation.params.values():
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                total += count_launches_of(value)
    return total

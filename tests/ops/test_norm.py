"""layer_norm and rms_norm beyond the contract."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import contract
from support.ops import OpCase, exact, value_and_gradients
from support.row_cases import (
    COLUMNS_ONCE,
    assert_matches,
    beyond_few,
    coarsest,
    crowds,
    edged,
    lengths,
    some_rows,
    strided,
)

import jaxops

OPS = ("layer_norm", "rms_norm")
every_op = pytest.mark.parametrize("op", OPS)


def flax(op, x, scale=None, bias=None, axis=-1, where=None, **options):
    """Flax's module as a function."""
    axes = tuple(range(np.ndim(x))) if axis is None else axis
    options |= {"reduction_axes": axes, "feature_axes": axes, "use_scale": scale is not None}
    if op == "layer_norm":
        module = nn.LayerNorm(use_bias=bias is not None, use_fast_variance=False, **options)
    else:
        module = nn.RMSNorm(**options)
    params = {name: value for name, value in (("scale", scale), ("bias", bias)) if value is not None}
    return module.apply({"params": params}, x, mask=where)


def call(op, x, scale=None, bias=None, **options):
    if op == "layer_norm":
        return jaxops.layer_norm(x, scale, bias, **options)
    return jaxops.rms_norm(x, scale, **options)


def parameters(op, rng, shape, dtype="float32"):
    count = 2 if op == "layer_norm" else 1
    return [jnp.asarray((1 - i + 0.3 * rng.standard_normal(shape)).astype(dtype)) for i in range(count)]


def wide(x):
    return np.asarray(x).astype(np.float64)


def run(function, *operands, cotangent):
    return jax.jit(lambda *xs: value_and_gradients(function, xs[:-1], xs[-1]))(*operands, jnp.asarray(cotangent))


def closed_form(op, x, scale, bias, dy, axis=-1, epsilon=1e-6, where=True):
    """Value and gradients for x, scale and bias in float64; parameters have x's rank; the statistics count `where`."""
    judge = np.longdouble if np.asarray(x).dtype == np.float64 else np.float64
    x, scale, dy = (np.asarray(v).astype(judge) for v in (x, scale, dy))
    counted = np.broadcast_to(where, x.shape)

    def total(values):
        return values.sum(axis, keepdims=True)

    with np.errstate(invalid="ignore"):  # rows that count nothing
        mean = total(x * counted) / total(counted) if op == "layer_norm" else 0.0
        rstd = 1 / np.sqrt(total(np.square(x - mean) * counted) / total(counted) + epsilon)
        normal, g = (x - mean) * rstd, dy * scale
        through = normal * total(g * normal) + (total(g) if op == "layer_norm" else 0)
        dx = rstd * (g - counted / total(counted) * through)
    summed = tuple(a for a in range(x.ndim) if scale.shape[a] == 1 and x.shape[a] != 1)
    dscale, dbias = ((dy * normal).sum(summed, keepdims=True), dy.sum(summed, keepdims=True))
    value = normal * scale + (0 if bias is None else wide(bias))
    results = (value, dx, dscale) if op == "rms_norm" else (value, dx, dscale, dbias)
    return [result.astype(np.float64) for result in results]


# --- against Flax ---

AXES = [((4, 9), -1), ((4, 9), 0), ((3, 4, 5), 1), ((3, 4, 5), (1, 2)), ((3, 4, 5), (0, 2)), ((3, 4, 5), (-1, 0))]
AXES += [((3, 4, 5), None), ((2, 3, 4, 5), (1, 3)), ((2, 3, 4, 5), (0, 1)), ((6,), 0), ((5, 4), [1])]


@every_op
def test_axes(op, rng):
    """Scale and bias have the normalised axes' shape in x's order."""
    operands = []
    for shape, axis in AXES:
        axes = range(len(shape)) if axis is None else sorted(a % len(shape) for a in np.atleast_1d(axis))
        x = jnp.asarray(rng.standard_normal(shape) * 2 + 1, jnp.float32)
        given = parameters(op, rng, [shape[a] for a in axes])
        operands.append((x, *given, jnp.asarray(rng.standard_normal(shape), jnp.float32)))

    @jax.jit
    def both(operands):
        return [
            value_and_gradients(lambda *xs, axis=axis: call(op, *xs, axis=axis), xs[:-1], xs[-1])
            for (_, axis), xs in zip(AXES, operands, strict=True)
        ]

    for (shape, axis), xs, got in zip(AXES, operands, both(operands), strict=True):
        axes = None if axis is None else tuple(sorted(a % len(shape) for a in np.atleast_1d(axis).tolist()))
        expanded = [d if axes is None or a in axes else 1 for a, d in enumerate(shape)]
        given = [np.asarray(p).reshape(expanded) for p in xs[1:-1]]
        given = given if len(given) == 2 else [*given, None]
        for i, target in enumerate(closed_form(op, xs[0], *given, xs[-1], axes)):
            assert_matches(got[i], target.reshape(got[i].shape), f"{shape}, axis {axis}: result {i}", 8)


@every_op
@pytest.mark.parametrize("axis", [-1, (-2, -1)], ids=str)
def test_flax_agrees(op, axis, rng):
    shape = (3, 4, 10)
    x = jnp.asarray(rng.standard_normal(shape) * 2 + 1, jnp.float32)
    given = parameters(op, rng, shape[2:] if axis == -1 else shape[1:])
    cotangent = rng.standard_normal(shape).astype(np.float32)
    got = run(lambda *xs: call(op, *xs, axis=axis), x, *given, cotangent=cotangent)
    wanted = run(lambda *xs: flax(op, *xs, axis=axis), x, *given, cotangent=cotangent)
    for gotten, target in zip(got, wanted, strict=True):
        np.testing.assert_allclose(gotten, target, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "op, present",
    [("layer_norm", names) for names in ((), ("scale",), ("bias",), ("scale", "bias"))]
    + [("rms_norm", names) for names in ((), ("scale",))],
    ids=str,
)
def test_absent_parameters(op, present, rng):
    x = jnp.asarray(rng.standard_normal((5, 12)), jnp.float32)
    given = dict(zip(("scale", "bias"), parameters("layer_norm", rng, (12,)), strict=True))
    given = {name: given[name] for name in present}
    cotangent = rng.standard_normal(x.shape).astype(np.float32)
    names = list(given)

    def with_names(function):
        return lambda x, *values: function(op, x, **dict(zip(names, values, strict=True)))

    got = run(with_names(call), x, *given.values(), cotangent=cotangent)
    case = OpCase(op, with_names(call), with_names(flax), None)
    for i, target in enumerate(exact(case, (x, *given.values()), cotangent)):
        assert_matches(got[i], target, f"result {i}", contract.GRADIENT_ROUNDING)


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_many_rows_side_by_side_without_parameters(op, dtype, rng):
    """On the CPU threads share such rows' columns."""
    shape, axis = (1, 300, 1200), 1
    with contract.precision_of(dtype):
        x, dy = (edged(rng, shape, dtype, axis, 4) for _ in range(2))
        got = run(lambda x: call(op, x, axis=axis), x, cotangent=dy)
    wanted = closed_form(op, x, np.ones((1, 300, 1)), None, dy, axis)
    rounding = contract.GRADIENT_ROUNDING * (8 if dtype == "float64" else 1)
    for i in range(2):
        assert_matches(got[i], wanted[i], f"result {i}", rounding)


@every_op
@pytest.mark.parametrize("dtype, columns", [("float32", 10001), ("bfloat16", 20001)])
def test_long_rows_of_few_scales(op, dtype, columns, rng):
    """Side by side, three rows to a scale: a GPU splits them, and takes them in single elements."""
    x, dy = (jnp.asarray(4 * rng.standard_normal((columns, 4, 3)) + 30 * mean, dtype) for mean in (1, 0))
    (scale, *_) = parameters(op, rng, (columns, 4))

    def mapped(x, scale):
        of_scale = lambda x, scale: jax.vmap(lambda x: call(op, x, scale), 1, 1)(x)  # noqa: E731
        return jax.vmap(of_scale, (1, 1), 1)(x, scale)

    wanted = closed_form(op, x, np.expand_dims(scale, 2), None, dy, 0)
    for i, (got, target) in enumerate(zip(run(mapped, x, scale, cotangent=dy), wanted, strict=False)):
        assert_matches(got, target.reshape(got.shape), f"result {i}", contract.GRADIENT_ROUNDING * 2)


@every_op
@pytest.mark.parametrize("epsilon", [0, 1e-12, 1e-5, 0.5, np.float32(1e-3), 3])
def test_epsilon(op, epsilon, rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)
    given = parameters(op, rng, (8,))
    got = call(op, x, *given, epsilon=epsilon)
    rows = [np.asarray(p)[None] for p in given]
    wanted = closed_form(op, x, *(rows if len(rows) == 2 else (*rows, None)), x, epsilon=float(epsilon))[0]
    assert_matches(got, wanted)


def test_variance_is_stable():
    """E[x^2] - E[x]^2 in f32 gives +-1500 here instead of +-1.34."""
    for offset in (1e4, -1e4, 1e5, 2.0**22):
        x = jnp.asarray(offset + np.arange(4.0), jnp.float32)
        wanted = (np.arange(4) - 1.5) / np.sqrt(1.25 + 1e-6)
        np.testing.assert_allclose(jaxops.layer_norm(x), wanted, rtol=1e-6)
        np.testing.assert_allclose(jaxops.layer_norm(x[:, None] + jnp.zeros(3), axis=0)[:, 1], wanted, rtol=1e-6)
    x = jnp.asarray(1e4 + 8 * np.arange(4.0), jnp.float16)
    np.testing.assert_allclose(jaxops.layer_norm(x), (np.arange(4) - 1.5) / np.sqrt(1.25 + 1e-6 / 64), rtol=1e-3)


@every_op
def test_constant_and_single_element_rows(op, rng):
    x = jnp.asarray(np.repeat(rng.standard_normal((4, 1)), 7, 1), jnp.float32)
    given = parameters(op, rng, (7,))
    got = call(op, x, *given)
    if op == "layer_norm":
        np.testing.assert_allclose(got, np.broadcast_to(given[1], x.shape), atol=2e-4)
        np.testing.assert_array_equal(jaxops.layer_norm(x[:, :1]), np.zeros((4, 1)))
    else:
        np.testing.assert_allclose(got, np.sign(x) * given[0], rtol=1e-4)


@every_op
@pytest.mark.parametrize("axis", [-1, 0])
def test_rows_with_nan_and_infinities(op, axis):
    rows = np.array(
        [[1, 2, 3, 4], [1, np.nan, 2, 3], [1, np.inf, 2, 3], [-np.inf, np.inf, 0, 1], [np.inf] * 4, [0] * 4], np.float32
    )
    x = jnp.asarray(rows if axis == -1 else rows.T)
    scale = jnp.ones(4)
    got, by_flax = call(op, x, scale, axis=axis), flax(op, x, scale, axis=axis)
    np.testing.assert_allclose(got, by_flax, rtol=1e-6, atol=1e-6)
    dx = jax.jit(jax.grad(lambda x: jnp.sum(jnp.moveaxis(call(op, x, scale, axis=axis), axis, -1)[..., 1])))(x)
    dx = wide(dx) if axis == -1 else wide(dx).T
    assert np.isfinite(dx[0]).all() and np.isfinite(dx[5]).all() and np.isnan(dx[1]).all()


# --- dtypes ---


@every_op
def test_result_dtype_is_that_of_flax(op, x64):
    """Without dtype: the one to which x and the parameters promote; bf16 x with f32 parameters gives f32."""
    for a in contract.DTYPES:
        for b in (*contract.DTYPES, None):
            x = jax.ShapeDtypeStruct((2, 4), a)
            given = [] if b is None else [jax.ShapeDtypeStruct((4,), b)] * (2 if op == "layer_norm" else 1)
            got = jax.eval_shape(lambda *xs: call(op, *xs), x, *given)
            assert got.dtype == jax.eval_shape(lambda *xs: flax(op, *xs), x, *given).dtype, f"x {a}, parameters {b}"


@every_op
def test_dtypes(op, rng, x64):
    """Every pair of x's and the parameters' dtypes, and every result dtype, values and gradients against float64."""
    triples = [(a, b, None) for a in contract.DTYPES for b in contract.DTYPES]
    triples += [(a, "float32", c) for a in contract.DTYPES for c in contract.DTYPES]
    triples += [("bfloat16", "bfloat16", "float32"), ("float16", "bfloat16", "float16")]
    shape, operands = (3, 40), []
    for a, b, c in triples:
        x = jnp.asarray((rng.standard_normal(shape) * 2 + 1).astype(a))
        dtype = jnp.promote_types(a, b) if c is None else c
        dy = jnp.asarray(rng.standard_normal(shape).astype(dtype))
        operands.append((x, *parameters(op, rng, shape[-1:], b), dy))

    @jax.jit
    def all_of_them(operands):
        return [
            value_and_gradients(lambda *xs, c=c: call(op, *xs, dtype=c), xs[:-1], xs[-1])
            for xs, (_, _, c) in zip(operands, triples, strict=True)
        ]

    for triple, xs, got in zip(triples, operands, all_of_them(operands), strict=True):
        assert got[0].dtype == xs[-1].dtype, triple
        rows = [np.asarray(p)[None] for p in xs[1:-1]]
        wanted = closed_form(op, xs[0], *(rows if len(rows) == 2 else (*rows, None)), xs[-1])
        for i, (gotten, target) in enumerate(zip(got, wanted, strict=True)):
            assert i == 0 or gotten.dtype == xs[i - 1].dtype, triple
            rounding = contract.GRADIENT_ROUNDING if i else contract.ROUNDING
            accumulated = "float64" if any(x.dtype == np.float64 for x in xs) else "float32"
            rounding *= coarsest(gotten.dtype, accumulated) / coarsest(gotten.dtype)
            if gotten.dtype == np.float64:
                rounding *= 8
            assert_matches(gotten, target.reshape(gotten.shape), f"{triple}: result {i}", rounding)


@every_op
def test_integers_and_weak_types(op):
    x = jnp.arange(12).reshape(3, 4)
    got = call(op, x, 2 * jnp.ones(4, jnp.int32))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, call(op, x.astype(jnp.float32), 2 * jnp.ones(4)))
    weak = jnp.broadcast_to(jnp.asarray(1.0), (3,))
    assert weak.weak_type and not call(op, weak).weak_type
    scalar = call(op, 2.0, axis=())
    assert scalar.shape == () and scalar.dtype == np.float32 and not scalar.weak_type


@every_op
def test_weak_types_promote_as_in_flax(op):
    weak, scale = jnp.full((2, 4), 3.0), jnp.ones(4, jnp.bfloat16)
    assert weak.weak_type and call(op, weak, scale).dtype == jnp.bfloat16
    assert call(op, weak, scale.astype(jnp.float32)).dtype == np.float32


@every_op
def test_strict_promotion(op, rng):
    """Where jax.numpy would refuse to promote, a given dtype is enough, also for derivatives."""
    x, dx = (jnp.asarray(rng.standard_normal((3, 8)), jnp.bfloat16) for _ in range(2))
    scale = jnp.asarray(rng.standard_normal(8), jnp.float32)
    f = lambda x: call(op, x, scale, dtype=jnp.float32)  # noqa: E731
    wanted = jax.jvp(f, (x,), (dx,)), jax.grad(lambda x: f(x).sum())(x)
    with jax.numpy_dtype_promotion("strict"):
        got = jax.jvp(f, (x,), (dx,)), jax.grad(lambda x: f(x).sum())(x)
        with pytest.raises(ValueError, match="promotion"):
            call(op, x, scale)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


# --- where, residual ---


@pytest.mark.parametrize("mask_shape", [(4, 6), (6,), (4, 1), (1, 1), ()], ids=str)
def test_where(mask_shape, rng):
    """Flax's mask: which positions count in the statistics; all are normalised; a row without any is NaN."""
    x = jnp.asarray(rng.standard_normal((4, 6)) * 2 + 3, jnp.float32)
    mask = rng.random(mask_shape) < 0.6
    mask.flat[0] = True
    if mask_shape == (4, 6):
        mask[:, 1], mask[2] = True, False
    given = parameters("layer_norm", rng, (6,))
    cotangent = rng.standard_normal(x.shape).astype(np.float32)
    ours = lambda *xs: jaxops.layer_norm(*xs, where=mask)  # noqa: E731
    reference = lambda *xs: flax("layer_norm", *xs, where=np.broadcast_to(mask, x.shape))  # noqa: E731
    value, dx, *_ = run(ours, x, *given, cotangent=cotangent)
    wanted = exact(OpCase("layer_norm", ours, reference, None), (x, *given), cotangent)
    empty = ~np.broadcast_to(mask, x.shape).any(axis=1)
    assert np.isnan(np.asarray(value)[empty]).all() and np.isnan(wanted[0][empty]).all()
    assert_matches(value, wanted[0], "value", contract.GRADIENT_ROUNDING)
    assert_matches(np.asarray(dx)[~empty], wanted[1][~empty], "gradient", 2 * contract.GRADIENT_ROUNDING)


def test_where_with_axes_and_dtype(rng):
    x = jnp.asarray(rng.standard_normal((2, 3, 8)), jnp.bfloat16)
    mask = rng.random((3, 1)) < 0.5
    mask[0] = True
    got = jaxops.layer_norm(x, axis=(1, 2), where=mask, dtype=jnp.float32)
    kept = wide(x)[:, mask[:, 0]]
    mean, variance = kept.mean((1, 2), keepdims=True), kept.var((1, 2), keepdims=True)
    assert got.dtype == np.float32
    assert_matches(got, (wide(x) - mean) / np.sqrt(variance + 1e-6))


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_residual(op, dtype, rng):
    """A pair: the normalised sum and the sum; gradients come through both."""
    x, residual = (jnp.asarray(rng.standard_normal((5, 16)).astype(dtype)) for _ in range(2))
    given = parameters(op, rng, (16,))

    def pair(x, residual, *given):
        return call(op, x, *given, residual=residual, dtype=x.dtype)

    y, total = pair(x, residual, *given)
    assert y.dtype == total.dtype == x.dtype
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(y, call(op, total, *given, dtype=x.dtype))

    cotangents = tuple(jnp.asarray(rng.standard_normal(x.shape).astype(dtype)) for _ in range(2))
    got = jax.jit(lambda *xs: jax.vjp(pair, *xs)[1](cotangents))(x, residual, *given)
    rows = [np.asarray(p)[None] for p in given]
    wanted = closed_form(op, total, *(rows if len(rows) == 2 else (*rows, None)), cotangents[0])[1:]
    for gotten in got[:2]:
        assert_matches(gotten, wanted[0] + wide(cotangents[1]), "gradient", contract.GRADIENT_ROUNDING)
    for gotten, target in zip(got[2:], wanted[1:], strict=True):
        rounding = contract.GRADIENT_ROUNDING
        assert_matches(gotten, target.reshape(gotten.shape), "parameter gradient", rounding)


@every_op
def test_residual_promotes(op):
    y, total = call(op, jnp.ones((2, 4), jnp.bfloat16), residual=jnp.ones((2, 4)))
    assert y.dtype == total.dtype == np.float32
    y, total = call(op, jnp.ones((2, 4), jnp.bfloat16), jnp.ones(4), residual=jnp.ones((2, 4), jnp.bfloat16))
    assert (y.dtype, total.dtype) == (np.float32, jnp.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_gradients(dtype, rng):
    """Every form of mask and axes, with and without parameters, against the closed form."""
    shape = (3, 4, 5, 6)
    cases = []
    for mask_shape in ((3, 1, 1, 6), (5, 6), (4, 1, 6), shape, (3, 4, 1, 1)):
        for axes in ((3,), (1, 2), (1, 3), (0, 2), (0, 1, 2, 3)):
            mask = rng.random(mask_shape) < 0.7
            mask[(0,) * mask.ndim] = True
            expanded = [d if a in axes else 1 for a, d in enumerate(shape)]
            cases.append((mask, axes, expanded))
    operands = []
    for _, axes, _ in cases:
        x = jnp.asarray((2 * rng.standard_normal(shape) + 1).astype(dtype))
        given = parameters("layer_norm", rng, [shape[a] for a in axes])
        operands.append((x, *given, jnp.asarray(rng.standard_normal(shape).astype(dtype))))

    @jax.jit
    def run_all(operands):
        return [
            value_and_gradients(
                lambda *v, m=mask, a=axes: jaxops.layer_norm(*v, axis=a, where=m, dtype=dtype), xs[:-1], xs[-1]
            )
            for (mask, axes, _), xs in zip(cases, operands, strict=True)
        ]

    for (mask, axes, expanded), xs, got in zip(cases, operands, run_all(operands), strict=True):
        given = [np.asarray(p).reshape(expanded) for p in xs[1:3]]
        wanted = closed_form("layer_norm", xs[0], *given, xs[3], axes, where=mask)
        empty = np.broadcast_to(~mask, shape).all(axes, keepdims=True)
        what = f"where {mask.shape}, axes {axes}"
        for i in range(2):
            rows = np.broadcast_to(empty, shape)
            assert np.isnan(np.asarray(got[i])[rows].astype(np.float64)).all(), what
            # If few positions count, others can be far outside their spread: errors count in ulp of the row's largest
            # value.
            assert_matches(np.where(rows, 0, got[i]), np.where(rows, 0, wanted[i]), f"{what}: result {i}", 64)
        for i in range(2, 4):
            target = wanted[i].reshape(got[i].shape)
            if not np.isnan(target).any():
                assert_matches(got[i], target, f"{what}: result {i}", 64)


def test_residual_with_where(rng):
    x, residual = (jnp.asarray(rng.standard_normal((3, 8)), jnp.float32) for _ in range(2))
    mask = np.array([1, 1, 0, 1, 0, 1, 1, 0], bool)
    y, total = jaxops.layer_norm(x, where=mask, residual=residual)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(y, jaxops.layer_norm(total, where=mask))


@every_op
@pytest.mark.parametrize("axis", [-1, 0, (0, 2)], ids=str)
def test_either_result_of_residual(op, axis, rng):
    """Gradients through the normalised array alone, the sum alone, and both; the sum alone costs no kernel."""
    shape, axes = (12, 4, 15), np.sort(np.atleast_1d(axis) % 3)
    x, residual, dy, dsum = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(4))
    given = parameters(op, rng, [shape[a] for a in axes])
    expanded = [d if a in axes else 1 for a, d in enumerate(shape)]
    rows = [np.asarray(p).reshape(expanded) for p in given]
    wanted = closed_form(op, x + residual, *(*rows, None)[:2], dy, tuple(axes.tolist()))[1:]

    def total(use_y, use_sum):
        def function(x, residual, *given):
            y, total = call(op, x, *given, axis=axis, residual=residual)
            return (jnp.vdot(y, dy) if use_y else 0.0) + (jnp.vdot(total, dsum) if use_sum else 0.0)

        return jax.grad(function, tuple(range(2 + len(given))))

    for use_y, use_sum in ((True, False), (False, True), (True, True)):
        gradients = total(use_y, use_sum)
        got = jax.jit(gradients)(x, residual, *given)
        target = use_y * wanted[0] + use_sum * wide(dsum)
        for gotten in got[:2]:
            assert_matches(gotten, target, "gradient", contract.GRADIENT_ROUNDING)
        for gotten, parameter in zip(got[2:], wanted[1:], strict=True):
            target = use_y * parameter.reshape(gotten.shape)
            assert_matches(gotten, target, "parameter gradient", 2 * contract.GRADIENT_ROUNDING)
        assert contract.count_launches(gradients, x, residual, *given) == 1 + use_y


@every_op
def test_residual_of_other_dtypes(op, rng, x64):
    """The sum has the dtype to which both promote, gradients the operands'; a wider result widens nothing else."""
    for a, b, result in (
        ("bfloat16", "float32", None),
        ("float32", "bfloat16", "bfloat16"),
        ("float16", "bfloat16", None),
        ("bfloat16", "bfloat16", "float32"),
        ("float32", "float32", "float64"),
        ("float32", "float64", "float32"),
    ):
        x, residual = (jnp.asarray(rng.standard_normal((3, 16)).astype(d)) for d in (a, b))
        pair = functools.partial(call, op, dtype=result)
        (y, total), pullback = jax.vjp(lambda x, r, pair=pair: pair(x, residual=r), x, residual)
        assert (y.dtype, total.dtype) == (result or total.dtype, jnp.promote_types(a, b)), (a, b, result)
        np.testing.assert_array_equal(total, x + residual)
        dx, dresidual = pullback((jnp.ones_like(y), jnp.ones_like(total)))
        assert (dx.dtype, dresidual.dtype) == (a, b)
        wanted = closed_form(op, total, np.ones((1, 16)), None, np.ones((3, 16)))
        slack = 4 if "float64" in (a, b, result) else 1
        assert_matches(
            y, wanted[0], "value", slack * contract.ROUNDING * coarsest(y.dtype, "float32") / coarsest(y.dtype)
        )
        for gotten in (dx, dresidual):
            rounding = slack * contract.GRADIENT_ROUNDING * coarsest(total.dtype) / coarsest(gotten.dtype)
            assert_matches(gotten, wanted[1] + 1, "gradient", max(rounding, slack * contract.GRADIENT_ROUNDING))


@every_op
@pytest.mark.parametrize("axis", [0, "last"])
def test_vmap_with_where_and_residual(op, axis, rng):
    """Any operands mapped: as a loop, values and gradients, in as many launches."""
    last = axis == "last"
    shapes = (
        {"x": (3, 6), "residual": (3, 6), "where": (6,)} if op == "layer_norm" else {"x": (3, 6), "residual": (3, 6)}
    )
    scale = jnp.asarray(1 + 0.3 * rng.standard_normal(6), jnp.float32)

    def both(*xs):
        given = dict(zip(shapes, xs, strict=True))
        x, residual = given.pop("x"), given.pop("residual")
        function = lambda x, r, s: call(op, x, s, residual=r, **given)  # noqa: E731
        value, pullback = jax.vjp(function, x, residual, scale)
        return value, pullback(jax.tree.map(lambda v: jnp.cos(3 * v), value))

    for count in range(1, len(shapes) + 1):
        for mapped in itertools.combinations(shapes, count):
            operands, in_axes = [], []
            for name, shape in shapes.items():
                position = (len(shape) if last else 0) if name in mapped else None
                shape = shape if position is None else (*shape[:position], 4, *shape[position:])
                values = rng.standard_normal(shape).astype(np.float32)
                operands.append(jnp.asarray(values > -1 if name == "where" else values))
                in_axes.append(position)
            batched = jax.vmap(both, in_axes)
            got = jax.tree.leaves(jax.jit(batched)(*operands))
            for i in range(4):
                single = [v if a is None else jnp.take(v, i, a) for v, a in zip(operands, in_axes, strict=True)]
                for value, wanted in zip(got, jax.tree.leaves(jax.jit(both)(*single)), strict=True):
                    np.testing.assert_allclose(value[i], wanted, rtol=2e-5, atol=2e-5, err_msg=str(mapped))
            assert contract.count_launches(batched, *operands) == contract.count_launches(both, *single) == 2


@every_op
def test_only_wanted_parameter_gradients_are_computed(op, rng):
    x, given = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32), parameters(op, rng, (8,))
    wanted = jax.grad(lambda *xs: jnp.sum(call(op, *xs) ** 3), tuple(range(1 + len(given))))(x, *given)
    for count in range(len(wanted)):
        for varied in itertools.combinations(range(1, len(wanted)), count):
            gradients = jax.grad(lambda *xs: jnp.sum(call(op, *xs) ** 3), (0, *varied))
            (line,) = (
                line for line in str(jax.make_jaxpr(gradients)(x, *given)).splitlines() if f"jaxops_{op}_bwd" in line
            )
            assert line.split("=")[0].count("f32[") == 1 + count
            for gotten, i in zip(gradients(x, *given), (0, *varied), strict=True):
                np.testing.assert_allclose(gotten, wanted[i], rtol=1e-5, atol=1e-5)


@every_op
def test_pullbacks_of_one_function(op, rng):
    """A jitted function's pullbacks to different operands, all made before any is called."""
    x, scale = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32), parameters(op, rng, (8,))[0]
    function = jax.jit(lambda x, scale: call(op, x, scale))
    dy = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)
    wanted = jax.vjp(function, x, scale)[1](dy)
    of_x, of_scale = jax.vjp(lambda x: function(x, scale), x)[1], jax.vjp(lambda s: function(x, s), scale)[1]
    np.testing.assert_allclose(of_x(dy)[0], wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_scale(dy)[0], wanted[1], rtol=1e-5, atol=1e-6)


# --- every row placement; parameter gradients over many rows ---


def check_cases(op, cases, dtype, rng, edge=None, sampled=False):
    """cases: (shape of x, normalised axis). The parameter gradients are sums over all the other axes.

    sampled: only some rows along x's first axis have cotangents and are compared.
    """
    with contract.precision_of(dtype):
        parameter = "float64" if dtype == "float64" else "float32"
        operands, samples = [], []
        for shape, axis in cases:
            size = np.sqrt(shape[axis]) if edge is None else edge
            x = edged(rng, shape, dtype, axis, size)
            dy = edged(rng, shape, dtype, axis, 2)
            samples.append(some_rows(rng, shape[0]) if sampled else slice(None))
            if sampled:
                seen = np.isin(np.arange(shape[0]), samples[-1])
                dy = jnp.asarray(np.where(seen.reshape(-1, *[1] * (len(shape) - 1)), dy, np.zeros((), dy.dtype)))
            operands.append((x, *parameters(op, rng, shape[axis : axis + 1 or None], parameter), dy))

        @jax.jit
        def run_all(operands):
            return [
                value_and_gradients(lambda *xs, axis=axis: call(op, *xs, axis=axis, dtype=dtype), xs[:-1], xs[-1])
                for (_, axis), xs in zip(cases, operands, strict=True)
            ]

        results = run_all(operands)
    for (shape, axis), xs, got, rows in zip(cases, operands, results, samples, strict=True):
        xs, got = [*map(np.asarray, xs)], [*map(np.asarray, got)]  # numpy picks rows without a program
        xs, got = (xs[0][rows], *xs[1:-1], xs[-1][rows]), (got[0][rows], got[1][rows], *got[2:])
        expanded = [d if a == axis % len(shape) else 1 for a, d in enumerate(shape)]
        given = [np.asarray(p).reshape(expanded) for p in xs[1:-1]]
        wanted = closed_form(op, xs[0], *(given if len(given) == 2 else (*given, None)), xs[-1], axis)
        rows = xs[0].size // shape[axis]
        # Sizes of terms that cancel: x and its mean in the value; g, mean(g) and x^ mean(g x^) in x's gradient.
        x, g = wide(xs[0]), np.abs(wide(xs[-1]) * given[0]).max(axis, keepdims=True)
        spread = np.sqrt((x.var if op == "layer_norm" else np.square(x).mean)(axis, keepdims=True) + 1e-6)
        condition = np.abs(x).max(axis, keepdims=True) / spread * coarsest(parameter) / coarsest(dtype)
        terms = [np.abs(wanted[0]) + condition * np.abs(given[0]), g / spread * (1 + condition)]
        for i, (gotten, target) in enumerate(zip(got, wanted, strict=True)):
            rounding = (contract.GRADIENT_ROUNDING if i else contract.ROUNDING) + (0.5 * rows**0.5 if i > 1 else 0)
            rounding *= 8 if dtype == "float64" else 1
            what = f"{shape}, axis {axis}: result {i}"
            assert_matches(gotten, target.reshape(gotten.shape), what, rounding, terms=terms[i] if i < 2 else None)


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_row_length(op, dtype, rng, on_gpu):
    check_cases(op, [((3 if n < 10000 else 2, n), -1) for n in lengths(on_gpu, dtype) if n > 2], dtype, rng)
    if on_gpu and dtype != "float64":
        many = [((beyond_few(n, dtype, summed=True), n), -1) for n in COLUMNS_ONCE if 2 < n < 200000]
        # Many for the kernels that compute x's gradient, few for the sums over rows.
        many += [((300, 4096), -1), ((200, 2048), -1), ((200, 3000), -1), ((200, 8192), -1)]
        check_cases(op, many, dtype, rng, sampled=True)


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_strided_row_length(op, dtype, rng, on_gpu):
    check_cases(op, [(shape, 1) for shape in strided(on_gpu, dtype) if shape[1] > 2], dtype, rng)


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_rows(op, dtype, rng):
    """Parameter gradients are sums over few rows, or over chunks of rows: at and around their sizes, strided or not."""
    cases = [((n, 40), -1) for n in (31, 32, 33, 64, 130, 131, 160, 200, 5000)]
    cases += [((10000, 3), -1), ((40, 5000), 0), ((70, 9, 33), 1), ((3, 6, 700), 1)]
    check_cases(op, cases, dtype, rng, edge=1)


@every_op
def test_vmapped_parameters(op, rng):
    """A parameter for each mapped entry, one for all, and nested: values and gradients."""
    batch, rows, n = 3, 70, 12
    x = jnp.asarray(rng.standard_normal((batch, 2, rows, n)), jnp.float32)
    scale = jnp.asarray(1 + 0.3 * rng.standard_normal((batch, 2, n)), jnp.float32)
    dy = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)

    def gradients(x, scale, dy):
        return value_and_gradients(lambda x, s: call(op, x, s), (x, scale), dy)

    for axes in ((0, 0), (None, 0), (0, None), (None, None)):
        given = scale[tuple(slice(None) if a == 0 else 0 for a in axes)]
        nested = jax.vmap(jax.vmap(gradients, (0, axes[1], 0)), (0, axes[0], 0))
        got = jax.jit(nested)(x, given, dy)
        for i in range(batch):
            for j in range(2):
                index = tuple(k for k, a in zip((i, j), axes, strict=True) if a == 0)
                wanted = closed_form(op, x[i, j], np.asarray(given[index])[None], None, dy[i, j])
                for k in range(3):
                    target = wanted[k].reshape(got[k][i, j].shape)
                    assert_matches(got[k][i, j], target, f"{axes}, result {k}", 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "op, mapped",
    [("rms_norm", ["scale"]), *(("layer_norm", names) for names in (["scale"], ["where"], ["scale", "where"]))],
    ids=str,
)
def test_parameters_that_change_along_summed_rows(op, mapped, dtype, rng):
    """A mapped scale or mask, not differentiated, beside parameters for all entries, whose gradients are sums."""
    for shape in [(3, 16), (3, 13), (3, 4, 16), (3, 4, 13), (70, 64), (70, 3, 63), (5, 2, 1000), (5, 2, 1003)]:
        expanded = (shape[0], *[1] * (len(shape) - 2), shape[-1])
        x, dy = (jnp.asarray((2 * rng.standard_normal(shape) + 1).astype(dtype)) for _ in range(2))
        scale, bias = parameters("layer_norm", rng, shape[-1:])
        scale = parameters("rms_norm", rng, (shape[0], shape[-1]))[0] if "scale" in mapped else scale
        mask = rng.random((shape[0], shape[-1])) < 0.7
        mask[:, 0] = True
        shared = {} if "scale" in mapped else {"scale": scale}
        shared |= {"bias": bias} if op == "layer_norm" else {}
        of_entry = {name: {"scale": scale, "where": mask}[name] for name in mapped}

        def function(x, *values, names=tuple(shared), of_entry=of_entry):
            given = dict(zip(names, values, strict=True))
            return jax.vmap(lambda x, own: call(op, x, **given, **own, dtype=dtype))(x, of_entry)

        got = run(function, x, *shared.values(), cotangent=dy)
        where = mask.reshape(expanded) if "where" in mapped else True
        rows = scale.reshape(expanded if "scale" in mapped else (*[1] * (len(shape) - 1), shape[-1]))
        wanted = closed_form(op, x, rows, bias if op == "layer_norm" else None, dy, where=where)
        wanted = dict(zip(("value", "x", "scale", "bias"), wanted, strict=False))
        wanted["bias"] = wide(dy).sum(tuple(range(len(shape) - 1)))
        for name, gotten in zip(("value", "x", *shared), got, strict=True):
            target = wanted[name].reshape(gotten.shape)
            assert_matches(gotten, target, f"{shape}: {name}", contract.GRADIENT_ROUNDING + 0.5 * shape[0] ** 0.5)


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_rows_than_fit_at_once(op, dtype, rng, on_gpu):
    check_cases(op, [(shape, -1) for shape in crowds(jnp.dtype(dtype), on_gpu)], dtype, rng, sampled=True)


@pytest.mark.parametrize("shape", [(4, 256), (256, 256), (3, 7), (8, 10501), (2, 70001)])
@pytest.mark.parametrize("masked", [False, True])
def test_means_whose_squares_are_infinite(shape, masked):
    """Warps and blocks without columns take no part, however far the mean is from their 0."""
    where = jnp.arange(shape[1]) < 5 if masked else None
    y = np.asarray(jaxops.layer_norm(jnp.full(shape, 3e19, jnp.float32), where=where))
    assert np.abs(y).max() < 2  # the mean may be an ulp off, and all deviations with it

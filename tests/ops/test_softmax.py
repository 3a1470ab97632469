"""softmax and log_softmax beyond the contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import contract
from support.logits_cases import INF, NAN, OPS, assert_matches_exact, every_op, exact, run, unbroadcast, wide
from support.ops import value_and_gradients
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
from jaxops import _warnings

# --- axes ---


@every_op
def test_axis(op, rng):
    ours, reference, _ = OPS[op]
    axes = [0, 1, 2, -1, -2, -3, (0,), (0, 1), (0, 2), (1, 2), (-1, 0), [1, 2], (2, 0, 1), None, ()]
    x = jnp.asarray(rng.standard_normal((3, 4, 5)) * 3, jnp.float32)
    cotangent = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)

    @jax.jit
    def every_axis(x, cotangent):
        return [value_and_gradients(functools.partial(ours, axis=axis), (x,), cotangent) for axis in axes]

    for axis, got in zip(axes, every_axis(x, cotangent), strict=True):
        hashable = tuple(axis) if isinstance(axis, list) else axis
        by_jax = functools.cache(
            lambda axis=hashable: run(functools.partial(reference, axis=axis), x, cotangent=cotangent)
        )
        assert_matches_exact(got, exact(op, x, cotangent, axis), f"axis {axis}", reference=by_jax)


@every_op
def test_positional_arguments_are_those_of_jax_nn(op, rng):
    ours, reference, _ = OPS[op]
    x, mask = rng.standard_normal((4, 6)).astype(np.float32), rng.random((4, 6)) < 0.7
    np.testing.assert_allclose(ours(x, 0, mask), reference(x, 0, mask), rtol=1e-6, atol=1e-6)


# --- where ---

WHERE = {
    "same shape": ((3, 4), (3, 4)),
    "a row": ((3, 4), (4,)),
    "a column": ((3, 4), (3, 1)),
    "one": ((3, 4), (1, 1)),
    "fewer axes": ((2, 3, 4), (3, 1)),
    "enlarges x": ((1, 4), (3, 4)),
    "enlarges the rows": ((3, 1), (3, 4)),
    "both enlarge": ((3, 1), (1, 4)),
}


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where(op, dtype, rng):
    ours = OPS[op][0]
    axes = (-1, 0, (0, 1)) if dtype == "float32" else (-1,)
    cases = []
    for what, (shape, mask_shape) in WHERE.items():
        mask = rng.random(mask_shape) < 0.6
        mask.flat[0] = True
        x = jnp.asarray((rng.standard_normal(shape) * 3).astype(dtype))
        joint = np.broadcast_shapes(shape, mask_shape)
        cases += [(what, axis, x, mask, jnp.asarray(rng.standard_normal(joint), dtype)) for axis in axes]

    @jax.jit
    def every_case(operands):
        return [
            value_and_gradients(lambda x, c=case, m=m: ours(x, c[1], m), (x,), dy)
            for case, (x, m, dy) in zip(cases, operands, strict=True)
        ]

    for case, got in zip(cases, every_case([case[2:] for case in cases]), strict=True):
        what, axis, x, mask, cotangent = case
        assert got[0].dtype == x.dtype
        value, gradient, terms = exact(op, x, cotangent, axis, mask)
        gradient, terms = unbroadcast(gradient, x.shape), unbroadcast(terms, x.shape)
        assert_matches_exact(got, (value, gradient, terms), f"{what}, axis {axis}")
        masked = ~np.broadcast_to(mask, value.shape)
        np.testing.assert_array_equal(wide(got[0])[masked], OPS[op][2])
        if x.shape == value.shape:
            np.testing.assert_array_equal(wide(got[1])[masked], 0)


@every_op
def test_where_of_more_axes(op, rng):
    """Axes index the enlarged array. (jax.nn takes maximum and sum over different ones if axis is negative.)"""
    ours, reference, _ = OPS[op]
    x, mask = rng.standard_normal((4, 5)).astype(np.float32), rng.random((3, 4, 5)) < 0.8
    for axis in (0, 1):
        np.testing.assert_allclose(ours(x, axis, mask), reference(x, axis, mask), rtol=1e-5, atol=1e-6)
    for axis in (-1, 2, (0, 2), None):
        assert_matches(ours(x, axis, mask), exact(op, x, np.zeros(mask.shape), axis, mask)[0], f"axis {axis}")


@every_op
def test_where_takes_python_and_numpy_bools(op):
    ours, _, masked = OPS[op]
    x = jnp.array([[1.0, 2.0], [3.0, -1.0]])
    for true in (True, np.bool_(True), np.array(True)):
        np.testing.assert_array_equal(ours(x, where=true), ours(x))
    np.testing.assert_array_equal(ours(x, where=False), np.full((2, 2), masked))


@every_op
@pytest.mark.parametrize("axis", [-1, 0])
def test_masked_entries_may_hold_anything(op, axis):
    """NaN and infinities under the mask touch neither values nor gradients."""
    x = np.array([[1, NAN, 2, INF], [-INF, 0, NAN, 1], [NAN, INF, -INF, NAN]], np.float32)
    mask = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
    x, mask = (x, mask) if axis == -1 else (x.T, mask.T)
    cotangent = np.linspace(-1, 2, 12, dtype=np.float32).reshape(x.shape)
    got = run(lambda x: OPS[op][0](x, axis, mask), x, cotangent=cotangent)
    assert_matches_exact(got, exact(op, np.where(mask, x, 0), cotangent, axis, mask))
    np.testing.assert_array_equal(np.asarray(got[0])[~mask], OPS[op][2])
    np.testing.assert_array_equal(np.asarray(got[1])[~mask], 0)


@every_op
def test_vmap_over_where_scale_and_bias(op, rng):
    ours = OPS[op][0]
    x, bias = (jnp.asarray(rng.standard_normal((3, 4, 5)), jnp.float32) for _ in range(2))
    scale, mask = jnp.asarray([0.5, -1.0, 2.0]), jnp.asarray(rng.random((3, 5)) < 0.6)

    def call(x, mask, scale, bias):
        return ours(x, where=mask, scale=scale, bias=bias)

    got = jax.vmap(call)(x, mask, scale, bias)
    for i in range(3):
        np.testing.assert_allclose(got[i], call(x[i], mask[i], scale[i], bias[i]), rtol=1e-5, atol=1e-6)


# --- NaN and infinities ---


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_rows_with_nan_and_infinities(op, dtype, axis):
    ours, reference, _ = OPS[op]
    rows = np.array(
        [
            [0.5, -INF, 1.5, -INF, -1.0],
            [-INF, -INF, -INF, -INF, 2.0],
            [-INF, -INF, -INF, -INF, -INF],
            [1.0, INF, 2.0, 3.0, 0.0],
            [INF, INF, INF, INF, INF],
            [-INF, INF, 0.0, 1.0, 2.0],
            [1.0, 2.0, NAN, 3.0, 4.0],
            [NAN, -INF, INF, 0.0, 1.0],
            [0.0, 1.0, 2.0, 3.0, 4.0],
        ]
    ).astype(dtype)
    x = jnp.asarray(rows if axis == -1 else rows.T)
    cotangent = jnp.asarray(np.linspace(-1, 1, x.size).reshape(x.shape), dtype)
    got = run(lambda x: ours(x, axis), x, cotangent=cotangent)
    by_jax = run(lambda x: reference(x, axis), x, cotangent=cotangent)
    assert_matches_exact(got, exact(op, x, cotangent, axis))
    for i in range(2):
        np.testing.assert_array_equal(np.isnan(wide(got[i])), np.isnan(wide(by_jax[i])))
    ordered = wide(got[0]) if axis == -1 else wide(got[0]).T
    np.testing.assert_array_equal(np.isnan(ordered).all(axis=1), [0, 0, 1, 1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(np.isnan(ordered).any(axis=1), [0, 0, 1, 1, 1, 1, 1, 1, 0])


EXTREMES = {
    "float32": [
        [1e4, 1e4 + 1, 1e4 - 2, 1e4 + 0.5],
        [-1e4, -1e4 + 1, -1e4 - 2, -1e4 + 0.5],
        [3e38, -3e38, 0, 1],
        [-3e38, -3e38, -3.3e38, -3e38],
        [3e38, 3e38, 3e38, 3e38],
        [1e-40, -1e-40, 2e-45, 0],
        [0, -87, -88, -103],
        [0, -104, -200, -1e30],
        [88, 89, 90, -90],
        [1, 1 + 2**-23, 1, 1],
    ],
    "bfloat16": [[1e4, 1e4 + 64, 1e4 - 64, 1e4], [3e38, -3e38, 0, 1], [1e-40, -1e-40, 0, 0], [0, -88, -104, -1e30]],
    "float16": [[1e4, 1e4 + 8, 1e4 - 8, 1e4], [65504, -65504, 0, 1], [6e-8, -6e-8, 3e-5, 0], [0, -10, -17, -20]],
    "float64": [[1e4, 1e4 + 1, 1e4 - 2, 1e4], [1e308, -1e308, 0, 1], [5e-324, -1e-310, 0, 0], [0, -700, -745, -800]],
}


@every_op
@pytest.mark.parametrize("dtype", EXTREMES)
@pytest.mark.parametrize("axis", [-1, 0])
def test_extreme_inputs(op, dtype, axis):
    with contract.precision_of(dtype):
        rows = np.array(EXTREMES[dtype], np.float64).astype(dtype)
        x = jnp.asarray(rows if axis == -1 else rows.T)
        cotangent = jnp.asarray(np.resize([0.5, -1.0, 0.25, 2.0, 1.0], x.shape), dtype)
        got = run(lambda x: OPS[op][0](x, axis), x, cotangent=cotangent)
    wanted = exact(op, x, cotangent, axis)
    for i, row in enumerate(EXTREMES[dtype]):
        pick = (i, slice(None)) if axis == -1 else (slice(None), i)
        ours, target = ([np.asarray(values)[pick] for values in results] for results in (got, wanted))
        assert_matches_exact(ours, target, str(row), 8 if dtype == "float64" else 1)


# --- dtypes ---


@every_op
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_integers_promote(op, dtype):
    x = jnp.array([[0, 1, 5], [127, 120, 3]], dtype)
    got = OPS[op][0](x)
    assert got.dtype == np.float32
    with np.errstate(invalid="ignore"):
        assert OPS[op][1](x).dtype == np.float32
    assert_matches(got, exact(op, x, np.zeros(x.shape))[0])


@every_op
def test_integers_promote_to_float64(op, x64):
    for dtype in ("int8", "int32", "int64"):
        x = jnp.array([[0, 1, 5], [127, 120, 3]], dtype)
        got = OPS[op][0](x)
        with np.errstate(invalid="ignore"):
            assert got.dtype == OPS[op][1](x).dtype
        assert_matches(got, exact(op, x, np.zeros(x.shape))[0], rounding=16)


@every_op
def test_complex_runs_on_xla(op, monkeypatch):
    monkeypatch.setattr(_warnings, "_said", set())
    ours, reference, _ = OPS[op]
    x = jnp.array([[1 + 2j, 0.5, -1j], [0, 3, 1 - 1j]], jnp.complex64)
    with pytest.warns(jaxops.FallbackWarning, match=f"{op} of complex64"):
        got = ours(x)
    np.testing.assert_array_equal(got, reference(x))
    mask = np.array([True, True, False])
    np.testing.assert_array_equal(ours(x, where=mask), reference(x, where=mask))


@every_op
def test_weak_types_and_python_scalars(op):
    ours, reference, _ = OPS[op]
    for x in (3.0, 3, np.float32(3), jnp.array(3.0)):
        for axis in (None, ()):
            got = ours(x, axis=axis)
            assert got.shape == () and got.dtype == np.float32 and not got.weak_type
            with np.errstate(invalid="ignore"):
                np.testing.assert_array_equal(got, reference(x, axis=axis))
    weak = jnp.broadcast_to(jnp.asarray(1.0), (3,))
    assert weak.weak_type and not ours(weak).weak_type and not jax.jit(ours)(weak).weak_type
    assert not ours(weak, scale=2.0, bias=1.0, where=True).weak_type


@every_op
def test_result_dtype(op, rng, x64):
    """Every pair of dtypes, values within the result dtype's rounding; gradients have x's."""
    pairs = [(a, b) for a in contract.DTYPES for b in contract.DTYPES]
    shape = (3, 37)
    xs = [jnp.asarray((rng.standard_normal(shape) * 3).astype(a)) for a, _ in pairs]
    dys = [jnp.asarray(rng.standard_normal(shape).astype(b)) for _, b in pairs]

    @jax.jit
    def call(xs, dys):
        return [
            value_and_gradients(lambda x, b=b: OPS[op][0](x, dtype=b), (x,), dy)
            for x, dy, (_, b) in zip(xs, dys, pairs, strict=True)
        ]

    for (a, b), x, dy, (value, gradient) in zip(pairs, xs, dys, call(xs, dys), strict=True):
        assert (value.dtype, gradient.dtype) == (b, a)
        wanted, terms = exact(op, x, dy)[:2], exact(op, x, dy)[2]
        slack = 8 if "float64" in (a, b) else 1
        assert_matches(value, wanted[0], f"{a} to {b}", slack * contract.ROUNDING)
        slack *= contract.GRADIENT_ROUNDING * coarsest(a, b) / coarsest(a)
        assert_matches(gradient, wanted[1], f"gradient of {a} to {b}", slack, terms=terms)


@every_op
def test_axes_as_an_array(op, rng):
    x = jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32)
    np.testing.assert_array_equal(OPS[op][0](x, np.array([0, 2])), OPS[op][0](x, (0, 2)))


@every_op
def test_strict_promotion(op, rng):
    """Gradients cast as they need to, where jax.numpy would refuse to promote."""
    x = jnp.asarray(rng.standard_normal((3, 8)), jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal((3, 8)), jnp.float32)
    gradients = jax.grad(lambda x, b: jnp.square(OPS[op][0](x, bias=b)).sum(), (0, 1))
    wanted = gradients(x, bias)
    with jax.numpy_dtype_promotion("strict"):
        jax.tree.map(np.testing.assert_array_equal, gradients(x, bias), wanted)


@every_op
def test_float32_results_of_bfloat16_logits_are_not_rounded(op, rng):
    x = jnp.asarray(rng.standard_normal((5, 200)) * 3, jnp.bfloat16)
    assert_matches(OPS[op][0](x, dtype=jnp.float32), exact(op, x, np.zeros(x.shape))[0])


# --- scale, bias, causal ---


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale(op, dtype, rng):
    x = jnp.asarray((rng.standard_normal((4, 33)) * 2).astype(dtype))
    cotangent = jnp.asarray(rng.standard_normal(x.shape).astype(dtype))
    scales = [0.5, -1.5, 2, 0, np.float32(0.125), np.float64(0.25), np.int32(3), jnp.asarray(0.75, jnp.bfloat16)]
    static = jax.jit(lambda x: [OPS[op][0](x, scale=s) for s in scales])(x)
    traced = jax.jit(
        lambda x, scales: [value_and_gradients(lambda x, s: OPS[op][0](x, scale=s), (x, s), cotangent) for s in scales]
    )(x, [jnp.asarray(s, jnp.float32) for s in scales])
    for s, value, got in zip(scales, static, traced, strict=True):
        wanted, gradient, terms = exact(op, wide(x) * float(s), cotangent)
        assert value.dtype == got[0].dtype == got[1].dtype == x.dtype and got[2].dtype == np.float32
        assert_matches_exact([value], (wanted, None, None), f"scale {s}")
        scaled = wanted, gradient * float(s), terms * abs(float(s))
        assert_matches_exact(got[:2], scaled, f"traced scale {s}")
        tolerance = 8 * float(jnp.finfo(dtype).eps) * (terms * np.abs(wide(x))).sum()
        total = (gradient * wide(x)).sum()
        np.testing.assert_allclose(got[2], total, rtol=0, atol=tolerance, err_msg=f"gradient of scale {s}")


@every_op
def test_bias(op, rng):
    shapes = [((2, 3, 4), b) for b in ((), (4,), (3, 1), (1, 3, 4), (2, 1, 1), (2, 3, 4), (5, 2, 3, 4))]
    shapes += [((3, 1), (1, 4)), ((1, 4), (3, 4)), ((4,), (3, 4))]
    operands = [
        tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (a, b, np.broadcast_shapes(a, b)))
        for a, b in shapes
    ]

    @jax.jit
    def call(operands):
        return [value_and_gradients(lambda x, b: OPS[op][0](x, bias=b), (x, b), dy) for x, b, dy in operands]

    for (x, bias, dy), got in zip(operands, call(operands), strict=True):
        what = f"x {x.shape}, bias {bias.shape}"
        value, gradient, terms = exact(op, wide(x) + wide(bias), dy)
        for gotten, operand in zip(got[1:], (x, bias), strict=True):
            sums = (unbroadcast(values, operand.shape) for values in (gradient, terms))
            assert_matches_exact([got[0], gotten], (value, *sums), what)


@every_op
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")], ids=str)
def test_bias_dtype(op, dtypes, rng):
    """Logits are f32 inside; the result has x's dtype whatever the bias has; gradients have the operands'."""
    x, bias = (jnp.asarray(rng.standard_normal((3, 20)).astype(d)) for d in dtypes)
    cotangent = jnp.asarray(rng.standard_normal(x.shape).astype(x.dtype))
    got = run(lambda x, b: OPS[op][0](x, bias=b), x, bias, cotangent=cotangent)
    assert [g.dtype for g in got] == [x.dtype, x.dtype, bias.dtype]
    value, gradient, terms = exact(op, wide(x) + wide(bias), cotangent)
    assert_matches(got[0], value)
    for gotten in got[1:]:
        rounding = contract.GRADIENT_ROUNDING * coarsest(*dtypes) / coarsest(gotten.dtype)
        assert_matches(gotten, gradient, "gradient", rounding, terms=terms)


@every_op
def test_bias_of_minus_infinity_masks(op):
    x = jnp.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    bias = jnp.array([[0.0, -INF, 0.0], [-INF, -INF, -INF]])
    got = OPS[op][0](x, bias=bias)
    assert_matches(got[0], exact(op, x, x, mask=np.isfinite(bias))[0][0])
    assert np.isnan(got[1]).all()


def test_causal_is_that_of_dot_product_attention(rng):
    """With unit keys and values the logits are the queries, and attention's result is its probabilities."""
    sizes = [(6, 6), (5, 9), (9, 5), (1, 4), (4, 1)]
    several = [rng.standard_normal((2, queries, 3, keys)).astype(np.float32) for queries, keys in sizes]
    units = [np.broadcast_to(np.eye(keys, dtype=np.float32)[None, :, None], (2, keys, 3, keys)) for _, keys in sizes]

    @jax.jit
    def by_jax(several, units):
        return [
            jax.nn.dot_product_attention(logits, unit, unit, scale=1.0, is_causal=True)
            for logits, unit in zip(several, units, strict=True)
        ]

    with jax.default_matmul_precision("highest"):
        results = by_jax(several, units)
    for size, logits, wanted in zip(sizes, several, results, strict=True):
        logits, wanted = (np.moveaxis(np.asarray(x), 1, 2) for x in (logits, wanted))  # [batch, heads, queries, keys]
        got = jaxops.softmax(logits, causal=True)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=str(size))
        with np.errstate(divide="ignore"):
            got, logarithms = jaxops.log_softmax(logits, causal=True), np.log(wide(wanted))
        np.testing.assert_allclose(got, logarithms, rtol=1e-5, atol=1e-5, err_msg=str(size))


@every_op
@pytest.mark.parametrize("axis", [-1, -2, (-1, -2)], ids=str)
def test_causal(op, axis, rng):
    x = jnp.asarray(rng.standard_normal((2, 5, 7)), jnp.float32)
    cotangent = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    mask = np.tril(np.ones((5, 7), bool))
    got = run(lambda x: OPS[op][0](x, axis, causal=True), x, cotangent=cotangent)
    wanted = exact(op, x, cotangent, axis, mask)
    assert_matches_exact(got, wanted)
    hidden = np.broadcast_to(~mask, x.shape)
    for value, target in zip(got, wanted[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(value)[hidden], target[hidden])
    np.testing.assert_array_equal(OPS[op][0](x, axis, causal=np.bool_(False)), OPS[op][0](x, axis))


@every_op
@pytest.mark.parametrize("axis", [-1, (-2, -1), 0], ids=str)
def test_all_options_together(op, axis, rng):
    x = jnp.asarray(rng.standard_normal((2, 1, 6, 7)), jnp.bfloat16)
    scale = jnp.asarray(0.7, jnp.float32)
    bias = jnp.asarray(rng.standard_normal((3, 6, 7)), jnp.float32)
    where = rng.random((2, 1, 1, 7)) < 0.7
    where[0], where[1, ..., 0] = False, True
    mask = where & np.tril(np.ones((6, 7), bool))
    cotangent = jnp.asarray(rng.standard_normal((2, 3, 6, 7)), jnp.float32)

    def call(x, scale, bias):
        return OPS[op][0](x, axis, where, scale=scale, bias=bias, causal=True, dtype=jnp.float32)

    value, dx, dscale, dbias = run(call, x, scale, bias, cotangent=cotangent)
    assert (value.dtype, dx.dtype, dscale.dtype, dbias.dtype) == (np.float32, jnp.bfloat16, np.float32, np.float32)
    wanted, gradient, terms = exact(op, wide(x) * float(scale) + wide(bias), cotangent, axis, mask)
    for gotten, factor in ((dx, float(scale)), (dbias, 1.0)):
        sums = (unbroadcast(values * factor, gotten.shape) for values in (gradient, terms))
        assert_matches_exact([value, gotten], (wanted, *sums))
    tolerance = 1e-6 * (terms * np.abs(wide(x))).sum()
    np.testing.assert_allclose(dscale, (gradient * wide(x)).sum(), rtol=0, atol=tolerance)


# --- every row placement ---


def check_placements(op, shapes, axis, dtype, rng, sampled=False):
    """sampled: only some rows along the first axis are compared."""
    with contract.precision_of(dtype):
        xs = [edged(rng, shape, dtype, axis, 4 + np.log(shape[axis])) for shape in shapes]
        dys = [edged(rng, shape, dtype, axis, 2) for shape in shapes]

        @jax.jit
        def call(xs, dys):
            return [value_and_gradients(lambda x: OPS[op][0](x, axis), (x,), dy) for x, dy in zip(xs, dys, strict=True)]

        results = call(xs, dys)
    # Summing many small terms beside the large ones at the edges costs some rounding on top, and the summed
    # exponentials are within 2 ulp and half their argument's ulp: the more draws, the larger.
    for x, dy, got in zip(xs, dys, results, strict=True):
        if sampled:
            rows = some_rows(rng, x.shape[0])
            x, dy, *got = (np.asarray(values)[rows] for values in (x, dy, *got))  # numpy compiles nothing for it
        assert_matches_exact(got, exact(op, x, dy, axis), f"{x.shape}", {"float64": 8, "float32": 2.5}.get(dtype, 2))


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_row_length(op, dtype, rng, on_gpu):
    check_placements(op, [(3 if n < 10000 else 2, n) for n in lengths(on_gpu, dtype)], -1, dtype, rng)
    if on_gpu and dtype != "float64":
        many = [(beyond_few(n, dtype), n) for n in COLUMNS_ONCE if n < 10000]
        check_placements(op, many, -1, dtype, rng, sampled=True)


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_strided_row_length(op, dtype, rng, on_gpu):
    check_placements(op, strided(on_gpu, dtype), 1, dtype, rng)


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_rows_than_fit_at_once(op, dtype, rng, on_gpu):
    check_placements(op, crowds(jnp.dtype(dtype), on_gpu), -1, dtype, rng, sampled=True)
    outer = 9 if on_gpu else 1
    check_placements(op, [(outer, 600, 1024), (2 * outer, 1025, 512), (outer, 3000, 136)], 1, dtype, rng)


@every_op
def test_first_axis_and_axis_tuples(op, rng):
    """The same rows through the first axis, several adjacent axes and axes apart."""
    cases = [
        ((300, 70), 0),
        ((9, 33, 40), (0, 1)),
        ((5, 6, 7, 8), (1, 2)),
        ((5, 6, 7, 8), (0, 2)),
        ((4, 9, 65), (0, 2)),
    ]
    xs = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape, _ in cases]
    dys = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape, _ in cases]

    @jax.jit
    def call(xs, dys):
        return [
            value_and_gradients(lambda x, axis=axis: OPS[op][0](x, axis), (x,), dy)
            for x, dy, (_, axis) in zip(xs, dys, cases, strict=True)
        ]

    for x, dy, (_, axis), got in zip(xs, dys, cases, call(xs, dys), strict=True):
        assert_matches_exact(got, exact(op, x, dy, axis), f"{x.shape}, axis {axis}")

"""Scale, bias, where and causal in softmax and log_softmax, in every combination, forward and backward."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import contract
from support.logits_cases import INF, NAN, OPS, assert_matches_exact, every_op, exact, run, unbroadcast, wide
from support.ops import value_and_gradients
from support.pairs import pairwise
from support.row_cases import assert_matches, beyond_few, coarsest

import jaxops

SHAPE = (2, 3, 5, 7)  # batch, heads, queries, keys
CAUSAL = np.tril(np.ones(SHAPE[2:], bool))

#: Bias shapes, as in attention: relative positions, a slope for each head, padding, and every other form.
BIAS = [(1, 3, 5, 7), (5, 7), (3, 1, 1), (2, 1, 1, 7), (7,), (2, 3, 1, 7), (2, 3, 5, 1), (2, 3, 5, 7), ()]
WHERE = [(2, 1, 1, 7), (5, 7), (2, 1, 5, 7), (2, 3, 5, 7), (2, 3, 5, 1), (3, 1, 1)]


def draw_mask(rng, shape):
    return rng.random(shape) < 0.7


def rounding_of(logits):
    """The relative error after exp if the logits are rounded to f32."""
    return 0.5 * float(np.abs(logits).max()) * coarsest("float32")


def options_of(op, axis, where, causal, names):
    """The op as a function of x and the named operands."""

    def call(x, *values):
        return OPS[op][0](x, axis, where, causal=causal, **dict(zip(names, values, strict=True)))

    return call


def check(op, got, operands, cotangent, names, axis=-1, where=None, causal=False, what=""):
    """Compares value and gradients, for x and the named operands, with float64."""
    x, *values = operands
    given = dict(zip(names, values, strict=True))
    scale, bias = (wide(given.get(name, default)) for name, default in (("scale", 1.0), ("bias", 0.0)))
    mask = (True if where is None else where) & (CAUSAL if causal else np.True_)
    masked_x = np.where(mask, wide(x), 0)
    logits = np.where(mask, masked_x * scale + bias, 0)
    value, gradient, terms = exact(op, logits, cotangent, axis, mask)
    coarse = coarsest(x.dtype, *(b.dtype for name, b in given.items() if name == "bias"))
    rounded = rounding_of(logits)
    assert_matches(got[0], value, f"{what} value", contract.ROUNDING + rounded / coarsest(x.dtype))
    for name, gotten, operand in zip(("x", *names), got[1:], operands, strict=True):
        assert gotten.shape == operand.shape and gotten.dtype == operand.dtype, (what, name)
        if name == "scale":
            tolerance = 8 * coarse * (terms * np.abs(masked_x)).sum()
            np.testing.assert_allclose(gotten, (gradient * masked_x).sum(), rtol=0, atol=tolerance, err_msg=what)
            continue
        factor = scale if name == "x" else 1.0
        target, sizes = (unbroadcast(v, operand.shape) for v in (gradient * factor, terms * np.abs(factor)))
        rounding = (contract.GRADIENT_ROUNDING * coarse + rounded) / coarsest(gotten.dtype)
        assert_matches(gotten, target, f"{what} gradient of {name}", rounding, terms=sizes)


def draw(rng, names, dtype="float32", bias_shape=(1, 3, 5, 7), bias_dtype="float32", shape=SHAPE):
    values = {"scale": np.float32(0.6), "bias": rng.standard_normal(bias_shape).astype(bias_dtype)}
    x = jnp.asarray((2 * rng.standard_normal(shape)).astype(dtype))
    return x, *(jnp.asarray(values[name]) for name in names)


# --- values and gradients ---


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_combination(op, dtype, rng):
    """Scale, bias, where and causal: each alone, and all their sets; in bfloat16 every two of them."""
    cases, operands, cotangents = [], [], []
    combine = itertools.product if dtype == "float32" else pairwise
    options = ((), ("scale",), ("bias",), ("scale", "bias")), (None, (2, 1, 1, 7), (5, 7)), (False, True)
    for names, where_shape, causal in combine(*options):
        where = None if where_shape is None else draw_mask(rng, where_shape)
        cases.append((names, where, causal))
        operands.append(draw(rng, names, dtype))
        cotangents.append(jnp.asarray(rng.standard_normal(SHAPE).astype(dtype)))

    @jax.jit
    def call(operands, cotangents):
        return [
            value_and_gradients(options_of(op, -1, where, causal, names), xs, dy)
            for (names, where, causal), xs, dy in zip(cases, operands, cotangents, strict=True)
        ]

    results = call(operands, cotangents)
    for (names, where, causal), xs, dy, got in zip(cases, operands, cotangents, results, strict=True):
        shape = None if where is None else where.shape
        check(op, got, xs, dy, names, -1, where, causal, f"{names}, where {shape}, causal {causal}")


@every_op
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_masks_of_rows_of_many_lengths(op, dtype, rng, on_gpu):
    """Positive and negative scales and zero; masked entries, in one row all entries, are infinite or NaN.

    Every length with every option on a GPU, whose kernels differ by length; every two of them on the CPU.
    """
    aligned = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 40000)
    unaligned = (5, 30, 61, 99, 197, 333, 577, 1001, 2047, 4095, 8191, 9001)
    shapes = [(20, columns) for columns in (*aligned, *unaligned)] + [(600, 577)]
    shapes += [(20, 1100), (20, 9004)]  # whole packs with half as many elements
    shapes += [(beyond_few(columns, dtype), columns) for columns in (64, 256, 512, 1024, 2048, 4096)]
    shapes = shapes if on_gpu else [(20, 64), (99, 99), (20, 333)]
    cases, operands = [], []
    combine = itertools.product if on_gpu else pairwise
    for shape, scale, biased, causal in combine(shapes, (0.6, -0.6, 0.0), (False, True), (False, True)):
        mask = rng.random(shape) < 0.7
        mask[7] = False
        seen = mask & np.tril(np.ones_like(mask)) if causal else mask
        x, bias, dy = (rng.standard_normal(mask.shape).astype(dtype) for _ in range(3))
        for values in (x, bias):
            values[~seen] = rng.choice([NAN, INF, -INF], np.count_nonzero(~seen))
        cases.append((scale, biased, causal, seen))
        operands.append([jnp.asarray(values) for values in (x, bias, dy, mask)])

    @jax.jit
    def call(operands):
        return [
            value_and_gradients(
                lambda x, c=(scale, causal), b=bias if biased else None, m=mask: OPS[op][0](
                    x, where=m, scale=c[0], bias=b, causal=c[1]
                ),
                (x,),
                dy,
            )
            for (scale, biased, causal, _), (x, bias, dy, mask) in zip(cases, operands, strict=True)
        ]

    for (scale, biased, causal, seen), (x, bias, dy, _), got in zip(cases, operands, call(operands), strict=True):
        what = f"{seen.shape[-1]} columns, scale {scale}, bias {biased}, causal {causal}"
        with np.errstate(invalid="ignore"):
            logits = np.where(seen, wide(x) * scale + (wide(bias) if biased else 0), 0)
        value, gradient, terms = exact(op, logits, dy, -1, seen)
        rounded = rounding_of(logits) / coarsest(dtype)
        assert_matches(got[0], value, what, contract.ROUNDING + rounded)
        rounding = contract.GRADIENT_ROUNDING + rounded
        assert_matches(got[1], gradient * scale, f"{what}, gradient", rounding, terms=terms * abs(scale))


AXES = (-1, (-2, -1), 1, (1, 3))


@every_op
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16", "float32"), ("float32", "bfloat16")], ids=str)
def test_bias_gradient(op, dtypes, rng):
    """Each bias form along every kind of axes, with and without the other options; of other dtypes each of them."""
    cases = pairwise(BIAS, AXES, (False, True))
    if set(dtypes) != {"float32"}:
        cases = [(shape, AXES[i % len(AXES)], i % 2 == 0) for i, shape in enumerate(BIAS)]
    given = [("scale", "bias") if options else ("bias",) for *_, options in cases]
    operands = [draw(rng, names, dtypes[0], shape, dtypes[1]) for (shape, *_), names in zip(cases, given, strict=True)]
    wheres = [draw_mask(rng, (2, 1, 1, 7)) if options else None for *_, options in cases]
    cotangents = [jnp.asarray(rng.standard_normal(SHAPE).astype(dtypes[0])) for _ in cases]

    @jax.jit
    def call(operands, cotangents):
        return [
            value_and_gradients(options_of(op, axis, where, options, names), xs, dy)
            for (_, axis, options), names, where, xs, dy in zip(cases, given, wheres, operands, cotangents, strict=True)
        ]

    results = call(operands, cotangents)
    for (shape, axis, options), names, where, xs, dy, got in zip(
        cases, given, wheres, operands, cotangents, results, strict=True
    ):
        check(op, got, xs, dy, names, axis, where, options, f"bias {shape} of {names}, axis {axis}")


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_gradient_over_many_rows(op, dtype, rng):
    """Short rows: many to a group, and many groups; and longer ones that are no whole packs."""
    cases = [((70, 13, 7, 3), (1, 13, 7, 3)), ((300, 6, 8), (6, 8)), ((80, 11, 33), (11, 33)), ((3, 900, 5), (900, 5))]
    cases += [((64, 2, columns), (2, columns)) for columns in (129, 333, 1501, 3001)]
    operands = [draw(rng, ("bias",), dtype, bias, shape=shape) for shape, bias in cases]
    cotangents = [jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape, _ in cases]

    @jax.jit
    def call(operands, cotangents):
        function = options_of(op, -1, None, False, ("bias",))
        return [value_and_gradients(function, xs, dy) for xs, dy in zip(operands, cotangents, strict=True)]

    for xs, dy, got in zip(operands, cotangents, call(operands, cotangents), strict=True):
        check(op, got, xs, dy, ("bias",), what=f"{xs[0].shape}")


@every_op
@pytest.mark.parametrize("axis", [-1, 0, (0, 2), (1, 3), None], ids=str)
def test_where_forms(op, axis, rng):
    """Every mask form along adjacent axes, axes apart and all axes; bias and a constant scale in the kernel."""
    x, bias = draw(rng, ("bias",), bias_shape=(2, 1, 1, 7))
    masks = [draw_mask(rng, shape) for shape in WHERE]
    cotangent = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32)

    @jax.jit
    def call(x, bias, dy):
        return [
            value_and_gradients(
                lambda x, b, m=mask: OPS[op][0](x, axis, m, scale=0.75, bias=b, causal=True), (x, bias), dy
            )
            for mask in masks
        ]

    for mask, got in zip(masks, call(x, bias, cotangent), strict=True):
        value, gradient, terms = exact(op, wide(x) * 0.75 + wide(bias), cotangent, axis, mask & CAUSAL)
        assert_matches_exact(got[:2], (value, 0.75 * gradient, terms), f"where {mask.shape}", 2)
        sums = (unbroadcast(values, bias.shape) for values in (gradient, terms))
        assert_matches_exact((got[0], got[2]), (value, *sums), f"where {mask.shape}, bias", 2)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives(op, rng, x64):
    """Compiled: XLA may round x scale + bias in another way than for the row's maximum."""
    x, bias, scale = rng.standard_normal((2, 3, 4)), rng.standard_normal((3, 4)), 0.7
    weights, tangents = rng.standard_normal((2, 3, 4)), (np.cos(3 * x), np.sin(bias), 0.3)

    def moved(function):
        total = lambda x, bias, scale: jnp.sum(jnp.sin(function(x, bias, scale)) * weights)  # noqa: E731
        gradients = jax.grad(total, (0, 1, 2))
        return jax.jit(lambda *xs: jax.jvp(gradients, xs, tangents)[1])(x, bias, scale)

    got = moved(lambda x, bias, scale: OPS[op][0](x, scale=scale, bias=bias))
    for a, b in zip(got, moved(lambda x, bias, scale: OPS[op][1](x * scale + bias)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@every_op
def test_float64(op, rng, x64):
    names = "scale", "bias"
    mask = draw_mask(rng, (2, 1, 1, 7))
    for dtypes in (("float64", "float64"), ("float64", "float32"), ("float32", "float64")):
        x, _, bias = draw(rng, names, dtypes[0], (1, 3, 5, 7), dtypes[1])
        scale, dy = jnp.asarray(0.6, dtypes[0]), jnp.asarray(rng.standard_normal(SHAPE).astype(dtypes[0]))
        got = run(options_of(op, -1, mask, True, names), x, scale, bias, cotangent=dy)
        assert got[0].dtype == x.dtype and got[3].dtype == bias.dtype
        value, gradient, terms = exact(op, wide(x) * wide(scale) + wide(bias), dy, -1, mask & CAUSAL)
        rounding = 16 if dtypes == ("float64", "float64") else 16 * coarsest(*dtypes) / coarsest(x.dtype)
        assert_matches(got[0], value, "value", rounding)
        assert_matches(got[1], gradient * wide(scale), "dx", rounding, terms=terms)
        target, sizes = (unbroadcast(values, bias.shape) for values in (gradient, terms))
        assert_matches(got[3], target, "dbias", 16 * coarsest(*dtypes) / coarsest(bias.dtype), terms=sizes)


@every_op
def test_scalars_and_no_axes(op):
    """Every element is its own row."""
    x, bias = jnp.asarray([[1.0, -2.0, NAN], [INF, 0.0, 3.0]]), jnp.asarray([0.5, 1.0, 2.0])
    where = np.array([[True], [False]])
    got = run(
        lambda x, b: OPS[op][0](x, (), where, bias=b, scale=2.0, causal=True), x, bias, cotangent=jnp.ones((2, 3))
    )
    visible, masked = {"softmax": (1.0, 0.0), "log_softmax": (0.0, -INF)}[op]
    np.testing.assert_array_equal(got[0], [[visible, masked, masked], [masked] * 3])
    np.testing.assert_array_equal(got[1], np.zeros((2, 3)))
    np.testing.assert_array_equal(got[2], np.zeros(3))
    value, dx, dscale = run(lambda x, s: OPS[op][0](x, None, scale=s), 3.0, 2.0, cotangent=1.0)
    assert (float(value), float(dx), float(dscale)) == (visible, 0.0, 0.0)


@every_op
def test_long_rows(op, rng):
    """Gradients for rows that one block holds, and for longer ones."""
    for columns in (32768, 32769):
        x, bias = draw(rng, ("bias",), bias_shape=(columns,), shape=(3, columns))
        mask, cotangent = draw_mask(rng, (3, 1)), jnp.asarray(rng.standard_normal((3, columns)), jnp.float32)
        mask[0] = True
        got = run(lambda x, b, m=mask: OPS[op][0](x, where=m, bias=b), x, bias, cotangent=cotangent)
        check(op, got, (x, bias), cotangent, ("bias",), where=mask, what=f"{columns} columns")


@every_op
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(1, 5003, 8), (2, 4099, 3)], ids=str)
def test_long_rows_across(op, dtype, shape, rng):
    """A row over several blocks, with options and without."""
    x, scale = draw(rng, ("scale",), dtype=dtype, shape=shape)
    mask, cotangent = draw_mask(rng, (shape[1], 1)), jnp.asarray(rng.standard_normal(shape), dtype)
    cases = [(mask, ("scale",)), (None, ("scale",)), (None, ())]
    results = jax.jit(
        lambda dy, *xs: [
            value_and_gradients(options_of(op, 1, where, False, names), xs[: 1 + len(names)], dy)
            for where, names in cases
        ]
    )(cotangent, x, scale)
    for (where, names), got in zip(cases, results, strict=True):
        what = f"where={where is not None}, {names}"
        check(op, got, (x, scale)[: 1 + len(names)], cotangent, names, 1, where=where, what=what)


@every_op
def test_many_rows(op, rng):
    """The bias gradient's sums over more rows than one chunk holds, in one group and in several."""
    forms = [((500, 3, 40), (40,)), ((500, 3, 40), (3, 40)), ((3, 700, 9), (3, 1, 9)), ((9, 9, 9, 65), (9, 1, 65))]
    operands = [draw(rng, ("bias",), bias_shape=bias_shape, shape=shape) for shape, bias_shape in forms]
    cotangents = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape, _ in forms]
    function = options_of(op, -1, None, False, ("bias",))
    results = jax.jit(lambda operands, dys: [*map(functools.partial(value_and_gradients, function), operands, dys)])(
        operands, cotangents
    )
    for form, xs, dy, got in zip(forms, operands, cotangents, results, strict=True):
        check(op, got, xs, dy, ("bias",), what=f"x and bias {form}")


# --- values in masked entries ---


@every_op
@pytest.mark.parametrize("axis", [-1, -2, (1, 3)], ids=str)
def test_masked_entries_may_hold_anything(op, axis, rng):
    """NaN and infinities in x, bias and cotangent under the mask touch nothing; some rows are masked throughout."""
    mask = draw_mask(rng, (2, 1, 5, 7))
    mask[0, 0, 2:, :] = False
    mask[1, 0, :, :3] = False
    visible = np.broadcast_to(mask & CAUSAL, SHAPE)
    x, scale, bias = (np.asarray(v) for v in draw(rng, ("scale", "bias"), bias_shape=(2, 3, 5, 7)))
    cotangent = rng.standard_normal(SHAPE).astype(np.float32)
    anything = np.resize(np.array([NAN, INF, -INF, 1e38], np.float32), SHAPE)
    dirty = [jnp.asarray(np.where(visible, values, anything)) for values in (x, bias, cotangent)]
    cases = (("scale", "bias"), ("bias",), ("scale",), ())
    given = {"scale": jnp.asarray(scale), "bias": dirty[1]}
    results = jax.jit(
        lambda x, given, dy: [
            value_and_gradients(options_of(op, axis, mask, True, names), (x, *(given[name] for name in names)), dy)
            for names in cases
        ]
    )(dirty[0], given, dirty[2])
    for names, got in zip(cases, results, strict=True):
        operands = dirty[0], *(given[name] for name in names)
        check(op, got, operands, dirty[2], names, axis, mask, True, f"{names}")
        np.testing.assert_array_equal(np.asarray(got[0])[~visible], OPS[op][2])
        np.testing.assert_array_equal(np.asarray(got[1])[~visible], 0)


@every_op
def test_masked_gradients_are_zero_in_rows_of_nan(op):
    x = jnp.asarray([[1.0, NAN, 2.0, 3.0], [1.0, INF, 2.0, 3.0]])
    mask = np.array([True, True, False, True])
    value, dx = run(lambda x: OPS[op][0](x, where=mask), x, cotangent=jnp.ones((2, 4)))
    np.testing.assert_array_equal(np.isnan(value), np.broadcast_to(mask, (2, 4)))
    np.testing.assert_array_equal(np.isnan(dx), np.broadcast_to(mask, (2, 4)))
    assert not np.asarray(dx)[:, 2].any()


# --- transformations ---


def mapped_operands(rng, mapped, axes):
    """x, scale, bias and where for a [heads, queries, keys] call; mapped operands have another axis of 4."""
    shapes = {"x": (3, 5, 7), "scale": (), "bias": (3, 5, 7), "where": (1, 1, 7)}
    operands, in_axes = [], []
    for name, shape in shapes.items():
        axis = axes[name] if name in mapped else None
        shape = shape if axis is None else (*shape[:axis], 4, *shape[axis:])
        values = draw_mask(rng, shape) if name == "where" else rng.standard_normal(shape).astype(np.float32)
        operands.append(jnp.asarray(values))
        in_axes.append(axis)
    return operands, in_axes


@every_op
def test_vmap(op, rng):
    """Any operands mapped, along the first axis or another: as a loop, values and gradients, in as many launches."""
    every_name = ("x", "scale", "bias", "where")
    dy = jnp.asarray(rng.standard_normal((3, 5, 7)), jnp.float32)

    @jax.jit
    def both(x, scale, bias, where):
        varying = value_and_gradients(
            lambda *v: OPS[op][0](v[0], -1, where, scale=v[1], bias=v[2]), (x, scale, bias), dy
        )
        fixed = value_and_gradients(
            lambda *v: OPS[op][0](v[0], -1, where, scale=0.5, bias=v[1], causal=True), (x, bias), dy
        )
        return *varying, *fixed

    launches = contract.count_launches(both, *mapped_operands(rng, (), {})[0])
    assert launches == 4
    sets = [mapped for count in range(1, 5) for mapped in itertools.combinations(every_name, count)]
    cases = [(mapped, i % 2) for i, mapped in enumerate(sets)] + [(sets[-1], 1)]
    for mapped, last in cases:
        axes = {"x": 3 * last, "scale": 0, "bias": 2 * last, "where": 3 * last}
        operands, in_axes = mapped_operands(rng, mapped, axes)
        batched = jax.vmap(both, in_axes)
        traced = jax.jit(batched).trace(*operands)
        got = traced.lower().compile()(*operands)
        for i in range(4):
            single = [x if a is None else jnp.take(x, i, a) for x, a in zip(operands, in_axes, strict=True)]
            for value, wanted in zip(got, both(*single), strict=True):
                np.testing.assert_allclose(value[i], wanted, rtol=2e-5, atol=2e-5, err_msg=f"{mapped}, {axes}")
        assert contract.count_launches_of(traced.jaxpr) == launches


@every_op
def test_nested_vmap_and_gradient_of_vmap(op, rng):
    x = jnp.asarray(rng.standard_normal((4, 3, 2, 5, 7)), jnp.float32)
    bias, where = jnp.asarray(rng.standard_normal((3, 5, 7)), jnp.float32), jnp.asarray(draw_mask(rng, (4, 2, 7)))
    scale = jnp.asarray(rng.standard_normal(3), jnp.float32)
    weights = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    visible = jnp.tril(jnp.ones((5, 7), bool))

    def masked_sum(values, weights, where):
        return jnp.sum(jnp.where(where & visible, values * weights, 0))

    def nested(x, scale, bias):
        one = lambda x, scale, bias, where: OPS[op][0](x, where=where, scale=scale, bias=bias, causal=True)  # noqa: E731
        heads = jax.vmap(one, (0, 0, 0, None))
        return jax.vmap(jax.vmap(heads, (1, None, None, 0), 1), (0, None, None, 0))(x, scale, bias, where)

    def flat(x, scale, bias):
        z = x * scale[:, None, None, None] + bias[:, None]
        return OPS[op][1](z, where=where[:, None, :, None] & visible)

    def gradients(function):
        total = lambda *xs: masked_sum(function(*xs), weights, where[:, None, :, None])  # noqa: E731
        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(x, scale, bias)

    wanted = jax.tree.leaves(gradients(flat))
    for got, target in zip(jax.tree.leaves(gradients(nested)), wanted, strict=True):
        np.testing.assert_allclose(got, target, rtol=1e-4, atol=1e-4 * float(jnp.abs(target).max()))


@every_op
def test_control_flow(op, rng):
    x, scale, bias = draw(rng, ("scale", "bias"))
    where = jnp.asarray(draw_mask(rng, (2, 1, 1, 7))).at[..., 0].set(True)
    weights = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32)

    def step(x, scale, bias):
        y = OPS[op][0](x, -1, where, scale=scale, bias=bias, causal=True)
        return jnp.where(y > -INF, y, 0)

    twice = {
        "none": lambda x, s, b: step(step(x, s, b), s, 2 * b),
        "scan": lambda x, s, b: jax.lax.scan(lambda c, b: (step(c, s, b), None), x, jnp.stack([b, 2 * b]))[0],
        "remat": lambda x, s, b: jax.checkpoint(step)(jax.checkpoint(step)(x, s, b), s, 2 * b),
        "cond": lambda x, s, b: step(jax.lax.cond(x[0, 0, 0, 0] < 1e9, step, lambda c, s, b: c, x, s, b), s, 2 * b),
    }

    @jax.jit
    def gradients(*operands):
        return {
            name: jax.grad(lambda *xs, function=function: jnp.sum(weights * function(*xs)), (0, 1, 2))(*operands)
            for name, function in twice.items()
        }

    found = gradients(x, scale, bias)
    wanted = found.pop("none")
    for name, results in found.items():
        for got, target in zip(results, wanted, strict=True):
            atol = 1e-5 * float(jnp.abs(target).max())
            np.testing.assert_allclose(got, target, rtol=1e-4, atol=atol, err_msg=name)


# --- only wanted results are computed ---


@every_op
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_pullbacks_of_one_function(op, wrap, rng):
    """Pullbacks with respect to different operands, all made before any is called."""
    operands = draw(rng, ("scale", "bias"))
    dy = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32)
    function = wrap(lambda x, scale, bias: OPS[op][0](x, scale=scale, bias=bias, causal=True))
    dy = jnp.where(CAUSAL, dy, 0)
    wanted = jax.vjp(function, *operands)[1](dy)
    sets = [s for count in (1, 2) for s in itertools.combinations(range(3), count)]

    def of(varied):
        return lambda *xs: function(*(xs[varied.index(i)] if i in varied else x for i, x in enumerate(operands)))

    pullbacks = [jax.vjp(of(varied), *(operands[i] for i in varied))[1] for varied in sets]
    for varied, pullback in zip(sets, pullbacks, strict=True):
        for got, i in zip(pullback(dy), varied, strict=True):
            np.testing.assert_allclose(got, wanted[i], rtol=1e-5, atol=1e-5 * float(jnp.abs(wanted[i]).max()))


@every_op
def test_unwanted_gradients_cost_nothing(op, rng):
    """The backward pass is one kernel with one result; without the bias gradient there is nothing else."""
    x, scale, bias = draw(rng, ("scale", "bias"))

    def total(x, scale, bias):
        return jnp.sum(OPS[op][0](x, scale=scale, bias=bias, causal=True))

    def backward_of(argnums):
        text = str(jax.make_jaxpr(jax.grad(total, argnums))(x, scale, bias))
        (line,) = (line for line in text.splitlines() if f"jaxops_{op}_bwd" in line)
        assert line.split("=")[0].count("f32[") == 1
        return text.split(f"jaxops_{op}_bwd")[1]

    assert "reduce_sum" not in backward_of(0)
    assert backward_of((0, 2)).count("reduce_sum") == 1


@every_op
def test_masked_entries_may_hold_anything_in_second_derivatives(op, rng):
    """The gradient with respect to the scale inside a tangent, which multiplies the scale by x."""
    x = rng.standard_normal((3, 7)).astype(np.float32)
    mask = rng.random(x.shape) < 0.7
    mask[:, 0] = True
    dirty = np.where(mask, x, np.array([np.nan, INF, -INF] * 7).reshape(3, 7).astype(np.float32))

    def through_tangent(x, scale):
        value, tangent = jax.jvp(lambda s: OPS[op][0](x, where=mask, scale=s), (scale,), (1.0,))
        return jnp.sum(jnp.sin(jnp.where(mask, value, 0)) * tangent)

    clean, got = (jax.grad(through_tangent, 1)(jnp.asarray(v), 1.5) for v in (x, dirty))
    assert np.isfinite(clean)
    np.testing.assert_allclose(got, clean, rtol=1e-5)


def test_bias_without_effect_has_no_gradient_kernel(rng):
    """A constant added to a whole row changes nothing: its gradient is zero, to the bit."""
    x, bias = draw(rng, ("bias",), bias_shape=(3, 5, 1))
    for op in (jaxops.softmax, jaxops.log_softmax):
        dbias = jax.grad(lambda b, op=op: jnp.sum(op(x, bias=b) ** 2))(bias)
        np.testing.assert_array_equal(dbias, np.zeros(bias.shape))


# --- large logits ---


def _large(rng, names):
    """Rows whose largest logit is far beyond 2^31, by a scale that is no power of two, and their operands."""
    x = rng.uniform(0.3, 3, (32, 1)) * 7e15 * np.array([1, 0.5, -1, 0.3, 0.999, -0.2, 0.1, 0.7])
    operands = {"x": x.astype(np.float32)}
    if "scale" in names:
        operands["scale"] = np.float32(1 / 7)
    if "bias" in names:  # most terms cancel
        operands["bias"] = (-x / 7 * rng.uniform(0.99, 1.01, x.shape)).astype(np.float32)
    return operands


@every_op
@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
def test_large_logits_by_a_scale(op, split, rng):
    """x scale is rounded before the maximum is subtracted, however the compiler combines the two."""
    if split and len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    where = rng.random((32, 8)) < 0.7
    where[:, 0] = True
    placed = lambda x: x  # noqa: E731
    if split:
        columns = NamedSharding(
            jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2]), PartitionSpec(None, "d")
        )
        placed = lambda x: jax.device_put(x, columns) if np.ndim(x) == 2 else jnp.asarray(x)  # noqa: E731
    variants = [(("scale",), {}), (("scale",), {"where": where}), (("scale", "bias"), {})]
    variants += [(("scale", "bias"), {"where": where}), ((), {"scale": np.float32(1 / 7)})]
    inputs = [jax.tree.map(placed, _large(rng, names)) for names, _ in variants]
    tangents = [{k: placed(rng.standard_normal(v.shape).astype(np.float32)) for k, v in xs.items()} for xs in inputs]

    @jax.jit
    def run(inputs, tangents):
        results = []
        for (_, options), xs, moved in zip(variants, inputs, tangents, strict=True):
            f = lambda xs, options=options: OPS[op][0](**xs, **options)  # noqa: E731
            y, dy = jax.jvp(f, (xs,), (moved,))
            _, pullback = jax.vjp(f, xs)
            second = jax.jvp(lambda xs: jax.vjp(f, xs)[1](jnp.cos(y)), (xs,), (moved,))  # noqa: B023
            results.append((y, dy, pullback(jnp.ones_like(y).at[:, 1].set(2)), second))
        return results

    for (names, options), xs, moved, (y, dy, reverse, second) in zip(
        variants, inputs, tangents, run(inputs, tangents), strict=True
    ):
        mask = np.broadcast_to(options.get("where", True), y.shape)
        y, dy = (np.where(mask, wide(v), 0) for v in (y, dy))
        what = f"{names}, {[*options]}"
        checked = [y, dy, *jax.tree.leaves(reverse)]
        if "bias" not in names:  # else the rest after cancellation depends on how x scale is rounded
            checked += jax.tree.leaves(second)
        for x in checked:
            assert np.isfinite(x).all(), what
        if "bias" in names:
            continue
        z = np.where(mask, wide(xs["x"]) * wide(np.float32(1 / 7)), -INF)
        value = exact(op, z, np.zeros(z.shape), -1, mask)[0]
        largest = np.abs(z[mask]).max() if op == "log_softmax" else 1.0
        np.testing.assert_allclose(y, np.where(mask, value, 0), rtol=0, atol=2.0**-22 * largest, err_msg=what)
        moved = {k: wide(v) for k, v in moved.items()}
        dz = moved["x"] * wide(np.float32(1 / 7)) + moved.get("scale", 0) * wide(xs["x"])
        p = np.eye(8)[z.argmax(-1)]
        wanted = dz - (p * dz).sum(-1, keepdims=True)
        wanted = np.where(mask, wanted if op == "log_softmax" else p * wanted, 0)
        np.testing.assert_allclose(dy, wanted, rtol=1e-5, atol=1e-5 * max(1, np.abs(wanted).max()), err_msg=what)

"""softmax_cross_entropy_with_integer_labels and logsumexp."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads
from support import contract
from support.derivatives import check_second_order
from support.loss_cases import OPTIONS, exact
from support.ops import ulps
from transformations import bend

import jaxops

loss = jaxops.softmax_cross_entropy_with_integer_labels
INF, NAN = np.inf, np.nan

#: Rows with a few elements, around packs and warps, unaligned, and long.
SHAPES = ((1, 1), (3, 2), (5, 7), (2, 3, 33), (7, 128), (65, 1000), (3, 4097), (2, 50257))


def draw(rng, shape, dtype, scale=3.0):
    x = jnp.asarray((rng.standard_normal(shape) * scale).astype(dtype))
    labels = rng.integers(0, shape[-1], shape[:-1]).astype(np.int32)
    labels.flat[0], labels.flat[-1] = 0, shape[-1] - 1
    return x, labels, rng.standard_normal(shape[:-1])


def value_and_gradient(function, x, cotangent):
    value, pullback = jax.vjp(function, x)
    return value, pullback(jnp.asarray(cotangent, value.dtype))[0]


def compiled(function, x, cotangent):
    """The same as one program."""
    return jax.jit(lambda x: value_and_gradient(function, x, cotangent))(x)


# --- values and gradients ---


@pytest.mark.parametrize("dtype", contract.DTYPES)
def test_against_float64(dtype, rng):
    """No further from the exact values than optax in f32 on the same logits; random cotangents."""
    with contract.precision_of(dtype):
        cases = [draw(rng, shape, dtype) for shape in SHAPES]

        @jax.jit
        def every(logits):
            return [
                value_and_gradient(lambda x, labels=labels: loss(x, labels), x, cotangent)
                for x, (_, labels, cotangent) in zip(logits, cases, strict=True)
            ]

        results = every([x for x, _, _ in cases])
        assert results[0][0].dtype == (np.float64 if dtype == "float64" else np.float32)

        @functools.cache
        def by_optax(number):
            x, labels, cotangent = cases[number]
            wide = x if dtype == "float64" else x.astype(np.float32)
            with contract.precision_of(dtype):
                return compiled(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, labels), wide, cotangent)

    for number, (case, got) in enumerate(zip(cases, results, strict=True)):
        assert got[1].dtype == case[0].dtype
        for i, wanted in enumerate(exact(*case)):
            rounding = (1.0, 2.0)[i] * (8 if dtype == "float64" else 1)
            contract.assert_close(
                got[i],
                wanted,
                lambda number=number, i=i, got=got: np.asarray(by_optax(number)[i]).astype(got[i].dtype),
                f"{case[0].shape}, {('value', 'gradient')[i]}",
                rounding,
            )


MASKS = {"nothing": None, "tokens": (6, 5, 1), "columns": (1, 1, 41), "entries": (6, 5, 41)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_options(dtype, rng):
    """Every combination of options and masks."""
    x, labels, cotangent = draw(rng, (6, 5, 41), dtype)
    labels[0, :3] = 2, 1, 0
    masks = {}
    for name, shape in MASKS.items():
        masks[name] = None if shape is None else rng.random(shape) < 0.6
        if shape is not None:
            masks[name][0, 0] = name == "columns"
    cases = [(mask, options) for mask in masks for options in OPTIONS]

    @jax.jit
    def every(x, masks):
        return [
            value_and_gradient(lambda x, m=masks[m], o=OPTIONS[o]: loss(x, labels, where=m, **o), x, cotangent)
            for m, o in cases
        ]

    for (mask, options), got in zip(cases, every(x, masks), strict=True):
        wanted = exact(x, labels, cotangent, masks[mask], **OPTIONS[options])
        for value, target in zip(got, wanted, strict=True):
            contract.assert_close(value, target, what=f"{options}, {mask} masked", rounding=4.0)


@pytest.mark.parametrize("axis", [0, 1, -1, (1, 2), (2, 0), (0, 1, 2), (-1,)], ids=str)
def test_axis(axis, rng):
    """As optax's, which also says how a label counts several axes."""
    x = jnp.asarray(rng.standard_normal((4, 5, 6)), jnp.float32)
    axes = [a % 3 for a in (axis if isinstance(axis, tuple) else (axis,))]
    shape = [d for a, d in enumerate(x.shape) if a not in axes]
    labels = rng.integers(0, np.prod([x.shape[a] for a in axes]), shape)
    where = rng.random(x.shape) < 0.8
    cotangent = rng.standard_normal(shape)

    @jax.jit
    def both(x):
        return [
            [value_and_gradient(lambda x, f=f, mask=mask: f(x, labels, axis, mask), x, cotangent) for mask in masks]
            for f, masks in ((loss, (None, where)), (optax.softmax_cross_entropy_with_integer_labels, (None, where)))
        ]

    for a, b in zip(*map(jax.tree.leaves, both(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_logsumexp_is_returned_and_differentiable(rng):
    x, labels, cotangent = draw(rng, (4, 9), "float32")
    where = rng.random(x.shape) < 0.7
    where[0] = False
    function = lambda x: loss(x, labels, where=where, return_logsumexp=True, logits_soft_cap=3.0)  # noqa: E731
    wanted, gradient = exact(x, labels, cotangent, where, logits_soft_cap=3.0, lse=True)
    np.testing.assert_allclose(function(x)[1][1:], wanted[1:], rtol=1e-6)
    assert np.isneginf(function(x)[1][0])
    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(function(x)[1][1:] * cotangent[1:]))(x)[1:], gradient[1:], rtol=1e-5, atol=1e-6
    )


def test_label_dtypes(rng):
    x, labels, _ = draw(rng, (5, 100), "float32")
    wanted = loss(x, labels)
    with jax.enable_x64(True):
        for dtype in ("int8", "uint8", "int16", "uint32", "int64", "uint64"):
            np.testing.assert_array_equal(loss(x, jnp.asarray(labels, dtype)), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_grad(dtype, rng):
    """One call gives both: they equal the loss and its gradient with the weights as cotangents."""
    x, labels, weights = draw(rng, (6, 5, 41), dtype)
    labels[0, :3] = 2, 1, 0
    where = rng.random((6, 1, 41)) < 0.7
    where[0] = False
    cases = [(options, mask) for options in OPTIONS.values() for mask in (None, where)]

    @jax.jit
    def every(x, weights):
        return [
            jaxops.softmax_cross_entropy_value_and_grad(x, labels, weights, where=mask, **options)
            for options, mask in cases
        ]

    for (options, mask), got in zip(cases, every(x, weights), strict=True):
        for value, wanted in zip(got, exact(x, labels, weights, mask, **options), strict=True):
            contract.assert_close(value, wanted, what=str(options), rounding=4.0)
    assert got[0].dtype == np.float32 and got[1].dtype == x.dtype


def test_value_and_grad_is_differentiable(rng, x64):
    x, labels, weights = draw(rng, (3, 7), "float64")

    def both(x, weights):
        loss, gradient = jaxops.softmax_cross_entropy_value_and_grad(
            x, labels, weights, label_smoothing=0.1, z_loss=0.01, logits_soft_cap=5.0
        )
        return jnp.sum(jnp.sin(loss)) + jnp.sum(gradient**2)

    check_grads(jax.jit(both), (x, jnp.asarray(weights)), order=1, modes=["fwd", "rev"], atol=1e-4, rtol=1e-4)


# --- unusual values ---


def test_labels_out_of_range(rng):
    """NaN losses as optax's, gradients without a label's entry, and an error where the values are known."""
    x, labels, _ = draw(rng, (6, 9), "float32")
    labels[:] = -1, -9, -10, 9, 2**31 - 1, -(2**31)
    for array in (jnp.asarray(labels), jnp.asarray(labels[:4], jnp.int8)):
        logits = x[: len(array)]
        got = loss(logits, array)
        np.testing.assert_allclose(got, optax.softmax_cross_entropy_with_integer_labels(logits, array), rtol=1e-6)
        np.testing.assert_array_equal(np.isnan(got), [False, False, *[True] * (len(array) - 2)])
    with jax.enable_x64(True):
        far = jnp.asarray([2**40, -(2**40), 2**32 + 1, 0, 1, 2])
        np.testing.assert_array_equal(np.isnan(loss(x, far)), [True] * 3 + [False] * 3)
    gradient = jax.grad(lambda x: jnp.sum(loss(x, jnp.asarray(labels))[2:]))(x)
    np.testing.assert_allclose(gradient[2:], jax.nn.softmax(x)[2:], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"labels must be in \[-9, 9\), got -10"):
        loss(x, labels)
    ignored = loss(x[:3], labels[[0, 1, 2]], ignore_index=-10)
    assert ignored[2] == 0 and not np.isnan(ignored).any()


def test_huge_logits(rng):
    """Differences of large logits are exact: no lse is rounded at their size."""
    x = np.asarray(rng.standard_normal((4, 33)) * 2, np.float32)
    labels = rng.integers(0, 33, 4)
    run = jax.jit(lambda x: value_and_gradient(lambda x: loss(x, labels), x, np.ones(4)))
    for offset in (1e4, -1e4, 3e4):
        moved = (x + np.float32(offset)).astype(np.float32)
        got = run(jnp.asarray(moved))
        for value, wanted in zip(got, exact(moved, labels, np.ones(4)), strict=True):
            assert ulps(value, wanted) <= 4
    big = jnp.asarray([[3e38, -3e38, 0.0]], jnp.float32)
    np.testing.assert_array_equal(loss(big, jnp.asarray([0])), [0])


def test_infinite_logits_and_nan():
    x = jnp.asarray([[0, -INF, 1], [-INF, -INF, -INF], [INF, 0, 1], [NAN, 0, 1], [-INF, 0, -INF], [INF, NAN, -INF]])
    labels = jnp.asarray([1, 0, 1, 1, 1, 2])
    for array in (labels, jnp.zeros(6, int)):
        got = np.asarray(loss(x, array))
        np.testing.assert_allclose(got, optax.softmax_cross_entropy_with_integer_labels(x, array), rtol=1e-6)
    gradient = np.asarray(jax.grad(lambda x: jnp.sum(jnp.where(jnp.isfinite(loss(x, labels)), loss(x, labels), 0)))(x))
    np.testing.assert_array_equal(gradient[[0, 1, 2, 4]], 0)  # no gradient of an infinite loss was asked for


@pytest.mark.parametrize("axis", [-1, 0])
def test_masked_entries_may_hold_anything(axis):
    x = np.array([[1, NAN, 2, INF], [-INF, 0, NAN, 1], [NAN, INF, -INF, NAN]], np.float32)
    mask = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
    labels, clean = np.array([2, 3, 2]), np.where(mask, x, 0)
    turn = (lambda a: a) if axis == -1 else np.transpose
    for options in ({}, {"label_smoothing": 0.1, "logits_soft_cap": 7.0}):
        got = compiled(
            lambda x, o=options: loss(x, labels, axis, jnp.asarray(turn(mask)), **o), jnp.asarray(turn(x)), np.ones(3)
        )
        wanted = exact(clean, labels, np.ones(3), mask, **options)
        np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
        np.testing.assert_allclose(turn(np.asarray(got[1])), wanted[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 4), (0, 0)], ids=str)
def test_no_tokens(shape):
    x, labels = jnp.zeros(shape), np.zeros(shape[:-1], int)
    value, gradient = value_and_gradient(lambda x: loss(x, labels), x, np.zeros(shape[:-1]))
    assert value.shape == shape[:-1] and gradient.shape == shape


# --- transformations ---


def test_derivatives_to_second_order(rng, x64):
    """Against differences, in both modes and all their compositions."""
    x, labels, _ = draw(rng, (4, 11), "float64", 1.5)
    where = rng.random(x.shape) < 0.8
    where[:, 0] = True

    def every(x):
        calls = itertools.product(OPTIONS.values(), (None, where))
        losses = [loss(x, labels, where=w, **o) for o, w in calls]
        return sum(jnp.sum(bend(y)) for y in losses) + jnp.sum(jaxops.logsumexp(x, 0, where=where) ** 2)

    check_second_order(every, (x,), rng)


def test_vmap(rng):
    x, labels, cotangent = draw(rng, (3, 5, 17), "float32")
    run = jax.jit(lambda x, labels, c: value_and_gradient(lambda x: loss(x, labels, label_smoothing=0.1), x, c))
    wanted = run(x, labels, cotangent)
    stacked = (jnp.moveaxis(x, 0, -1), jnp.moveaxis(labels, 0, -1), jnp.moveaxis(cotangent, 0, -1))
    for got in (jax.vmap(run)(x, labels, cotangent), jax.jit(jax.vmap(run, -1))(*stacked)):
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    one = [run(x[i], labels[0], cotangent[0]) for i in range(3)]
    got = jax.jit(jax.vmap(run, (0, None, None)))(x, labels[0], cotangent[0])
    for i, pair in enumerate(one):
        for a, b in zip(got, pair, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-6, atol=1e-6)
    assert contract.count_launches(jax.vmap(run), x, labels, cotangent) == 2


def test_runs_are_bitwise_equal(rng):
    x, labels, cotangent = draw(rng, (130, 1003), "bfloat16")
    run = jax.jit(lambda x: value_and_gradient(lambda x: loss(x, labels), x, cotangent))
    first = run(x)
    for _ in range(3):
        for a, b in zip(run(x), first, strict=True):
            np.testing.assert_array_equal(a, b)


def test_no_one_hot_and_no_wide_logits():
    """The compiled forward and backward pass hold nothing as large as the logits except them and their gradient."""
    x, labels = jnp.zeros((64, 4096), jnp.bfloat16), jnp.zeros(64, jnp.int32)
    compiled = jax.jit(jax.grad(lambda x: jnp.mean(loss(x, labels)))).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < x.nbytes // 4


# --- logsumexp ---


@pytest.mark.parametrize("dtype", contract.DTYPES)
def test_logsumexp(dtype, rng):
    """Each kind of axes with each option: values, gradients, and the shapes and dtypes that jax.nn returns."""
    where = rng.random((3, 4, 33)) < 0.8
    where[0] = where[:, 0] = where[..., 0] = True
    axes, several = (None, 0, 1, -1, (0, 2), (2, 1)), ({}, {"where": where}, {"keepdims": True})
    cases = list(itertools.product(axes, several))
    with contract.precision_of(dtype):
        a = jnp.asarray((rng.standard_normal(where.shape) * 3).astype(dtype))
        types = [jax.eval_shape(lambda a, x=axis, o=o: jax.nn.logsumexp(a, x, **o), a) for axis, o in cases]
        cotangents = [rng.standard_normal(like.shape).astype(dtype) for like in types]

        @jax.jit
        def every(a):
            return [
                value_and_gradient(lambda a, x=axis, o=o: jaxops.logsumexp(a, x, **o), a, dy)
                for (axis, o), dy in zip(cases, cotangents, strict=True)
            ]

        results = every(a)
    slack = 8 if dtype == "float64" else 1
    for (axis, options), like, dy, (value, gradient) in zip(cases, types, cotangents, results, strict=True):
        assert (value.shape, value.dtype) == (like.shape, like.dtype) == (like.shape, a.dtype)
        terms = np.where(options.get("where", True), np.exp(np.asarray(a).astype(np.float64)), 0)
        sums = terms.sum(axis, keepdims=True)
        what = f"axis {axis}, {[*options]}"
        contract.assert_close(value, np.log(sums).reshape(like.shape), what=what, rounding=slack)
        wanted = terms / sums * dy.astype(np.float64).reshape(sums.shape)
        contract.assert_close(gradient, wanted, what=f"{what}, gradient", rounding=slack * contract.GRADIENT_ROUNDING)


def test_logsumexp_of_unusual_values():
    a = jnp.asarray([[0, -INF, 1], [-INF, -INF, -INF], [INF, 0, 1], [NAN, 0, 1], [INF, -INF, 0]])
    got, wanted = (f(a, -1, return_sign=True) for f in (jaxops.logsumexp, jax.nn.logsumexp))
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    np.testing.assert_array_equal(jaxops.logsumexp(a, 1, where=jnp.zeros((1, 3), bool)), -INF)
    assert jaxops.logsumexp(2.0) == 2.0 and jaxops.logsumexp(jnp.arange(3), keepdims=True).shape == (1,)


def test_logsumexp_left_to_xla(fallback, rng):
    a, b = rng.standard_normal((3, 4)), rng.standard_normal((3, 4))
    got, wanted = (f(a, 1, b, return_sign=True) for f in (jaxops.logsumexp, jax.nn.logsumexp))
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_broadcast(rng):
    x, labels, _ = draw(rng, (1, 6), "float32")
    many = rng.integers(0, 6, 5)
    np.testing.assert_allclose(
        loss(x, many), optax.softmax_cross_entropy_with_integer_labels(jnp.broadcast_to(x, (5, 6)), many), rtol=1e-5
    )
    assert loss(jnp.ones((5, 6)), labels).shape == (5,)

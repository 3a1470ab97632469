"""Every op against the contract."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import contract
from support.ops import COMPARISONS

pytestmark = pytest.mark.usefixtures("full_precision")

every_op = pytest.mark.parametrize("op", COMPARISONS.values(), ids=COMPARISONS.keys())


@every_op
@pytest.mark.parametrize("dtype", contract.DTYPES)
@pytest.mark.parametrize("shape", contract.SHAPES, ids=str)
def test_value_and_gradients(op, shape, dtype, rng):
    contract.check_value_and_gradients(op, rng, shape, dtype)


@every_op
def test_jit(op, rng):
    contract.check_jit(op, rng, (6, 130))


@every_op
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap(op, axis, rng):
    operands = range(len(op.operands(rng, (2, 2), np.dtype("float32"))))
    for count in operands:
        for mapped in itertools.combinations(operands, count + 1):
            contract.check_vmap(op, rng, (4, 9), mapped, axis)


@every_op
def test_nested_vmap(op, rng):
    rest = [jnp.asarray(a) for a in op.operands(rng, (4, 9), np.dtype("float32"))[1:]]
    xs = jnp.asarray(rng.standard_normal((4, 2, 9, 3)), jnp.float32)
    got = jax.vmap(jax.vmap(lambda x: op.ours(x, *rest), in_axes=1), in_axes=3)(xs)  # [3, 2, 4, 9]
    for i in range(3):
        for j in range(2):
            np.testing.assert_allclose(got[i, j], op.ours(xs[:, j, :, i], *rest), rtol=1e-5, atol=1e-5)


@every_op
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_zero_size(op, shape, rng):
    operands, cotangent = contract.draw(op, rng, shape, "float32")
    run = lambda f: contract.value_and_gradients(f, operands, jnp.asarray(cotangent))  # noqa: E731
    for got, wanted in zip(run(op.ours), run(op.reference), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=0)


@every_op
def test_weak_type_and_numpy_operands(op, rng):
    operands = op.operands(rng, (3, 5), np.dtype("float32"))
    out = op.ours(*operands)
    assert not out.weak_type
    np.testing.assert_array_equal(out, op.ours(*(jnp.asarray(x) for x in operands)))


@every_op
def test_runs_are_bitwise_equal(op, rng):
    operands, cotangent = contract.draw(op, rng, (65, 1000), "float32")
    run = jax.jit(lambda *xs: contract.value_and_gradients(op.ours, xs[:-1], xs[-1]))
    first = run(*operands, jnp.asarray(cotangent))
    for _ in range(3):
        for got, wanted in zip(run(*operands, jnp.asarray(cotangent)), first, strict=True):
            np.testing.assert_array_equal(got, wanted)


@every_op
@pytest.mark.parametrize("transform", ["scan", "while", "cond", "remat"])
def test_control_flow(op, transform, rng):
    x, *rest = (jnp.asarray(a) for a in op.operands(rng, (6, 6), np.dtype("float32")))
    step = lambda x: op.ours(x, *rest)  # noqa: E731
    twice = {
        "scan": lambda x: jax.lax.scan(lambda c, _: (step(c), None), x, length=2)[0],
        "while": lambda x: jax.lax.fori_loop(0, 2, lambda _, c: step(c), x),
        "cond": lambda x: step(jax.lax.cond(x[0, 0] < 1e9, step, lambda c: c, x)),
        "remat": lambda x: jax.checkpoint(step)(step(x)),
    }[transform]
    np.testing.assert_allclose(jax.jit(twice)(x), step(step(x)), rtol=1e-5, atol=1e-5)
    if transform != "while":
        weights = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        wanted = jax.grad(lambda x: jnp.sum(step(step(x)) * weights))(x)
        got = jax.jit(jax.grad(lambda x: jnp.sum(twice(x) * weights)))(x)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()))

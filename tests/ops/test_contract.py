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


#: Every shape in float32, and on the CPU, whose loops are the same for all dtypes, in one or two others.
CELLS = [
    pytest.param(shape, dtype, id=f"{shape}-{dtype}")
    for i, shape in enumerate(contract.SHAPES)
    for j, dtype in enumerate(contract.DTYPES)
    if dtype == "float32" or (i + j) % 2 or jax.default_backend() == "gpu"
]


@every_op
@pytest.mark.parametrize("shape, dtype", CELLS)
def test_value_and_gradients(op, shape, dtype, rng):
    contract.check_value_and_gradients(op, rng, shape, dtype)


@every_op
def test_jit(op, rng):
    contract.check_jit(op, rng, (6, 130))


@every_op
def test_vmap(op, rng):
    """Any operands mapped, all of them along any axis."""
    operands = range(len(op.operands(rng, (2, 2), np.dtype("float32"))))
    axes = (0, 1, -1)
    sets = [mapped for count in operands for mapped in itertools.combinations(operands, count + 1)]
    ways = [(mapped, axes[i % 3]) for i, mapped in enumerate(sets[:-1])] + [(sets[-1], axis) for axis in axes]
    contract.check_vmap(op, rng, (4, 9), ways)


@every_op
def test_nested_vmap(op, rng):
    rest = [jnp.asarray(a) for a in op.operands(rng, (4, 9), np.dtype("float32"))[1:]]
    xs = jnp.asarray(rng.standard_normal((4, 2, 9, 3)), jnp.float32)
    got = jax.vmap(jax.vmap(lambda x: op.ours(x, *rest), in_axes=1), in_axes=3)(xs)  # [3, 2, 4, 9]
    for i in range(3):
        for j in range(2):
            np.testing.assert_allclose(got[i, j], op.ours(xs[:, j, :, i], *rest), rtol=1e-5, atol=1e-5)


#: The CPU's handlers take every address: a few are enough.
SLICES = [
    (shape, dtype)
    for shape in ((4, 64), (65, 1024), (1, 40960), (3, 5, 128))
    for dtype in ("float32", "bfloat16")
    if jax.default_backend() == "gpu" or ((shape[0] < 65) == (dtype == "bfloat16") and len(shape) == 2)
]


@every_op
@pytest.mark.parametrize("shape, dtype", SLICES, ids=str)
def test_slices_of_vectors(op, shape, dtype, rng):
    contract.check_slices(op, rng, shape, dtype)


@every_op
def test_zero_size(op, rng):
    calls = [contract.draw(op, rng, shape, "float32") for shape in ((0, 5), (3, 0), (0, 0), (2, 0, 4))]

    @jax.jit
    def both(calls):
        return [
            [contract.value_and_gradients(f, operands, cotangent) for operands, cotangent in calls]
            for f in (op.ours, op.reference)
        ]

    for got, wanted in zip(*map(jax.tree.leaves, both(calls)), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=0)
    operands, cotangent = calls[0]
    assert [x.shape for x in contract.value_and_gradients(op.ours, operands, cotangent)[1:]] == [
        x.shape for x in operands
    ]


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
def test_control_flow(op, rng):
    x, *rest = (jnp.asarray(a) for a in op.operands(rng, (6, 6), np.dtype("float32")))
    weights = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    step = lambda x: op.ours(x, *rest)  # noqa: E731
    twice = {
        "none": lambda x: step(step(x)),
        "scan": lambda x: jax.lax.scan(lambda c, _: (step(c), None), x, length=2)[0],
        "cond": lambda x: step(jax.lax.cond(x[0, 0] < 1e9, step, lambda c: c, x)),
        "remat": lambda x: jax.checkpoint(step)(step(x)),
    }

    @jax.jit
    def values_and_gradients(x):
        found = {}
        for name, function in twice.items():
            y, pullback = jax.vjp(function, x)
            found[name] = y, pullback(weights)[0]
        return found, jax.lax.fori_loop(0, 2, lambda _, c: step(c), x)

    found, of_while = values_and_gradients(x)
    value, gradient = found.pop("none")
    np.testing.assert_allclose(value, step(step(x)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_while, value, rtol=1e-5, atol=1e-5, err_msg="while")
    atol = 1e-4 * float(jnp.abs(gradient).max())
    for name, got in found.items():
        np.testing.assert_allclose(got[0], value, rtol=1e-5, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(got[1], gradient, rtol=1e-4, atol=atol, err_msg=name)

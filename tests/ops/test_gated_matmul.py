"""gated_matmul: values and derivatives against float64, and what its backward pass keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops

pytestmark = pytest.mark.usefixtures("full_precision")


def draw(rng, shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def by_hand(activation):
    act = {
        "silu": jax.nn.silu,
        "relu": jax.nn.relu,
        "gelu": jax.nn.gelu,
        "gelu_exact": lambda z: jax.nn.gelu(z, approximate=False),
    }[activation]
    return lambda x, w_gate, w_up: act(x @ w_gate) * (x @ w_up)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_exact", "relu"])
def test_values_and_derivatives(activation, recompute, rng):
    """Forward, reverse, second order and vmap."""
    xs = [draw(rng, shape) for shape in ((3, 5, 8), (8, 6), (8, 6))]
    moved = [draw(rng, x.shape) for x in xs]

    @jax.jit
    def results(xs, moved):
        found = []
        for f in (
            lambda *xs: jaxops.gated_matmul(*xs, activation=activation, recompute=recompute),
            by_hand(activation),
        ):
            gradient = jax.grad(lambda *xs, f=f: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2))
            mapped = jax.vmap(f, (0, None, None))(*xs)
            found.append((jax.jvp(f, xs, moved), gradient(*xs), jax.jvp(gradient, xs, moved)[1], mapped))
        return found

    got, wanted = results(xs, moved)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_rounding(rng):
    """The products are rounded to 16 bits, the result once more."""
    xs = [draw(rng, shape, "bfloat16") for shape in ((40, 64), (64, 48), (64, 48))]
    got = jaxops.gated_matmul(*xs)
    assert got.dtype == jnp.bfloat16
    x, w_gate, w_up = (np.asarray(v).astype(np.float64) for v in xs)
    gates, ups = x @ w_gate, x @ w_up
    wanted = gates / (1 + np.exp(-gates)) * ups
    # Three roundings; the derivative of silu is at most 1.1.
    bound = 2**-8 * (1.1 * np.abs(gates * ups) + 2 * np.abs(wanted)) + 1e-6
    assert np.all(np.abs(np.asarray(got).astype(np.float64) - wanted) <= bound)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_the_backward_pass_keeps(recompute, rng):
    """The two products in 16 bits, or only the operands."""
    xs = [draw(rng, shape, "bfloat16") for shape in ((40, 64), (64, 48), (64, 48))]
    _, pullback = jax.vjp(lambda *xs: jaxops.gated_matmul(*xs, recompute=recompute), *xs)
    kept = [x for x in jax.tree.leaves(pullback) if getattr(x, "shape", None) == (40, 48)]
    assert [x.dtype for x in kept] == [jnp.bfloat16] * (0 if recompute else 2)

"""gelu and relu in swapped linen models: they join the dense layer before them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from support import flax_cases as cases

import jaxops
from jaxops.flax import linen

pytestmark = pytest.mark.usefixtures("full_precision")

KEY = jax.random.key(0)
GELU, RELU = jax.nn.gelu, jax.nn.relu


class Activated(nn.Module):
    """An activation between two dense layers; how: what becomes of the first layer's result."""

    activation: str
    how: str = "joined"

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(24, use_bias=self.how != "no bias", name="first")(x)
        if self.how == "changed":
            y = y + 1
        if self.how == "another layer":
            nn.Dense(24, name="other")(x)
        exact = {"gelu_exact": lambda y: nn.gelu(y, approximate=False)}
        z = (exact.get(self.activation) or getattr(nn, self.activation))(y)
        return nn.Dense(8, name="last")(z + y if self.how == "used twice" else z)


def _products(model, variables, x):
    found = jaxops.explain(model.apply, variables, x, platform="cuda")
    return sorted(call.detail.partition("; ")[2] for call in found.calls if call.kernel == "matmul")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "relu"])
@pytest.mark.parametrize("how", ["joined", "used twice"])
def test_activations_join_the_dense_layer_before_them(how, activation, dtype, rng):
    model = Activated(activation, how)
    x = jnp.asarray(rng.standard_normal((5, 16)), dtype)
    swapped, report = linen.swap(model)
    variables = jax.tree.map(lambda v: v.astype(dtype), jax.jit(model.init)(KEY, x))
    got, wanted = (cases.value_and_gradients(m.apply, variables, x) for m in (swapped, model))
    # In 16 bits the product is not rounded before the activation.
    cases.assert_same(got, wanted, ulp=256 if dtype == "float32" else 8)
    assert report.swapped == {"first": f"Dense with {activation}", "last": "Dense"}
    assert _products(swapped, variables, x) == (["", activation] if how == "joined" else ["", "", activation])


@pytest.mark.filterwarnings("ignore::jaxops.FallbackWarning")  # complex products
@pytest.mark.parametrize("how", ["no bias", "changed", "another layer", "silu", "complex", "not traced"])
def test_activations_that_join_no_layer(how, rng):
    model = Activated({"silu": "silu", "complex": "relu"}.get(how, "gelu"), how)
    x = jnp.asarray(rng.standard_normal((5, 16)), jnp.complex64 if how == "complex" else jnp.float32)
    swapped, report = linen.swap(model)
    variables = model.init(KEY, x)
    got = (lambda f: f if how == "not traced" else jax.jit(f))(swapped.apply)(variables, x)
    np.testing.assert_allclose(got, model.apply(variables, x), rtol=1e-5, atol=1e-5)
    assert report.swapped["first"] == "Dense"


def test_activations_are_restored():
    with pytest.raises(ZeroDivisionError), linen.swapped():
        assert nn.gelu is not GELU and jax.nn.relu is not RELU
        raise ZeroDivisionError
    assert (nn.gelu, jax.nn.gelu, nn.relu, jax.nn.relu) == (GELU, GELU, RELU, RELU)


def test_activations_at_another_precision():
    """A layer's product has the precision that is in force where the layer runs."""

    class Precise(nn.Module):
        @nn.compact
        def __call__(self, x):
            with jax.default_matmul_precision("default"):
                y = nn.Dense(8)(x)
            return nn.relu(y)

    swapped, report = linen.swap(Precise())
    jax.jit(swapped.init)(KEY, jnp.ones((2, 4)))
    assert report.swapped == {"Dense_0": "Dense"}


def test_activations_leak_no_tracer():
    class Lifted(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.remat(Activated)("gelu", name="remat")(x)
            scanned = nn.scan(
                lambda block, x, _: (block(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            return scanned(Activated("relu", name="scan"), x, None)[0]

    swapped, report = linen.swap(Lifted())
    x = jnp.ones((5, 8))
    variables = jax.jit(swapped.init)(KEY, x)
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda v: jnp.sum(swapped.apply(v, x) ** 2)))(variables)
    assert report.swapped["remat/first"] == "Dense with gelu" and report.swapped["scan/first"] == "Dense with relu"

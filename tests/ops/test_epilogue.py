"""The backward pass for a matmul's bias and activation, against float64, and its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracle
from support.row_cases import assert_matches

import jaxops
from jaxops import _kernel
from jaxops.ops import _epilogue as epilogue

#: The shape of z, the axes that the bias gradient sums over.
SHAPES = [
    ((5, 7), (0,)),
    ((1, 8), (0,)),
    ((300, 520), (0,)),
    ((1000, 33), (0,)),
    ((3, 70, 264), (1,)),
    ((3, 70, 264), (0, 1)),
    ((2, 3, 40, 16), (1, 2)),
    ((40, 16), (1,)),
    ((40, 16), (0, 1)),
    ((3, 40, 16), (0, 2)),
    ((40, 16), ()),
    ((40000, 24), (0,)),
]


def backward(activation, dtype, summed, *operands):
    return epilogue._backward.bind(*operands, activation=activation, dtype=dtype, summed=summed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", list(epilogue.ACTIVATIONS), ids=str)
def test_gradients(activation, dtype, rng, on_gpu):
    """dz and dbias, each alone and together; the same bits every time."""
    # On the CPU the shapes are XLA's business, whatever the dtype and the activation.
    shapes = SHAPES if on_gpu or (dtype, activation) == ("float32", "gelu") else SHAPES[2::4]
    drawn = [[jnp.asarray(3 * rng.standard_normal(s), dtype) for _ in range(2)] for s, _ in shapes]
    drawn = [operands if activation else operands[1:] for operands in drawn]
    wants = [(np.dtype(dtype), True), (None, True), (np.dtype(dtype), False)]

    @jax.jit
    def run(drawn):
        return [
            [backward(activation, to, summed if biased else None, *operands) for to, biased in wants]
            for operands, (_, summed) in zip(drawn, shapes, strict=True)
        ]

    results = run(drawn)
    for again, first in zip(jax.tree.leaves(run(drawn)), jax.tree.leaves(results), strict=True):
        np.testing.assert_array_equal(again, first)
    wide = [[np.asarray(x).astype(np.float64) for x in operands] for operands in drawn]
    exacts = [operands[-1] * oracle.activate(activation, operands[0])[1] for operands in wide]
    rounding = 1 if np.dtype(dtype).itemsize == 2 else 32 if on_gpu else 96
    for exact, (shape, summed), ((dz, dbias), (alone,), (dz_alone,)) in zip(exacts, shapes, results, strict=True):
        what = f"{shape} summed over {summed}"
        assert dz.dtype == dtype and dbias.dtype == np.float32
        assert_matches(dz, exact, what, rounding)
        assert_matches(dbias, exact.sum(axis=summed, keepdims=True), what, 64, terms=np.abs(exact).max() * 4)
        assert_matches(alone, exact.sum(axis=summed, keepdims=True), what, 64, terms=np.abs(exact).max() * 4)
        assert_matches(dz_alone, exact, what, rounding)


def test_the_bias_gradient_is_summed_before_rounding(rng):
    """In float32, whatever dtype the product's cotangent has."""
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2000, 16), (16, 8)))
    options = {"activation": "silu", "preferred_element_type": "float32"}
    dbias = jax.grad(lambda bias: jnp.sum(jaxops.matmul(x, w, bias=bias, **options)))(jnp.zeros(8))
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    s = 1 / (1 + np.exp(-z))
    assert_matches(dbias, (s + z * s * (1 - s)).sum(0), rounding=64)


@pytest.mark.cuda
def test_one_kernel_for_both_gradients():
    """Lowered for a GPU: one jaxops call between the cotangent and the product, and no XLA reduction."""

    def loss(w, bias, x, weight):
        return jnp.sum(jaxops.matmul(x, w, bias=bias, activation="gelu") * weight)

    shapes = ((512, 1024), (1024,), (256, 512), (256, 1024))
    args = [jax.ShapeDtypeStruct(s, jnp.float32 if len(s) == 1 else jnp.bfloat16) for s in shapes]
    text = jax.jit(jax.grad(loss, (0, 1))).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"custom_call @{_kernel.target_name('epilogue_bwd')}") == 1
    assert "stablehlo.reduce" not in text

"""The cases for the Flax layers, and comparisons that linen and nnx share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import transformations

#: The normalisations' attributes, and x's shape.
NORMS = {
    "defaults": ({}, (3, 7, 16)),
    "epsilon": ({"epsilon": 0.5}, (4, 16)),
    "bf16 results": ({"dtype": jnp.bfloat16}, (3, 5, 16)),
    "f16 parameters": ({"param_dtype": jnp.float16}, (3, 16)),
    "no scale": ({"use_scale": False}, (3, 16)),
    "nothing to learn": ({"use_scale": False, "use_bias": False}, (3, 16)),
    "stable variance": ({"use_fast_variance": False}, (3, 16)),
    "two axes": ({"reduction_axes": (-2, -1)}, (3, 5, 16)),
    "first axis": ({"reduction_axes": 0, "feature_axes": 0}, (16, 5)),
    "one parameter for several rows": ({"reduction_axes": 1, "feature_axes": -1}, (3, 5, 16)),
}

#: Cases about dtypes; they run with every dtype.
TYPED_NORMS = ("defaults", "bf16 results", "f16 parameters", "nothing to learn")


def norms(*others):
    """The normalisations' cases with x's dtypes: float32, and for some cases the others."""
    return [(case, dtype) for case in NORMS for dtype in ("float32", *(others if case in TYPED_NORMS else ()))]


#: The multi-head attention layers' attributes, and the call's keyword arguments, from the mask.
ATTENTIONS = {
    "defaults": ({}, lambda mask: {}),
    "bf16": ({"dtype": jnp.bfloat16}, lambda mask: {"mask": mask}),
    "masked": ({}, lambda mask: {"mask": mask}),
    "one mask for all heads": ({}, lambda mask: {"mask": mask[:1, :1]}),
    "a number a mask": ({}, lambda mask: {"mask": mask.astype(jnp.float32)}),
    "normalised q and k": ({"normalize_qk": True}, lambda mask: {"mask": mask}),
    "no bias, other widths": ({"use_bias": False, "qkv_features": 24, "out_features": 12}, lambda mask: {}),
    "deterministic": ({"dropout_rate": 0.5, "deterministic": True}, lambda mask: {"mask": mask}),
    "dropout": ({"dropout_rate": 0.5, "deterministic": False}, lambda mask: {"mask": mask}),
    "dropout by head": (
        {"dropout_rate": 0.5, "deterministic": False, "broadcast_dropout": False},
        lambda mask: {"mask": mask},
    ),
}


#: Attributes of a gated MLP of 8 features, and the dtype of x.
GATED_MLPS = {
    "defaults": ({}, "float32"),
    "another width": ({"out_features": 5, "activation": "gelu"}, "float32"),
    "exact gelu": ({"activation": "gelu_exact"}, "float32"),
    "relu, recomputed": ({"activation": "relu", "recompute": True}, "float32"),
    "bf16": ({"dtype": jnp.bfloat16}, "float32"),
    "bf16 parameters": ({"param_dtype": jnp.bfloat16}, "bfloat16"),
    "bf16 inputs": ({}, "bfloat16"),
    "integers": ({}, "int32"),
    "precision": ({"precision": "highest"}, "float32"),
    "initialised": (
        {"kernel_init": jax.nn.initializers.normal(0.3), "down_kernel_init": jax.nn.initializers.normal(0.1)},
        "float32",
    ),
}

#: The activations in jax.nn.
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}


#: For attention with 4 queries and keys and 2 heads: a -inf bias, a mask, and queries that see a key by both alone.
_FROM_KEY = {n: jnp.arange(4) >= n for n in range(4)}
_TRIANGLE = jnp.tril(jnp.ones((4, 4), bool))
HIDING_BIASES = {
    "causal bias, left padding": (jnp.where(_TRIANGLE, 0, -jnp.inf), _FROM_KEY[2]),
    "causal bias, padding of each entry": (
        jnp.where(_TRIANGLE, 0.5, -jnp.inf)[None, None],
        jnp.stack([_FROM_KEY[1], _FROM_KEY[3]])[:, None, None],
    ),
    "a row of -inf, half of it masked": (
        jnp.zeros((4, 4)).at[1].set(-jnp.inf),
        jnp.ones((4, 4), bool).at[1, 1:3].set(False),
    ),
    "every head its own": (jnp.zeros((2, 4, 4)).at[1, :, 1:].set(-jnp.inf), _FROM_KEY[1]),
    "no mask": (jnp.where(_FROM_KEY[2], 0, -jnp.inf), None),
}


def draw(rng, shape, dtype=jnp.float32):
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(-9, 9, shape), dtype)
    return jnp.asarray(rng.standard_normal(shape), dtype)


def disturb(rng, tree):
    """Parameters that differ from their initial values."""
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + (0.3 * rng.standard_normal(x.shape)).astype(x.dtype)), tree
    )


def draw_mask(rng, batch, heads, queries, keys):
    """A mask [batch, heads, queries, keys] in which two queries see nothing."""
    mask = rng.random((batch, heads, queries, keys)) < 0.6
    mask[0, :, 1] = mask[1, 0, 2] = False
    return jnp.asarray(mask)


def assert_same(got, wanted, ulp=8, rounding=None):
    """Equal trees: structures, shapes, dtypes, and values up to some ulp at the largest value.

    Each array's largest value counts, or a tenth of the largest overall: some gradients are 0 up to rounding.

    Args:
      rounding: the dtype whose ulp are meant: the coarsest through which the values went; the first array's by default.
    """
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    largest = max(float(np.max(np.abs(np.asarray(x, np.float64)), initial=0)) for x in jax.tree.leaves(wanted))
    eps = float(jnp.finfo(rounding or jax.tree.leaves(wanted)[0].dtype).eps)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        scale = max(np.max(np.abs(theirs), initial=0), 0.1 * largest)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=ulp * eps * scale)


def value_and_gradients(function, *arguments):
    """A function's result, and its gradients for the floating arguments, from one cotangent."""

    def loss(*arguments):
        out = function(*arguments)
        weights = transformations.waves(out.astype(jnp.float32))
        return jnp.sum(out.astype(jnp.float32) * weights), out

    numbers = tuple(
        i for i, a in enumerate(arguments) if all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(a))
    )
    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=numbers, has_aux=True))(*arguments)
    return out, gradients

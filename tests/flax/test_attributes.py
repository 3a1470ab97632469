"""Every attribute that Flax's layers have, one by one: jaxops' layers give the same with it.

An attribute that a new Flax adds fails here until it has a value.
"""

import dataclasses
import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxops import FallbackWarning
from jaxops.flax import linen as fast_linen
from jaxops.flax import nnx as fast_nnx

pytestmark = pytest.mark.usefixtures("full_precision")


def _twice(*arrays, **options):
    return 2 * jax.lax.dot_general(*arrays, **options)


def _twice_einsum(*arrays, **options):
    return 2 * jnp.einsum(*arrays, **options)


def _halved(*arrays, dtype=None, **_):
    """Of linen the arrays, of nnx a tuple of them."""
    arrays = arrays[0] if isinstance(arrays[0], tuple | list) else arrays
    return tuple(None if x is None else (x / 2).astype(dtype or x.dtype) for x in arrays)


def _values(query, key, value, *_, **__):
    return 3 * value + query


def _class_of(function):
    return lambda: function


_INIT = jax.nn.initializers.normal(2.0)
_DROPS = {"dropout_rate": 0.5, "deterministic": False}

#: A value of each attribute, and options that it needs: a dict with other attributes.
VALUES = {
    "epsilon": 0.3,
    "dtype": jnp.bfloat16,
    "param_dtype": jnp.float16,
    "use_bias": False,
    "use_scale": False,
    "bias_init": _INIT,
    "scale_init": _INIT,
    "kernel_init": _INIT,
    "out_kernel_init": _INIT,
    "out_bias_init": _INIT,
    "reduction_axes": (-2, -1),
    "feature_axes": -2,
    "axis_name": "mapped",
    "use_fast_variance": False,
    "force_float32_reductions": False,
    "precision": "default",
    "promote_dtype": _halved,
    "qkv_promote_dtype": _halved,
    "out_promote_dtype": _halved,
    "ln_promote_dtype": _halved,
    "dot_general": _twice,
    "dot_general_cls": _class_of(_twice),
    "qkv_dot_general": _twice,
    "out_dot_general": _twice,
    "qkv_dot_general_cls": _class_of(_twice),
    "out_dot_general_cls": _class_of(_twice),
    "qk_attn_weights_einsum_cls": _class_of(_twice_einsum),
    "attn_weights_value_einsum_cls": _class_of(_twice_einsum),
    "preferred_element_type": jnp.float64,
    "features": 12,
    "in_features": 16,
    "out_features": 12,
    "num_features": 16,
    "qkv_features": 32,
    "num_heads": 4,
    "num_kv_heads": 1,
    "in_kv_features": 16,
    "axis": (-2, -1),
    "batch_dims": (0,),
    "batch_axis": {0: 2},
    "dropout_rate": 0.5,
    "deterministic": True,
    "broadcast_dropout": False,
    "attention_fn": _values,
    "normalize_qk": True,
    "force_fp32_for_softmax": True,
    "kernel_metadata": {"note": 1},
    "bias_metadata": {"note": 2},
    "scale_metadata": {"note": 3},
    "out_kernel_metadata": {"note": 4},
    "out_bias_metadata": {"note": 5},
    "query_ln_scale_metadata": {"note": 6},
    "key_ln_scale_metadata": {"note": 7},
}

#: Attributes that need others.
WITH = {
    "broadcast_dropout": _DROPS,
    "dropout_rate": {"deterministic": False},
    "deterministic": {"dropout_rate": 0.5},
    "force_fp32_for_softmax": {"dtype": jnp.float16},
    "query_ln_scale_metadata": {"normalize_qk": True},
    "key_ln_scale_metadata": {"normalize_qk": True},
    "ln_promote_dtype": {"normalize_qk": True},
    "qk_attn_weights_einsum_cls": {"attn_weights_value_einsum_cls": _class_of(_twice_einsum)},
    "attn_weights_value_einsum_cls": {"qk_attn_weights_einsum_cls": _class_of(_twice_einsum)},
    "preferred_element_type": {},
}

#: Where no value is tried here, and why.
ELSEWHERE = {
    "axis_index_groups": "jax.vmap has no groups",
    "decode": "test_decoding",
    "parent": "linen's own",
    "name": "linen's own",
    "self": "",
    "rngs": "given",
    "keep_rngs": "of dropout alone",
}

_NORM, _ATTENTION = (2, 16, 16), (2, 6, 16)
LAYERS = {
    ("linen", "LayerNorm"): ({}, _NORM),
    ("linen", "RMSNorm"): ({}, _NORM),
    ("linen", "Dense"): ({"features": 8}, _NORM),
    ("linen", "DenseGeneral"): ({"features": (2, 4)}, _NORM),
    ("linen", "MultiHeadDotProductAttention"): ({"num_heads": 2}, _ATTENTION),
    ("nnx", "LayerNorm"): ({"num_features": 16}, _NORM),
    ("nnx", "RMSNorm"): ({"num_features": 16}, _NORM),
    ("nnx", "Linear"): ({"in_features": 16, "out_features": 8}, _NORM),
    ("nnx", "LinearGeneral"): ({"in_features": 16, "out_features": (2, 4)}, _NORM),
    ("nnx", "MultiHeadAttention"): ({"num_heads": 2, "in_features": 16, "decode": False}, _ATTENTION),
}


def attributes(library, layer):
    """Flax's names of them."""
    flax = getattr({"linen": nn, "nnx": nnx}[library], layer)
    if library == "linen":
        return [field.name for field in dataclasses.fields(flax)]
    return list(inspect.signature(flax.__init__).parameters)


#: Made as jaxops' layer, and, of attention, whose projections are one product, swapped.
CASES = [
    (*layer, name, swapped)
    for layer in LAYERS
    for name in attributes(*layer)
    if name not in ELSEWHERE
    for swapped in ([False, True] if "MultiHead" in layer[1] else [False])
]


def of_linen(name, options, x, swapped):
    """Results of Flax's layer and of ours with the same variables, and the variables of both."""
    layer = getattr(nn, name)(**options)
    ours = fast_linen.swap(layer)[0] if swapped else getattr(fast_linen, name)(**options)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    found = [jax.eval_shape(one.init, rngs, x) for one in (layer, ours)]
    variables = layer.init(rngs, x)
    return [one.apply(variables, x, rngs={"dropout": jax.random.key(1)}) for one in (layer, ours)], found


def of_nnx(name, options, x, swapped):
    layers = [getattr(library, name)(**options, rngs=nnx.Rngs(0)) for library in (nnx, nnx if swapped else fast_nnx)]
    if swapped:
        layers[1] = fast_nnx.swap(layers[1])[0]
    states = [nnx.state(layer, nnx.Param) for layer in layers]
    metadata = [
        [(path, str(sorted(variable.get_metadata().items(), key=str))) for path, variable in nnx.to_flat_state(state)]
        for state in states
    ]
    assert metadata[0] == metadata[1]
    return [layer(x) for layer in layers], states


@pytest.mark.parametrize(("library", "layer", "attribute", "swapped"), CASES)
def test_attribute(rng, library, layer, attribute, swapped):
    base, shape = LAYERS[library, layer]
    options = base | WITH.get(attribute, {}) | {attribute: VALUES[attribute]}
    if library == "nnx" and attribute == "axis":
        options["in_features"] = (16, 16)
    if attribute == "preferred_element_type":
        options |= {attribute: jnp.float32, "dtype": jnp.bfloat16}
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    run = {"linen": of_linen, "nnx": of_nnx}[library]
    if attribute == "axis_name":
        options["use_bias" if layer == "LayerNorm" else "use_scale"] = False
        run = functools.partial(_mapped, run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # of what has no kernel
        (wanted, got), states = run(layer, options, x, swapped)
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for state in states]
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    got, wanted = (np.asarray(a, np.float64) for a in (got, wanted))
    narrow = any(dtype in (jnp.bfloat16, jnp.float16) for dtype in (options.get("dtype"), options.get("param_dtype")))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=(2e-2 if narrow else 2e-5) * max(1, np.abs(wanted).max()))


def _mapped(run, layer, options, x, swapped):
    """Under jax.vmap, whose axis the statistics are over too."""
    plain = {name: value for name, value in options.items() if name != "axis_name"}
    states = run(layer, plain, x[0], swapped)[1]

    def results(x):
        return run(layer, options, x, swapped)[0]

    return jax.vmap(results, axis_name="mapped")(x), states

"""A transformer layer with its loss, on plain jax.nn and on jaxops: the same code, two sets of ops."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxops


def _plain_layer_norm(x, scale, bias):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-6)
    return (y * scale + bias).astype(x.dtype)


def _plain_rms_norm(x, scale):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _plain_attention(logits, scale):
    causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jax.nn.softmax(logits * scale, where=causal)


PLAIN = SimpleNamespace(
    layer_norm=_plain_layer_norm,
    rms_norm=_plain_rms_norm,
    attention=_plain_attention,
    dense=lambda x, w, b: jnp.matmul(x, w) + b.astype(x.dtype),
    dense_gelu=lambda x, w, b: jax.nn.gelu(jnp.matmul(x, w) + b.astype(x.dtype)),
    einsum=jnp.einsum,
    log_softmax=lambda x: jax.nn.log_softmax(x.astype(jnp.promote_types(x.dtype, jnp.float32))),
)
OURS = SimpleNamespace(
    layer_norm=lambda x, scale, bias: jaxops.layer_norm(x, scale, bias, dtype=x.dtype),
    rms_norm=lambda x, scale: jaxops.rms_norm(x, scale, dtype=x.dtype),
    attention=lambda logits, scale: jaxops.softmax(logits, scale=scale, causal=True),
    dense=lambda x, w, b: jaxops.matmul(x, w, bias=b),
    dense_gelu=lambda x, w, b: jaxops.matmul(x, w, bias=b, activation="gelu"),
    einsum=functools.partial(jnp.einsum, _dot_general=jaxops.dot_general),
    log_softmax=lambda x: jaxops.log_softmax(x, dtype=jnp.promote_types(x.dtype, jnp.float32)),
)

#: How the parameters are split: over "data" for fully sharded data parallelism, over "model" for tensor parallelism.
SPECS = {
    "norm1": P(),
    "norm1_bias": P(),
    "query": P("data", "model", None),
    "key": P("data", "model", None),
    "value": P("data", "model", None),
    "out": P("model", None, "data"),
    "norm2": P(),
    "up": P("data", "model"),
    "up_bias": P("model"),
    "down": P("model", "data"),
    "down_bias": P(),
    "vocabulary": P("data", "model"),
}


def parameters(width: int, heads: int, vocabulary: int, dtype="float32") -> dict[str, np.ndarray]:
    shapes = {
        "norm1": (width,),
        "norm1_bias": (width,),
        **dict.fromkeys(("query", "key", "value"), (width, heads, width // heads)),
        "out": (heads, width // heads, width),
        "norm2": (width,),
        "up": (width, 4 * width),
        "up_bias": (4 * width,),
        "down": (4 * width, width),
        "down_bias": (width,),
        "vocabulary": (width, vocabulary),
    }
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) / np.sqrt(width) + (name in ("norm1", "norm2"))).astype(
            dtype if len(shape) > 1 else np.promote_types(dtype, np.float32) if dtype != "bfloat16" else np.float32
        )
        for name, shape in shapes.items()
    }


def layer(ops, params, x):
    """x: [batch, positions, width]."""
    h = ops.layer_norm(x, params["norm1"], params["norm1_bias"])
    query, key, value = (ops.einsum("btd,dhk->bthk", h, params[name]) for name in ("query", "key", "value"))
    logits = ops.einsum("bthk,bshk->bhts", query, key)
    weights = ops.attention(logits, query.shape[-1] ** -0.5)
    mixed = ops.einsum("bhts,bshk->bthk", weights, value)
    x = x + ops.einsum("bthk,hkd->btd", mixed, params["out"])
    h = ops.rms_norm(x, params["norm2"])
    h = ops.dense_gelu(h, params["up"], params["up_bias"])
    return x + ops.dense(h, params["down"], params["down_bias"])


def loss(ops, params, x, targets):
    """The targets' mean negative log-likelihood, [batch, positions]."""
    y = layer(ops, params, x)
    logits = ops.einsum("btd,dv->btv", y, params["vocabulary"])
    picked = jax.nn.one_hot(targets, logits.shape[-1], dtype=jnp.float32)
    return -jnp.mean(jnp.sum(ops.log_softmax(logits) * picked, -1))

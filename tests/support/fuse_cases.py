"""Spellings of jaxops' ops in plain JAX, which `fuse` must find, and deceptions, which it must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

SPELLINGS: dict[str, Case] = {}
DECEPTIONS: dict[str, Case] = {}


class Case(NamedTuple):
    """A function, its operands' shapes, and the ops that `fuse` finds in it.

    A deception names the family that it deceives, and has no such op.
    """

    function: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    counts: dict[str, int]


ROWS, PARAMETERS = (3, 8), (8,)
SQUARE = (8, 8)


def spelling(*shapes, **counts):
    def register(function):
        assert function.__name__ not in SPELLINGS
        SPELLINGS[function.__name__] = Case(function, shapes, counts)
        return function

    return register


def deception(family, *shapes):
    def register(function):
        assert function.__name__ not in DECEPTIONS
        DECEPTIONS[function.__name__] = Case(function, shapes, dict.fromkeys(family.split(), 0))
        return function

    return register


def mean_square(x, axis=-1):
    return jnp.mean(jnp.square(x), axis, keepdims=True)


# RMSNorm.


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_scale_last(x, scale):
    return x * lax.rsqrt(mean_square(x) + 1e-6) * scale


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_scale_with_the_root(x, scale):
    return (x - 0) * (lax.rsqrt(mean_square(x) + 1e-6) * scale)


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_scale_first(x, scale):
    return (scale * x) * lax.rsqrt(mean_square(x) + 1e-6)


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_one_plus_scale(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_one_plus_scale_broadcast(x, scale):
    return x * lax.rsqrt(mean_square(x) + 1e-6) * (1 + jnp.expand_dims(scale, 0))


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_divided_by_sqrt(x, scale):
    """As transformers' Llama."""
    variance = jnp.power(jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32)), 2).mean(-1, keepdims=True)
    return scale * jnp.asarray(x / jnp.sqrt(variance + 1e-6), dtype=x.dtype)


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_reciprocal_root(x, scale):
    return x * (1 / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)) * scale


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_power(x, scale):
    return x * (mean_square(x) + 1e-6) ** -0.5 * scale


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_sum_times_constant(x, scale):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) * (1 / 8) + 1e-6) * scale


@spelling(ROWS, rms_norm=1)
def rms_mean_broadcast_first(x):
    mean = jnp.broadcast_to(jnp.mean(jnp.square(x), -1)[:, None], x.shape)
    return x * lax.rsqrt(mean + jnp.asarray(1e-6, x.dtype))


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_of_a_row_mapped(x, scale):
    return jax.vmap(lambda row: row * lax.rsqrt(jnp.mean(row * row) + 1e-6) * scale)(x)


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_of_a_row_mapped_behind(x, scale):
    return jax.vmap(lambda row: row * lax.rsqrt(jnp.mean(row * row) + 1e-6) * scale, 0, 1)(x)


@spelling((8, 3), (8,), rms_norm=1)
def rms_of_columns_mapped(x, scale):
    return jax.vmap(lambda column: column * lax.rsqrt(jnp.mean(column * column) + 1e-6) * scale, 1)(x)


@spelling((2, 8, 3), layer_norm=1)
def layer_of_columns_mapped(x):
    def of_rows(rows):
        centred = rows - rows.mean(-1, keepdims=True)
        return centred * lax.rsqrt(mean_square(centred) + 1e-6)

    return jax.vmap(of_rows, 2)(x)


@spelling((8, 3), (8,), rms_norm=1)
def rms_of_columns(x, scale):
    return x * lax.rsqrt(mean_square(x, 0) + 1e-6) * scale[:, None]


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_wide_inside(x, scale):
    """As gemma's."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * lax.rsqrt(mean_square(wide) + 1e-6)).astype(x.dtype) * (1 + scale)


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_in_a_jitted_function(x, scale):
    return jax.jit(rms_scale_last)(x, scale)


@spelling(ROWS, rms_norm=1)
def rms_scaled_by_rows_after(x):
    return x * lax.rsqrt(mean_square(x) + 1e-6) * jnp.arange(3.0, dtype=x.dtype)[:, None]


# Layer norm.


@spelling(ROWS, PARAMETERS, PARAMETERS, layer_norm=1)
def layer_slow(x, scale, bias):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * lax.rsqrt(mean_square(centred) + 1e-6) * scale + bias


@spelling(ROWS, PARAMETERS, PARAMETERS, layer_norm=1)
def layer_fast(x, scale, bias):
    """As Flax's."""
    mean = jnp.mean(x, -1)
    variance = jnp.maximum(0.0, jnp.mean(lax.square(x), -1) - lax.square(mean))
    y = x - jnp.expand_dims(mean, -1)
    return y * (lax.rsqrt(jnp.expand_dims(variance, -1) + 1e-6) * scale) + bias


@spelling(ROWS, PARAMETERS, PARAMETERS, layer_norm=1)
def layer_var(x, scale, bias):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


@spelling(ROWS, PARAMETERS, PARAMETERS, layer_norm=1)
def layer_of_a_row_mapped(x, scale, bias):
    """As equinox's."""

    def of_row(row):
        mean = jnp.mean(row, keepdims=True)
        variance = jnp.maximum(jnp.var(row, keepdims=True), 0)
        return scale * ((row - mean) * lax.rsqrt(variance + 1e-5)) + bias

    return jax.vmap(of_row)(x)


@spelling(ROWS, PARAMETERS, PARAMETERS, layer_norm=1)
def layer_scale_and_root_first(x, scale, bias):
    """As haiku's."""
    mean = jnp.mean(x, -1, keepdims=True)
    root = scale * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
    return root * (x - mean) + bias


@spelling(ROWS, PARAMETERS, PARAMETERS, layer_norm=1)
def layer_as_a_line(x, scale, bias):
    """As Keras': the root is used twice."""
    mean = jnp.mean(x, -1, keepdims=True)
    slope = lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * scale
    return x * slope + (-mean * slope + bias)


@spelling(ROWS, layer_norm=1)
def layer_standardized(x):
    return jax.nn.standardize(x, epsilon=1e-5)


@spelling(ROWS, PARAMETERS, layer_norm=1)
def layer_without_offset(x, scale):
    return jax.nn.standardize(x, epsilon=1e-5) * scale


@spelling((2, 3, 4), (3, 4), (3, 4), layer_norm=1)
def layer_two_axes(x, scale, bias):
    mean = x.mean((1, 2), keepdims=True)
    return (x - mean) * lax.rsqrt(x.var((1, 2), keepdims=True) + 1e-5) * scale + bias


@spelling((2, 4, 3), (4,), layer_norm=1)
def layer_middle_axis_moved(x, bias):
    return jnp.swapaxes((x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5), 1, 2) + bias


@spelling(ROWS, PARAMETERS, layer_norm=1)
def layer_of_a_sum(x, y):
    total = x + y
    centred = total - total.mean(-1, keepdims=True)
    return centred * lax.rsqrt(mean_square(centred) + 1e-5)


@spelling(ROWS, PARAMETERS, rms_norm=1)
def rms_of_a_difference(x, y):
    difference = x - y
    return difference * lax.rsqrt(mean_square(difference) + 1e-5)


# softmax and log_softmax.


@spelling(ROWS, softmax=1)
def softmax_of_jax(x):
    return jax.nn.softmax(x)


@spelling((3, 8, 2), softmax=1)
def softmax_middle_axis(x):
    return jax.nn.softmax(x, 1)


@spelling((3, 4, 2), softmax=1)
def softmax_two_axes(x):
    return jax.nn.softmax(x, (0, 2))


@spelling((3, 8, 2), softmax=1)
def softmax_mapped(x):
    return jax.vmap(jax.nn.softmax, -1)(x)


@spelling(ROWS, softmax=1)
def softmax_wide_inside(x):
    return jax.nn.softmax(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


@spelling(ROWS, softmax=1)
def softmax_by_hand(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@spelling(ROWS, softmax=1)
def softmax_by_reciprocal(x):
    e = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
    return e * (1 / e.sum(-1, keepdims=True))


@spelling(ROWS, softmax=1)
def softmax_of_logsumexp(x):
    return jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True))


@spelling(ROWS, log_softmax=1)
def log_softmax_of_jax(x):
    return jax.nn.log_softmax(x)


@spelling((3, 8, 2), log_softmax=1)
def log_softmax_mapped(x):
    return jax.vmap(lambda x: jax.nn.log_softmax(x, 0))(x)


@spelling(ROWS, log_softmax=1)
def log_softmax_of_logsumexp(x):
    return x - jax.nn.logsumexp(x, -1, keepdims=True)


@spelling(ROWS, log_softmax=1)
def log_softmax_by_hand(x):
    shifted = x - x.max(-1, keepdims=True)
    return shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))


# Attention: query, key and value [batch, tokens, heads, depth] where nothing else is said.

HEADS = ((2, 6, 4, 8), (2, 6, 4, 8), (2, 6, 4, 8))
ATTENTION = {"dot_product_attention": 1}


def scores_of(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype)


def mixed(scores, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def tril(n):
    return jnp.tril(jnp.ones((n, n), bool))


@spelling(*HEADS, **ATTENTION)
def attention_full(q, k, v):
    return mixed(scores_of(q, k), v)


@spelling(*HEADS, **ATTENTION)
def attention_causal(q, k, v):
    return mixed(jnp.where(tril(6), scores_of(q, k), -1e9), v)


@spelling(*HEADS, **ATTENTION)
def attention_causal_by_positions(q, k, v):
    i, j = (lax.broadcasted_iota(jnp.int32, (6, 6), d) for d in (0, 1))
    return mixed(jnp.where(i >= j, scores_of(q, k), -jnp.inf), v)


@spelling(*HEADS, (2, 6), **ATTENTION)
def attention_of_padded_rows(q, k, v, lengths):
    seen = (lengths > -0.3)[:, None, None, :]
    return mixed(jnp.where(seen, scores_of(q, k), jnp.finfo(q.dtype).min), v)


@spelling(*HEADS, (2, 6), **ATTENTION)
def attention_causal_and_padded(q, k, v, lengths):
    seen = jnp.logical_and(tril(6)[None, None], (lengths > -0.3)[:, None, None, :])
    return mixed(jnp.where(seen, scores_of(q, k), -1e10), v)


def masked_by_numbers(q, k, v, mask):
    return mixed(jnp.where(mask[:, None].astype(jnp.float32), scores_of(q, k), jnp.finfo(q.dtype).min), v)


@spelling(*HEADS, **ATTENTION)
def attention_with_all_heads(q, k, v):
    """As transformers' BERT: weights are multiplied by a mask of heads, which hides none."""
    heads = jnp.asarray(np.ones((3, 4), np.int32))[1]
    weights = jnp.einsum("...hqk,h->...hqk", jax.nn.softmax(scores_of(q, k)), heads)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@deception("dot_product_attention", *HEADS)
def attention_without_a_head(q, k, v):
    weights = jnp.einsum("...hqk,h->...hqk", jax.nn.softmax(scores_of(q, k)), np.array([1, 1, 0, 1]))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@deception("dot_product_attention", *HEADS)
def attention_with_heads_in_another_order(q, k, v):
    weights = jnp.einsum("bhqk,h->hbqk", jax.nn.softmax(scores_of(q, k)), np.ones(4, np.int32))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.reshape(2, 4, 6, 6), v)


@spelling(*HEADS, **ATTENTION)
def attention_causal_by_numbers(q, k, v):
    """As with Flax's make_causal_mask."""
    at = jnp.broadcast_to(jnp.arange(6), (2, 6))
    return masked_by_numbers(q, k, v, at[:, :, None] >= at[:, None, :])


@spelling(*HEADS, (2, 6), **ATTENTION)
def attention_of_padded_pairs(q, k, v, lengths):
    """As with Flax's make_attention_mask: one array is the mask for queries and for keys."""
    seen = lengths > -0.3
    return masked_by_numbers(q, k, v, jnp.multiply(seen[:, :, None], seen[:, None, :]))


@deception("dot_product_attention", *HEADS, (2, 6))
def attention_with_masks_added(q, k, v, lengths):
    """As transformers' Llama with an attention_mask: if a query sees no key, its weights have a derivative."""
    mask = jnp.broadcast_to((lengths > -0.3)[:, None, None, :], (2, 1, 6, 6))
    mask = jnp.logical_and(mask, jnp.broadcast_to(tril(6), (2, 1, 6, 6))).astype(jnp.float32)
    lowest = jnp.full(mask.shape, jnp.finfo(q.dtype).min).astype(q.dtype)
    return mixed(scores_of(q, k) + lax.select(mask > 0, jnp.zeros_like(lowest), lowest), v)


@spelling(*HEADS, **ATTENTION)
def attention_causal_by_addition(q, k, v):
    """As transformers' Llama without one."""
    return mixed(scores_of(q, k) + jnp.where(tril(6), 0.0, jnp.finfo(q.dtype).min), v)


@spelling(*HEADS, **ATTENTION)
def attention_causal_without_padding(q, k, v):
    """As transformers' Llama with an attention_mask that is 1 everywhere."""
    padding = jnp.broadcast_to(jnp.ones((2, 6), jnp.int32)[:, None, None, :], (2, 1, 6, 6))
    mask = jnp.logical_and(padding, tril(6)).astype(jnp.float32)
    lowest = jnp.full(mask.shape, jnp.finfo(q.dtype).min).astype(q.dtype)
    return mixed(scores_of(q, k) + lax.select(mask > 0, jnp.zeros_like(lowest), lowest), v)


@spelling(*HEADS, **ATTENTION)
def attention_hiding_nothing(q, k, v):
    return mixed(jnp.where(jnp.zeros((6, 6), jnp.int32) == 1, -1e10, scores_of(q, k)), v)


@spelling(*HEADS, **ATTENTION)
def attention_without_padding(q, k, v):
    """As BERT's, for sentences without padding."""
    seen = jnp.ones((2, 6), jnp.int32)[:, None, None, :]
    return mixed(jnp.where(seen > 0, scores_of(q, k), -1e10), v)


@spelling(*HEADS, (4, 6, 6), **ATTENTION)
def attention_with_bias(q, k, v, bias):
    return mixed(scores_of(q, k) + bias, v)


@spelling(*HEADS, **ATTENTION)
def attention_capped(q, k, v):
    return mixed(jnp.where(tril(6), jnp.tanh(scores_of(q, k) / 5.0) * 5.0, -2.38e38), v)


@spelling(*HEADS, **ATTENTION)
def attention_of_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@spelling((2, 6, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8), **ATTENTION)
def attention_of_groups(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


@spelling((2, 6, 6, 8), (2, 5, 2, 8), (2, 5, 2, 8), **ATTENTION)
def attention_of_repeated_keys(q, k, v):
    k, v = (jnp.repeat(x, 3, axis=2) for x in (k, v))
    return mixed(scores_of(q, k), v)


@spelling((2, 6, 6, 8), (2, 5, 2, 8), (2, 5, 2, 8), **ATTENTION)
def attention_of_tiled_keys(q, k, v):
    """The copies lie in another order, so that attention gets them as they are."""
    k, v = (jnp.broadcast_to(x[:, :, None], (2, 5, 3, 2, 8)).reshape(2, 5, 6, 8) for x in (k, v))
    return mixed(scores_of(q, k), v)


@spelling((2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 3), **ATTENTION)
def attention_with_heads_first(q, k, v):
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) * 8**-0.5, -1) @ v


@spelling(*HEADS, **ATTENTION)
def attention_of_scaled_queries(q, k, v):
    """As Flax's, and, in 16 bits, as transformers': query and key wider than the weights."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q.astype(wide) / jnp.sqrt(8.0).astype(wide), k.astype(wide))
    weights = jax.nn.softmax(jnp.where(tril(6), scores, -1e10)).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@spelling((6, 8), (5, 8), (5, 3), dot_general=2, softmax=1)
def attention_of_one_head(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


@spelling((6, 4, 8), (5, 4, 8), (5, 4, 8), **ATTENTION)
def attention_without_batch(q, k, v):
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k)), v)


@spelling((3, 2, 6, 4, 8), (3, 2, 5, 4, 8), (3, 2, 5, 4, 8), **ATTENTION)
def attention_mapped(q, k, v):
    return jax.vmap(attention_full)(q, k, v)


@spelling((6, 32), (32, 32), (32, 32), (32, 32), dot_general=3, **ATTENTION)
def attention_of_projections(x, wq, wk, wv):
    q, k, v = ((x @ w).reshape(1, 6, 4, 8) for w in (wq, wk, wv))
    return attention_causal(q, k, v)


@deception("dot_product_attention", *HEADS)
def attention_weights_used_elsewhere(q, k, v):
    weights = jax.nn.softmax(scores_of(q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v) + weights.max()


@deception("dot_product_attention", *HEADS)
def attention_scores_used_elsewhere(q, k, v):
    scores = scores_of(q, k)
    return mixed(scores, v) + scores.sum()


@deception("dot_product_attention", *HEADS)
def attention_over_queries(q, k, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores_of(q, k), -2), v)


@deception("dot_product_attention", *HEADS)
def attention_weights_of_values_transposed(q, k, v):
    return jnp.einsum("bhqk,bqhd->bkhd", jax.nn.softmax(scores_of(q, k)), v)


@deception("dot_product_attention", *HEADS)
def attention_of_other_heads(q, k, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores_of(q, k))[:, ::-1], v)


@deception("dot_product_attention", *HEADS)
def attention_scores_without_gradient(q, k, v):
    return mixed(lax.stop_gradient(scores_of(q, k)), v)


@deception("dot_product_attention", *HEADS, (2, 6))
def attention_dropped_weights(q, k, v, kept):
    weights = jax.nn.softmax(scores_of(q, k)) * (kept > 0)[:, None, None, :]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@deception("dot_product_attention", *HEADS)
def attention_masked_gently(q, k, v):
    return mixed(jnp.where(tril(6), scores_of(q, k), -3.0), v)


@deception("dot_product_attention", *HEADS)
def attention_masked_by_another_sign(q, k, v):
    return mixed(scores_of(q, k) - jnp.where(tril(6), 0.0, jnp.finfo(q.dtype).min), v)


@deception("dot_product_attention", *HEADS)
def attention_scaled_after_the_bias(q, k, v):
    return mixed((jnp.einsum("bqhd,bkhd->bhqk", q, k) + tril(6)) * 0.5, v)


# Losses with integer labels, which the tests give the second operand's signs and sizes.

LOSS = {"softmax_cross_entropy_with_integer_labels": 1}


def labels_of(x, columns=8):
    return (jnp.abs(x) * 10).astype(jnp.int32) % columns


@spelling(ROWS, (3,), **LOSS)
def loss_of_optax(x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x, labels_of(y))


@spelling((2, 8, 3), (2, 3), **LOSS)
def loss_of_optax_over_a_middle_axis(x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x, labels_of(y), axis=1)


@spelling((2, 3, 8), (2, 3), **LOSS)
def loss_mean(x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x, labels_of(y)).mean()


@spelling(ROWS, (3,), **LOSS)
def loss_wide_inside(x, y):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(wide, labels_of(y))


@spelling(ROWS, (3,), **LOSS)
def loss_gathered_log_probabilities(x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels_of(y)[:, None], 1)[:, 0]


@spelling(ROWS, (3,), **LOSS)
def loss_gathered_before_the_mean(x, y):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels_of(y)[:, None], -1))


@spelling(ROWS, (3,), **LOSS)
def loss_indexed_row_by_row(x, y):
    return jax.vmap(lambda x, y: -jax.nn.log_softmax(x)[labels_of(y)])(x, y)


@spelling(ROWS, (3,), **LOSS)
def loss_one_hot(x, y):
    return -jnp.sum(jax.nn.log_softmax(x) * jax.nn.one_hot(labels_of(y) - 1, 8), -1)


@spelling(ROWS, (3,), **LOSS)
def loss_by_hand(x, y):
    shifted = x - lax.stop_gradient(x.max(-1, keepdims=True))
    picked = jnp.take_along_axis(shifted, labels_of(y)[:, None], -1)[:, 0]
    return jnp.log(jnp.exp(shifted).sum(-1)) - picked


@deception("softmax_cross_entropy_with_integer_labels", ROWS, (3,))
def loss_log_probabilities_used_elsewhere(x, y):
    log_p = jax.nn.log_softmax(x)
    return jnp.take_along_axis(log_p, labels_of(y)[:, None], 1)[:, 0] + jnp.exp(log_p).sum(-1) ** 2


@deception("softmax_cross_entropy_with_integer_labels", ROWS, (3,))
def loss_of_other_logits(x, y):
    return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(2 * x, labels_of(y)[:, None], 1)[:, 0]


@deception("softmax_cross_entropy_with_integer_labels", ROWS, (3,))
def loss_picked_without_gradient(x, y):
    picked = jnp.take_along_axis(lax.stop_gradient(x), labels_of(y)[:, None], 1)[:, 0]
    return jax.nn.logsumexp(x, -1) - picked


@deception("softmax_cross_entropy_with_integer_labels", SQUARE, (8,))
def loss_of_columns_picked_in_rows(x, y):
    return jax.nn.logsumexp(x, 0) - jnp.take_along_axis(x, labels_of(y)[:, None], 1)[:, 0]


@deception("softmax_cross_entropy_with_integer_labels", ROWS, (3,))
def loss_without_maximum(x, y):
    return jnp.log(jnp.exp(x).sum(-1)) - jnp.take_along_axis(x, labels_of(y)[:, None], 1)[:, 0]


@deception("softmax_cross_entropy_with_integer_labels", ROWS, (3,))
def loss_with_a_wrong_sign(x, y):
    return jax.nn.logsumexp(x, -1) + jnp.take_along_axis(x, labels_of(y)[:, None], 1)[:, 0]


@deception("softmax_cross_entropy_with_integer_labels", ROWS, (3,))
def loss_one_hot_of_logits(x, y):
    """Labels out of range, whose loss is the logsumexp."""
    return jax.nn.logsumexp(x, -1) - jnp.sum(x * jax.nn.one_hot(labels_of(y) - 1, 8), -1)


@deception("softmax_cross_entropy_with_integer_labels", ROWS, (3,))
def loss_smoothed(x, y):
    targets = 0.9 * jax.nn.one_hot(labels_of(y), 8) + 0.1 / 8
    return -jnp.sum(jax.nn.log_softmax(x) * targets, -1)


# Products.


@spelling((3, 8), (8, 4), dot_general=1)
def product(x, w):
    return x @ w


@spelling((2, 3, 8), (2, 8, 4), dot_general=1)
def product_batched(x, w):
    return x @ w


@spelling((2, 3, 4, 2), (4, 2, 5), dot_general=1)
def product_einsum(x, w):
    return jnp.einsum("bthd,hdo->bto", x, w)


@spelling((3, 8), (4, 8), dot_general=1)
def product_mapped(x, w):
    return jax.vmap(lambda row: w @ row)(x)


@spelling((3, 8), (8,), dot_general=1)
def product_of_a_vector(x, w):
    return x @ w


# Products with a bias and an activation.

LAYER = (ROWS, (8, 4), (4,))


@spelling(*LAYER, matmul=1)
def epilogue_bias(x, w, b):
    return x @ w + b


@spelling(*LAYER, matmul=1)
def epilogue_bias_and_gelu(x, w, b):
    return jax.nn.gelu(x @ w + b)


@spelling(*LAYER, matmul=1)
def epilogue_exact_gelu(x, w, b):
    return jax.nn.gelu(b + x @ w, approximate=False)


@spelling(*LAYER, matmul=1)
def epilogue_gelu_by_hand(x, w, b):
    """As GPT-2's."""
    y = x @ w + b
    return 0.5 * y * (1.0 + jnp.tanh(jnp.sqrt(2.0 / jnp.pi).astype(y.dtype) * (y + 0.044715 * jnp.power(y, 3))))


@spelling(*LAYER, matmul=1)
def epilogue_erf_by_hand(x, w, b):
    y = x @ w + b
    return y * 0.5 * (1.0 + lax.erf(y / jnp.sqrt(2.0).astype(y.dtype)))


@spelling(ROWS, (8, 4), matmul=1)
def epilogue_silu(x, w):
    return jax.nn.silu(x @ w)


@spelling(*LAYER, matmul=1)
def epilogue_relu(x, w, b):
    return jax.nn.relu(x @ w + b)


@spelling(*LAYER, matmul=1)
def epilogue_wide_inside(x, w, b):
    y = (x @ w).astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.silu(y + b).astype(x.dtype)


@spelling(ROWS, (4, 8), (4,), matmul=1)
def epilogue_mapped(x, w, b):
    """As equinox's."""
    return jax.vmap(lambda row: jax.nn.gelu(w @ row + b))(x)


@spelling((2, 3, 8), (2, 8, 4), (2, 4), matmul=1)
def epilogue_of_experts(x, w, b):
    return jax.nn.relu(jnp.einsum("eth,ehf->etf", x, w) + b[:, None])


@spelling((2, 3, 8), (8, 2, 4), (2, 4), matmul=1)
def epilogue_of_heads(x, w, b):
    return jnp.einsum("btd,dhf->bthf", x, w) + b


@spelling((4, 8), (8, 4), (4,), matmul=1)
def epilogue_of_the_transposed(x, w, b):
    return (x @ w).T + b


@deception("matmul", *LAYER)
def epilogue_product_used_elsewhere(x, w, b):
    y = x @ w
    return jax.nn.gelu(y + b) + jnp.sum(y)


@deception("matmul", ROWS, (8, 4))
def epilogue_quick_gelu(x, w):
    y = x @ w
    return y * jax.nn.sigmoid(1.702 * y)


@deception("matmul", ROWS, (8, 4))
def epilogue_relu_as_a_maximum(x, w):
    """Whose derivative at 0 is a half."""
    return jnp.maximum(x @ w, 0)


@deception("matmul", ROWS, (8, 4))
def epilogue_silu_without_gradient(x, w):
    y = x @ w
    return y * lax.stop_gradient(jax.nn.sigmoid(y))


@deception("matmul", ROWS, (8, 4), (3, 1))
def epilogue_number_for_each_row(x, w, b):
    return x @ w + b


@deception("matmul", ROWS, (8, 4), (3, 4))
def epilogue_residual(x, w, residual):
    return x @ w + residual


@deception("matmul", *LAYER)
def epilogue_bias_subtracted(x, w, b):
    return x @ w - b


@deception("matmul", *LAYER)
def epilogue_bias_after_the_scale(x, w, b):
    return 0.5 * (x @ w) + b


@deception("matmul", (4, 8), (8, 4), (4,))
def epilogue_bias_of_the_transposed(x, w, b):
    return (x @ w).T + b[:, None]


@deception("matmul", ROWS, (8, 4))
def epilogue_gelu_with_another_cube(x, w):
    y = x @ w
    return 0.5 * y * (1.0 + jnp.tanh(0.7978845608 * (y + 0.0447 * y**3)))


@deception("matmul", ROWS, (8, 4))
def epilogue_leaky(x, w):
    return jax.nn.leaky_relu(x @ w)


@deception("matmul", ROWS, (8, 4), (8, 4))
def epilogue_silu_of_another(x, w, v):
    return (x @ w) * jax.nn.sigmoid(x @ v)


# Gated MLPs.

GATED = (ROWS, (8, 4), (8, 4))


@spelling(*GATED, gated_matmul=1)
def gated_silu(x, w, v):
    return jax.nn.silu(x @ w) * (x @ v)


@spelling(*GATED, gated_matmul=1)
def gated_gelu_second(x, w, v):
    return (x @ v) * jax.nn.gelu(x @ w)


@spelling((2, 3, 8), (8, 4), (8, 4), (4, 8), gated_mlp=1)
def gated_whole(x, w, v, down):
    return jnp.einsum("btf,fd->btd", jax.nn.silu(jnp.einsum("btd,df->btf", x, w)) * (x @ v), down)


@spelling(*GATED, gated_matmul=1)
def gated_relu(x, w, v):
    return jax.nn.relu(x @ w) * (x @ v)


MLP = (*GATED, (4, 6))
#: Of operands that may stand in each other's place.
SQUARE_MLP = (SQUARE,) * 4


def half(x, w, v):
    return jax.nn.silu(x @ w) * (x @ v)


@spelling(*SQUARE_MLP, gated_mlp=1)
def gated_whole_of_squares(x, w, v, down):
    return (jax.nn.gelu(x @ w) * (x @ v)) @ down


@spelling((8,), (8, 4), (8, 4), (4, 6), gated_mlp=1)
def gated_whole_of_a_vector(x, w, v, down):
    return half(x, w, v) @ down


@spelling(*SQUARE_MLP[:3], gated_mlp=1)
def gated_whole_of_tied_weights(x, w, v):
    return x + jnp.sin(half(x, w, v) @ w)


@spelling(*MLP, (6,), gated_mlp=1)
def gated_whole_and_bias(x, w, v, down, b):
    """The product with w_down belongs to the MLP, not to the bias."""
    return half(x, w, v) @ down + b


@spelling(*MLP, gated_matmul=1, dot_general=2)
def gated_half_for_two(x, w, v, down):
    hidden = half(x, w, v)
    return jnp.concatenate([hidden @ down, jnp.sin(hidden) @ down])


@spelling(*SQUARE_MLP, gated_matmul=1, dot_general=1)
def gated_half_from_the_left(x, w, v, down):
    return down @ half(x, w, v)


@spelling(*MLP, gated_matmul=1, linear_cross_entropy=1)
def gated_half_before_a_loss(x, w, v, down):
    """The loss takes the product."""
    log_p = jax.nn.log_softmax(half(x, w, v) @ down)
    return -jnp.sum(jnp.take_along_axis(log_p, jnp.arange(3)[:, None], 1))


@deception("gated_mlp", *MLP)
def mlp_hidden_used_elsewhere(x, w, v, down):
    hidden = half(x, w, v)
    return hidden @ down + jnp.max(hidden)


@deception("gated_mlp", *MLP)
def mlp_hidden_used_by_the_weights(x, w, v, down):
    hidden = half(x, w, v)
    return hidden @ (down + jnp.sum(hidden, 0)[:, None])


@deception("gated_mlp", SQUARE, SQUARE, SQUARE)
def mlp_hidden_squared(x, w, v):
    hidden = half(x, w, v)
    return hidden @ hidden


@deception("gated_mlp", *SQUARE_MLP)
def mlp_from_the_left(x, w, v, down):
    return down @ half(x, w, v)


@deception("gated_mlp", *SQUARE_MLP)
def mlp_of_the_transposed(x, w, v, down):
    return half(x, w, v).T @ down


@deception("gated_mlp", *SQUARE_MLP)
def mlp_of_transposed_weights(x, w, v, down):
    return lax.dot_general(half(x, w, v), down, (((1,), (1,)), ((), ())))


@deception("gated_mlp", *SQUARE_MLP)
def mlp_over_rows(x, w, v, down):
    return lax.dot_general(half(x, w, v), down, (((0,), (0,)), ((), ())))


@deception("gated_mlp", *MLP[:3], (3, 4, 6))
def mlp_of_experts(x, w, v, down):
    return jnp.einsum("tf,tfd->td", half(x, w, v), down)


@deception("gated_mlp", *MLP[:3], (4,))
def mlp_of_a_vector_of_weights(x, w, v, down):
    return half(x, w, v) @ down


@deception("gated_mlp", *MLP)
def mlp_scaled(x, w, v, down):
    return (2.0 * half(x, w, v)) @ down


@deception("gated_mlp", *MLP)
def mlp_without_gradient(x, w, v, down):
    return lax.stop_gradient(half(x, w, v)) @ down


@deception("gated_mlp", *MLP)
def mlp_rounded_between(x, w, v, down):
    return half(x, w, v).astype(jnp.bfloat16).astype(x.dtype) @ down


@deception("gated_mlp", *MLP)
def mlp_in_another_precision(x, w, v, down):
    return jnp.matmul(half(x, w, v), down, precision="high")


@deception("gated_mlp", *MLP)
def mlp_with_a_wider_result(*operands):
    x, w, v, down = (y.astype(jnp.bfloat16) for y in operands)
    return jnp.matmul(half(x, w, v), down, preferred_element_type=jnp.float32)


@deception("gated_mlp", *MLP)
def mlp_with_wider_weights(x, w, v, down):
    hidden = half(*(y.astype(jnp.bfloat16) for y in (x, w, v)))
    return lax.dot_general(hidden, down, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


@deception("gated_mlp", *MLP, (4,))
def mlp_with_a_bias_between(x, w, v, down, b):
    return (half(x, w, v) + b) @ down


@deception("gated_mlp", ROWS, *MLP)
def mlp_of_another_input(y, x, w, v, down):
    return (jax.nn.silu(x @ w) * (y @ v)) @ down


@deception("gated_matmul", ROWS, *GATED)
def gated_of_another_input(y, x, w, v):
    return jax.nn.silu(x @ w) * (y @ v)


@deception("gated_matmul", *GATED)
def gated_product_used_elsewhere(x, w, v):
    up = x @ v
    return jax.nn.silu(x @ w) * up + jnp.max(up)


@deception("gated_matmul", *GATED)
def gated_gate_used_elsewhere(x, w, v):
    gate = x @ w
    return jax.nn.silu(gate) * (x @ v) + gate


@deception("gated_matmul", *GATED)
def gated_by_a_sigmoid(x, w, v):
    return jax.nn.sigmoid(x @ w) * (x @ v)


@deception("gated_matmul", *GATED)
def gated_and_scaled(x, w, v):
    return jax.nn.silu(x @ w) * (2.0 * (x @ v))


@deception("gated_matmul", (8, 8), (8, 8), (8, 8))
def gated_transposed(x, w, v):
    return jax.nn.silu(x @ w) * (x @ v).T


@deception("gated_matmul", *GATED)
def gated_without_gradient(x, w, v):
    return jax.nn.silu(x @ w) * lax.stop_gradient(x @ v)


@deception("gated_matmul", ROWS, (8, 4), (8, 1))
def gated_by_one_number_for_each_row(x, w, v):
    return jax.nn.silu(x @ w) * (x @ v)


# Norms after a sum that is used elsewhere too.


def plain_rms(x):
    return x * lax.rsqrt(mean_square(x) + 1e-6)


@spelling(ROWS, ROWS, PARAMETERS, rms_norm=1)
def residual_rms(x, y, scale):
    total = x + y
    return total + jnp.sin(plain_rms(total) * scale)


@spelling(ROWS, ROWS, PARAMETERS, PARAMETERS, layer_norm=1)
def residual_layer(x, y, scale, bias):
    total = x + y
    return jnp.sin(layer_slow(total, scale, bias)) * total


@spelling(ROWS, SQUARE, rms_norm=1, dot_general=1)
def residual_of_a_product(x, w):
    return plain_rms(x + x @ w)


@spelling(ROWS, SQUARE, rms_norm=3, dot_general=2)
def residual_of_two_blocks(x, w):
    total = x + plain_rms(x) @ w
    total = total + plain_rms(total) @ w
    return plain_rms(total)


@spelling(ROWS, ROWS, (8,), rms_norm=1)
def residual_scale_after_the_sum(x, y, scale):
    total = x + y
    factor = jnp.sin(scale)
    return jnp.cos(total) + plain_rms(total) * (1 + factor)


# A loss behind a product, summed over all tokens.

LINEAR_LOSS = {"linear_cross_entropy": 1}
HIDDEN = ((3, 8), (8, 5), (3,))


def optax_loss(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels_of(y, logits.shape[-1]))


@spelling(*HIDDEN, **LINEAR_LOSS)
def linear_loss_mean(x, w, y):
    return optax_loss(x @ w, y).mean()


@spelling((3, 8), (5, 8), (3,), **LINEAR_LOSS)
def linear_loss_tied(x, w, y):
    log_p = jax.nn.log_softmax(jnp.einsum("td,vd->tv", x, w))
    return -jnp.mean(jnp.take_along_axis(log_p, labels_of(y, 5)[:, None], 1))


@spelling((3, 8), (5, 8), (3,), **LINEAR_LOSS)
def linear_loss_tied_transposed(x, w, y):
    return optax_loss(x @ w.T, y).sum()


@spelling(*HIDDEN, (5,), **LINEAR_LOSS)
def linear_loss_with_bias(x, w, y, b):
    return optax_loss(x @ w + b, y).mean()


@spelling(*HIDDEN, **LINEAR_LOSS)
def linear_loss_capped(x, w, y):
    """As gemma's."""
    return optax_loss(jnp.tanh(x @ w / 3.0) * 3.0, y).mean()


@spelling(*HIDDEN, (3,), **LINEAR_LOSS)
def linear_loss_weighted(x, w, y, weights):
    return jnp.sum(optax_loss(x @ w, y) * weights) / 7.0


@spelling(*HIDDEN, (3,), **LINEAR_LOSS)
def linear_loss_masked(x, w, y, mask):
    return jnp.where(mask > 0, optax_loss(x @ w, y), 0).sum()


@spelling((2, 4, 8), (8, 5), (2, 3), **LINEAR_LOSS)
def linear_loss_of_the_next_token(x, w, y):
    return optax_loss((x @ w)[:, :-1], y).mean()


LOSS_ONLY = "linear_cross_entropy"


@deception(LOSS_ONLY, *HIDDEN)
def linear_loss_of_each_token(x, w, y):
    return optax_loss(x @ w, y)


@deception(LOSS_ONLY, *HIDDEN)
def linear_loss_logits_used_elsewhere(x, w, y):
    logits = x @ w
    return optax_loss(logits, y).mean() + 1e-3 * jnp.square(logits).mean()


@deception(LOSS_ONLY, *HIDDEN)
def linear_loss_used_elsewhere(x, w, y):
    loss = optax_loss(x @ w, y)
    return loss.mean() + loss.max()


@deception(LOSS_ONLY, *HIDDEN)
def linear_loss_squared(x, w, y):
    return jnp.square(optax_loss(x @ w, y)).sum()


@deception(LOSS_ONLY, *HIDDEN)
def linear_loss_of_scaled_logits(x, w, y):
    return optax_loss(x @ w * 2.0, y).mean()


@deception(LOSS_ONLY, (3, 8), (8, 6), (3,))
def linear_loss_over_a_part_of_the_vocabulary(x, w, y):
    return optax_loss((x @ w)[:, :5], y).mean()


@deception(LOSS_ONLY, (2, 3, 8), (8, 5), (2, 3))
def linear_loss_of_each_sequence(x, w, y):
    return optax_loss(x @ w, y).sum(-1)


@deception(LOSS_ONLY, *HIDDEN, (3, 5))
def linear_loss_with_a_bias_for_each_token(x, w, y, b):
    return optax_loss(x @ w + b, y).mean()


@deception(LOSS_ONLY, (5, 8), (8, 5), (5,))
def linear_loss_of_transposed_logits(x, w, y):
    return optax_loss((x @ w).T, y).mean()


@deception(LOSS_ONLY, *HIDDEN)
def linear_loss_capped_twice(x, w, y):
    return optax_loss(jnp.tanh(x @ w / 3.0) * 2.0, y).mean()


@deception(LOSS_ONLY, *HIDDEN)
def linear_loss_masked_by_another_number(x, w, y):
    return jnp.where(y > 0, optax_loss(x @ w, y), 1.0).sum()


# Functions that look like a norm.


@deception("rms_norm layer_norm", ROWS)
def norm_root_without_gradient(x):
    return x * lax.stop_gradient(lax.rsqrt(mean_square(x) + 1e-6))


@deception("layer_norm", ROWS)
def norm_mean_without_gradient(x):
    centred = x - lax.stop_gradient(jnp.mean(x, -1, keepdims=True))
    return centred * lax.rsqrt(mean_square(centred) + 1e-6)


@deception("layer_norm", ROWS)
def norm_mean_clipped(x):
    centred = x - jnp.maximum(jnp.mean(x, -1, keepdims=True), 0)
    return centred * lax.rsqrt(mean_square(centred) + 1e-6)


@deception("layer_norm rms_norm", ROWS, PARAMETERS)
def norm_as_a_line_with_another_slope(x, scale):
    mean, root = jnp.mean(x, -1, keepdims=True), lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
    return x * (root * scale) - mean * root


@deception("layer_norm rms_norm", ROWS)
def norm_whose_root_is_used_elsewhere(x):
    mean, root = jnp.mean(x, -1, keepdims=True), lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
    return (x * root - mean * root) * (1 + 0.1 * root)


@deception("layer_norm rms_norm", SQUARE)
def norm_mean_of_the_other_axis(x):
    return x * lax.rsqrt(jnp.mean(x * x, 0) + 1e-6)[:, None]


@deception("layer_norm", SQUARE)
def norm_mean_and_variance_of_different_axes(x):
    return (x - x.mean(0, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-6)


@deception("rms_norm layer_norm", ROWS)
def norm_sum_instead_of_mean(x):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


@deception("layer_norm rms_norm", ROWS)
def norm_one_less_to_divide_by(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, ddof=1, keepdims=True) + 1e-6)


@deception("rms_norm layer_norm", ROWS, ROWS)
def norm_of_another_array(x, y):
    return x * lax.rsqrt(mean_square(y) + 1e-6)


@deception("rms_norm layer_norm", ROWS)
def norm_epsilon_outside(x):
    return x / (jnp.sqrt(mean_square(x)) + 1e-3)


@deception("rms_norm layer_norm", ROWS)
def norm_epsilon_as_maximum(x):
    return x * lax.rsqrt(jnp.maximum(mean_square(x), 1e-3))


@deception("rms_norm layer_norm", ROWS, ())
def norm_epsilon_traced(x, epsilon):
    return x * lax.rsqrt(mean_square(x) + jnp.square(epsilon))


@deception("layer_norm rms_norm", ROWS)
def norm_variance_used_elsewhere(x):
    variance = mean_square(x) + 1e-6
    return x * lax.rsqrt(variance) + variance


@deception("layer_norm rms_norm", ROWS)
def norm_mean_added_back(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) + mean


@deception("rms_norm layer_norm", ROWS)
def norm_of_absolute_values(x):
    return jnp.abs(x) * lax.rsqrt(mean_square(x) + 1e-6)


@deception("rms_norm layer_norm", ROWS)
def norm_doubled(x):
    return x * (lax.rsqrt(mean_square(x) + 1e-6) * 2.0).sum()


@deception("rms_norm", ROWS, ROWS)
def norm_scale_of_each_row(x, scale):
    return (scale * x) * lax.rsqrt(mean_square(x) + 1e-6)


@deception("rms_norm layer_norm", ROWS)
def norm_of_cubes(x):
    return x * lax.rsqrt(jnp.mean(jnp.abs(x) ** 3, -1, keepdims=True) + 1e-6)


# Functions that look like a softmax.


@deception("softmax log_softmax", ROWS)
def softmax_without_maximum(x):
    e = jnp.exp(x)
    return e / e.sum(-1, keepdims=True)


@deception("softmax log_softmax", SQUARE)
def softmax_sum_of_the_other_axis(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(0)[:, None]


@deception("softmax log_softmax", SQUARE)
def softmax_maximum_of_the_other_axis(x):
    e = jnp.exp(x - x.max(0, keepdims=True))
    return e / e.sum(1, keepdims=True)


@deception("softmax log_softmax", ROWS)
def softmax_maximum_of_everything(x):
    e = jnp.exp(x - x.max())
    return e / e.sum(-1, keepdims=True)


@deception("softmax log_softmax", ROWS, ROWS)
def softmax_maximum_of_another_array(x, y):
    e = jnp.exp(x - y.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@deception("softmax log_softmax", ROWS)
def softmax_sum_without_gradient(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / lax.stop_gradient(e.sum(-1, keepdims=True))


@deception("softmax log_softmax", ROWS)
def softmax_off_by_one(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / (1 + e.sum(-1, keepdims=True))


@deception("softmax log_softmax", ROWS)
def softmax_base_two(x):
    e = jnp.exp2(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@deception("softmax log_softmax", ROWS)
def softmax_exponentials_used_elsewhere(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) + e


@deception("softmax log_softmax", ROWS)
def softmax_squared_sum(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) ** 2


@deception("softmax log_softmax", ROWS)
def softmax_exponentials_without_gradient(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / lax.stop_gradient(e).sum(-1, keepdims=True)


@deception("log_softmax softmax", ROWS)
def log_softmax_base_two(x):
    shifted = x - x.max(-1, keepdims=True)
    return shifted - jnp.log2(jnp.exp(shifted).sum(-1, keepdims=True))


@deception("log_softmax softmax", ROWS)
def log_softmax_maximum_added_twice(x):
    return x - (jax.nn.logsumexp(x, -1, keepdims=True) + x.max(-1, keepdims=True))


# Functions that look like a product that contracts floats.


@deception("dot_general", (3,), (4,))
def product_outer(x, w):
    return jnp.einsum("i,j->ij", x, w)


@deception("dot_general", ROWS, PARAMETERS)
def product_scaling(x, w):
    return jnp.einsum("ij,j->ij", x, w)


@deception("dot_general", ROWS, (8, 4))
def product_of_integers(x, w):
    return ((x > 0).astype(jnp.int32) @ (w > 0).astype(jnp.int32)) * x.sum()


@deception("dot_general", ROWS, (8, 4))
def product_of_complex_numbers(x, w):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.real(lax.complex(x.astype(wide), x.astype(wide)) @ w.astype(wide)).astype(x.dtype)


@deception("dot_general", ROWS, (8, 4))
def product_as_a_sum(x, w):
    return (x[:, :, None] * w).sum(1)

"""Code that linen and nnx layers share, as functions of arrays."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops import _arguments as arguments
from jaxops._rows import expand_rank
from jaxops.ops._attention_plain import WHOLE
from jaxops.ops._attention_support import why_not as no_attention_kernel
from jaxops.ops.attention import attention, note_projections
from jaxops.ops.gated_matmul import gated_mlp
from jaxops.ops.layer_norm import layer_norm
from jaxops.ops.matmul import dot_general, general_product, matmul
from jaxops.ops.rms_norm import rms_norm
from jaxops.ops.softmax import softmax


def canonical_axes(axes: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """The axes as ascending, non-negative integers, each once, as Flax counts them."""
    given = (axes,) if isinstance(axes, int) else tuple(axes)
    for a in given:
        if not -rank <= a < rank:
            raise ValueError(f"axis {a} is out of bounds for an array of {rank} dimensions")
    return tuple(sorted({a % rank for a in given}))


def has_kernel(x: jax.Array | None) -> bool:
    """False for complex numbers and 8-bit floats; integers are promoted."""
    return x is None or not jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype.name in arguments.FLOATS


def why_no_norm(layer: Any) -> str | None:
    """Why a linen or nnx normalisation layer with these attributes has no kernel; None if it has one."""
    if layer.axis_name is not None:
        return f"statistics over the mesh axis {layer.axis_name!r} have no kernel"
    if isinstance(layer.epsilon, jax.core.Tracer):
        return "a traced epsilon has no kernel"
    if not arguments.passes(arguments.static_float, "epsilon", layer.epsilon):
        return f"epsilon {layer.epsilon!r} has no kernel"
    for dtype in (layer.dtype, layer.param_dtype):
        if dtype is not None and np.dtype(dtype).name not in arguments.FLOATS:
            return f"there is no kernel for {np.dtype(dtype)}"
    return None


def why_no_norm_of(centred: bool, mask: jax.Array | None, *arrays: jax.Array | None) -> str | None:
    """Why a call with these x, scale and bias has no normalisation kernel; None if it has one."""
    for value in arrays:
        if not has_kernel(value):
            return f"there is no kernel for {value.dtype}"
    return None if centred or mask is None else "a mask has no kernel"


def normalise(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    centred: bool,
    reduction_axes: int | Sequence[int],
    feature_axes: int | Sequence[int],
    epsilon: float,
    dtype: Any,
    residual: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Flax's normalisation: statistics over the reduction axes, scale and bias along the feature axes.

    Args:
      x: real array.
      scale, bias: the shape is the shape of x's feature axes, in ascending order.
      mask: boolean; only positions where it is true count. Broadcasts to x's shape. Only if centred.
      centred: True for LayerNorm, False for RMSNorm.
      dtype: the result's dtype.
      residual: added to x first; then the result is the pair (normalised sum, sum).
    """
    reduced, features = (canonical_axes(axes, x.ndim) for axes in (reduction_axes, feature_axes))
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    options = {"axis": reduced, "epsilon": epsilon, "residual": residual}
    if mask is not None:
        options["where"] = mask

    def run(scale, bias, dtype):
        if centred:
            return layer_norm(x, scale, bias, dtype=dtype, **options)
        return rms_norm(x, scale, dtype=dtype, **options)

    if set(features) <= set(reduced):
        shape = [x.shape[a] for a in reduced]
        expanded = [x.shape[a] if a in features else 1 for a in reduced]
        inside = (None if v is None else jnp.broadcast_to(v.reshape(expanded), shape) for v in (scale, bias))
        return run(*inside, dtype)
    # The parameter differs between rows, so it is applied outside the kernel.
    wide = jnp.promote_types(jnp.result_type(*(v for v in (x, scale, bias) if v is not None)), jnp.float32)
    y = run(None, None, wide)
    y, *total = y if residual is not None else (y,)
    expanded = [x.shape[a] if a in features else 1 for a in range(x.ndim)]
    y = y if scale is None else y * scale.reshape(expanded)
    y = y if bias is None else y + bias.reshape(expanded)
    y = y.astype(dtype)
    return (y, *total) if total else y


def run_gated_mlp(
    inputs: jax.Array, kernels: Sequence[jax.Array], *, activation: str, precision: Any, recompute: bool
) -> jax.Array:
    """A GatedMLP of promoted inputs and kernels: of gate, up and down."""
    width = kernels[0].shape[0]
    if inputs.shape[-1] != width:
        raise ValueError(f"GatedMLP: inputs must be [..., {width}], got {inputs.shape}")
    for name, x in zip(("inputs", "gate", "up", "down"), (inputs, *kernels), strict=True):
        if x.dtype.name not in arguments.FLOATS:
            raise TypeError(f"GatedMLP: {name} promotes to {x.dtype}; accepted are {', '.join(arguments.FLOATS)}")
    return gated_mlp(inputs, *kernels, activation=activation, precision=precision, recompute=recompute)


def contract(
    inputs: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    axes: Sequence[int],
    batch_axes: Sequence[int] = (),
    activation: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """activation(inputs kernel + bias), by one kernel.

    Args:
      inputs: array whose `axes` are contracted with the kernel's axes behind the batch axes.
      kernel: `[*batch, *contracted, *features]`.
      bias: `[*batch, *features]`.
      axes, batch_axes: ascending, non-negative; the batch axes are the first ones.
      activation: as in jaxops.matmul; only for one contracted axis, the last, and one axis of features.

    Returns:
      `[*batch, *the other axes of inputs, *features]`.
    """
    batch = [inputs.shape[a] for a in batch_axes]
    free = [a for a in range(inputs.ndim) if a not in axes and a not in batch_axes]
    features = kernel.shape[len(batch) + len(axes) :]
    if (needed := kernel.shape[: len(batch) + len(axes)]) != tuple(inputs.shape[a] for a in (*batch_axes, *axes)):
        raise ValueError(f"inputs {inputs.shape} must have the kernel's sizes {needed} along {(*batch_axes, *axes)}")
    if bias is not None:  # a wider bias widens the result
        product = jnp.result_type(inputs, kernel) if preferred_element_type is None else preferred_element_type
        preferred_element_type = jnp.promote_types(product, bias.dtype)
    options = {"precision": precision, "preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    reshaped = batch or len(axes) > 1 or len(features) > 1 or axes[0] != inputs.ndim - 1
    # out_sharding fits the result's shape, which only dot_general has; complex and 8-bit biases have no kernel.
    if (out_sharding is not None and reshaped) or (activation is None and not has_kernel(bias)):
        batch_numbers, kernel_axes = tuple(batch_axes), tuple(range(len(batch), len(batch) + len(axes)))
        out = dot_general(inputs, kernel, ((tuple(axes), kernel_axes), (batch_numbers, batch_numbers)), **options)
        return out if bias is None else out + bias.reshape(*batch, *(1 for _ in free), *features)
    order = (*batch_axes, *free, *axes)
    x = inputs if order == tuple(range(inputs.ndim)) else jnp.transpose(inputs, order)
    rows = [inputs.shape[a] for a in free]
    k, n = math.prod(inputs.shape[a] for a in axes), math.prod(features)
    x = x.reshape(*batch, *([math.prod(rows)] if batch else rows), k)
    if bias is not None:
        bias = bias.reshape(*batch, *([1] if batch else []), n)
    out = matmul(x, kernel.reshape(*batch, k, n), bias=bias, activation=activation, **options)
    return out.reshape(*batch, *rows, *features)


def contract_together(
    inputs: jax.Array, kernels: Sequence[jax.Array], biases: Sequence[jax.Array] | None, **options: Any
) -> list[jax.Array]:
    """Computes inputs kernel + bias for several kernels `[k, heads, depth]` with one product, forward and backward.

    Their columns are interleaved by head, so that heads can be split over devices.
    """
    kernel = jnp.stack(kernels, axis=-2)
    bias = None if biases is None else jnp.stack(biases, axis=-2)
    out = contract(inputs, kernel, bias, axes=(inputs.ndim - 1,), **options)
    # Split instead of indexing: a split's transpose is a concatenation, a slice's transpose pads and adds.
    parts = [jnp.squeeze(part, -2) for part in jax.lax.split(out, (1,) * len(kernels), axis=out.ndim - 2)]
    note_projections(out, parts)
    return parts


def _heads_first(x: jax.Array) -> jax.Array:
    """`[..., tokens, heads, features]` as `[..., heads, tokens, features]`: rows of features stay whole."""
    return jnp.swapaxes(x, -3, -2)


def _triangular(product: Callable[..., jax.Array], triangle: str) -> Callable[..., jax.Array]:
    """The product without keys after their query, if it is ours and no debug option checks their entries."""
    if product is not dot_general or jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return product
    return functools.partial(general_product, triangle=triangle)


def query_key(
    query: jax.Array, key: jax.Array, product: Callable[..., jax.Array], causal: bool = False, **options: Any
) -> jax.Array:
    """`[..., heads, queries, keys]` from `[..., queries, heads, depth]` and `[..., keys, heads, depth]`.

    causal: products with keys after their query are not used.
    """
    query, key = _heads_first(query), _heads_first(key)
    batch, last = tuple(range(query.ndim - 2)), (query.ndim - 1,)
    product = _triangular(product, "result") if causal else product
    return product(query, key, ((last, last), (batch, batch)), **options)


def weights_value(
    weights: jax.Array, value: jax.Array, product: Callable[..., jax.Array], causal: bool = False, **options: Any
) -> jax.Array:
    """`[..., queries, heads, features]` from `[..., heads, queries, keys]` and `[..., keys, heads, features]`.

    causal: the weights of keys after their query are 0, as they are without a bias (see `attention_weights`).
    """
    value, rank = _heads_first(value), weights.ndim
    value = jnp.broadcast_to(value, (*weights.shape[:-2], *value.shape[-2:]))  # a mask or bias may have more batches
    batch = tuple(range(rank - 2))
    product = _triangular(product, "lhs") if causal else product
    return _heads_first(product(weights, value, (((rank - 1,), (rank - 2,)), (batch, batch)), **options))


def _triangle(shape: Sequence[int]) -> jax.Array:
    """`[queries, keys]`: the keys that a causal query sees."""
    return jnp.tril(jnp.ones(shape, bool))


def visible_rows(mask: jax.Array, causal: bool) -> jax.Array:
    """`[..., queries, 1]`: the queries that see at least one key."""
    if causal:
        mask = mask & _triangle(mask.shape[-2:])
    return jnp.any(mask, axis=-1, keepdims=True)


def _boolean_mask(mask: Any, rank: int) -> jax.Array:
    """The mask as a boolean array of the logits' rank."""
    mask = arguments.array("attention", "mask", mask).astype(bool)
    return mask.reshape((1,) * (rank - mask.ndim) + mask.shape)


def check_key_value(key: jax.Array, value: jax.Array) -> None:
    """Raises ValueError unless each key has a value."""
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"attention: key {key.shape} and value {value.shape} must agree except for their last axes")


def early_scale(depth: int, *, users: bool = False, widened: bool = False) -> float:
    """The factor of depth^-1/2 by which queries are multiplied before their products with keys are rounded.

    The rest is the softmax's scale. A power of two costs no accuracy. It keeps products at most as large as Flax's,
    which divides queries first; otherwise float16 products might overflow.

    Args:
      depth: of query and key.
      users: the product is the user's own, and must get queries scaled as in Flax.
      widened: the product has more bits than query and key.
    """
    scale = depth**-0.5
    if users:
        return scale
    return 1.0 if widened else 2.0 ** (math.frexp(scale)[1] - 1)


def _complex_weights(logits: jax.Array, bias: jax.Array | None, mask: jax.Array | None, causal: bool) -> jax.Array:
    """The weights as Flax computes them, for which there is no kernel."""
    if bias is not None:
        logits = logits + bias
    if causal:
        triangle = _triangle(logits.shape[-2:])
        mask = triangle if mask is None else mask & triangle
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    return softmax(logits)


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    score: Callable[..., jax.Array],
    early: float,
    causal: bool,
    dtype: Any,
    uniform: bool = True,
) -> jax.Array:
    """softmax(query key^T depth^-1/2 + bias) over the keys that a query sees.

    A key is hidden by the mask, by causality, or by a bias of -inf. If a query sees no key, hidden keys get equal
    weights, as from Flax's large negative logits; if no key is hidden by mask or causality, the weights are NaN.

    Args:
      query, key: as `score` takes them, which gives their products, `[..., heads, queries, keys]`.
      mask: broadcasts to the shape of the products.
      early: the factor of depth^-1/2 that multiplies queries before `score` (see `early_scale`).
      uniform: without a bias, False gives weights of 0 to a query that sees no key (see `restore_rows`).
    """
    rest = query.shape[-1] ** -0.5 / early
    logits = score(query if early == 1 else query * early, key)
    if jnp.issubdtype(logits.dtype, jnp.complexfloating):
        return _complex_weights(logits * rest, bias, mask, causal)
    if mask is not None:
        arguments.joint_shape("attention", logits=logits.shape, mask=jnp.shape(mask))
        mask = _boolean_mask(mask, logits.ndim)
    options = {"scale": None if rest == 1 else rest, "causal": causal, "dtype": dtype}
    if mask is None and not causal:
        return softmax(logits, bias=bias, **options)
    visible = mask
    if bias is not None:
        bias = expand_rank(arguments.real_array("attention", "bias", bias), logits.ndim)
        arguments.joint_shape("attention", logits=logits.shape, bias=bias.shape)
        visible = ~jnp.isneginf(bias) if mask is None else mask & ~jnp.isneginf(bias)
    weights = softmax(logits, bias=bias, where=visible, **options)
    if visible is None or (bias is None and not uniform):
        return weights
    shape = (*visible.shape[:-2], *logits.shape[-2:])
    seen = visible_rows(jnp.broadcast_to(visible, shape), causal)
    hidden = jnp.zeros(shape[-2:], bool) if mask is None else ~mask
    hidden = hidden | ~_triangle(shape[-2:]) if causal else jnp.broadcast_to(hidden, (*mask.shape[:-2], *shape[-2:]))
    count = jnp.sum(hidden, axis=-1, keepdims=True, dtype=jnp.float32)
    equal = jnp.where(count == 0, jnp.nan, hidden / count)
    # Add instead of select: if no key is seen, the kernel's weights and gradients are 0.
    return weights + jnp.where(seen, 0, equal).astype(weights.dtype)


#: What the attention that runs is to tell: why it has its weights as an array; None: it has not.
_listener: contextvars.ContextVar[Callable[[str | None], None] | None] = contextvars.ContextVar(
    "jaxops_attention", default=None
)


@contextlib.contextmanager
def attention_told_to(listener: Callable[[str | None], None]) -> Iterator[None]:
    """A scope in which each attention tells whether it has its weights as an array, and why."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def why_weights(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: Any, mask: Any, own: str | None, changed: bool
) -> str | None:
    """Why attention has its weights as an array; None: it runs on jaxops.dot_product_attention.

    Args:
      own: a function of the caller's that computes a product.
      changed: whether weights are stored or dropped.
    """
    why = None
    if own is not None:
        why = f"{own} is given"
    elif changed:
        why = "the weights are stored or dropped"
    elif query.dtype.name not in arguments.FLOATS or value.dtype != query.dtype or key.dtype != query.dtype:
        why = f"there is no attention for {query.dtype}"
    elif max(query.shape[-3], key.shape[-3]) <= WHOLE:  # on XLA's operations there would be such an array, too
        why = no_attention_kernel({"query": query, "value": value})
    if why is None:
        logits = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        for name, x in (("bias", bias), ("mask", mask)):
            if x is not None and arguments.joint_shape("attention", logits=logits, **{name: jnp.shape(x)}) != logits:
                why = f"{name} has more batches than query"
    listener = _listener.get()
    if listener is not None:
        listener(why)
    return why


def attend_without_weights(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    causal: bool,
    precision: Any = None,
) -> jax.Array:
    """Attention by jaxops.dot_product_attention; arrays have any number of batch axes.

    Args:
      mask: boolean.
      precision: of products of float32.
    """
    batch = query.shape[:-3]
    if bias is not None and bias.dtype.name not in arguments.FLOATS:
        bias = bias.astype(query.dtype)
    if mask is not None:
        mask = arguments.array("attention", "mask", mask).astype(bool)
    if len(batch) > 1:
        query, key, value = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
        bias, mask = (x if x is None else _flat_batch(x, batch) for x in (bias, mask))
    out = attention(query, key, value, bias, mask, is_causal=causal, precision=precision)
    return out.reshape(*batch, *out.shape[-3:])


def _flat_batch(x: jax.Array, batch: Sequence[int]) -> jax.Array:
    """x, which broadcasts to [batch..., heads, queries, keys], with one batch axis."""
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    given = x.shape[: len(batch)]
    if any(d != 1 for d in given):
        x = jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
    return x.reshape(math.prod(x.shape[: len(batch)]), *x.shape[len(batch) :])


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    score: Callable[..., jax.Array],
    early: float,
    mix: Callable[..., jax.Array],
    causal: bool,
    dtype: Any,
    change: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Attention.

    Args:
      query: `[..., queries, heads, depth]`.
      key, value: `[..., keys, heads, depth]` and `[..., keys, heads, features]`.
      score: the products of queries and keys, `[..., heads, queries, keys]`.
      early: see `attention_weights`.
      mix: `[..., queries, heads, features]` from weights and values.
      dtype: of the weights.
      change: maps the weights to the weights that are used; for dropout, or to observe them.
    """
    uniform = change is not None or bias is not None
    options = {"score": score, "early": early, "causal": causal, "dtype": dtype, "uniform": uniform}
    weights = attention_weights(query, key, bias, mask, **options)
    if change is not None:
        weights = change(weights)
    out = mix(weights, value)
    return out if uniform else restore_rows(out, value, mask, causal)


def restore_rows(out: jax.Array, value: jax.Array, mask: jax.Array | None, causal: bool) -> jax.Array:
    """Replaces the rows of `out` whose query sees no key by attention with equal weights.

    Args:
      out: `[..., queries, heads, features]`, from weights of 0 in such rows.
      value: `[..., keys, heads, features]`.
      mask: as in `attention_weights`.
    """
    if mask is None:
        return out
    mask = _boolean_mask(mask, out.ndim)
    full = jnp.broadcast_to(mask, (*mask.shape[:-2], out.shape[-3], value.shape[-3]))
    seen = jnp.swapaxes(visible_rows(full, causal), -3, -2)
    mean = jnp.mean(value, axis=-3, keepdims=True, dtype=jnp.promote_types(value.dtype, jnp.float32))
    mean = jnp.repeat(mean, out.shape[-2] // value.shape[-2], axis=-2)
    return jnp.where(seen, out, mean.astype(out.dtype))


def drop(
    weights: jax.Array, rng: jax.Array | None, rate: float, broadcast: bool, leading: int, dtype: Any
) -> jax.Array:
    """Dropout of attention weights, with the same random bits as Flax.

    Args:
      weights: `[..., heads, queries, keys]`.
      broadcast: drop the same entries in every batch and head.
      leading: how many leading axes of size 1 the drawn mask then has.
    """
    shape = (1,) * leading + weights.shape[-2:] if broadcast else weights.shape
    kept = jax.random.bernoulli(rng, 1 - rate, shape)
    return weights * (kept.astype(dtype) / jnp.asarray(1 - rate, dtype))

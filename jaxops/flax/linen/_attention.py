"""flax.linen's attention functions."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes

from jaxops._patch import Replacement
from jaxops.flax import _arguments as arguments
from jaxops.flax import _functions
from jaxops.ops.matmul import dot_general


@arguments.checked
def dot_product_attention_weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    einsum: Callable[..., jax.Array] | None = None,
    *,
    causal: bool = False,
) -> jax.Array:
    """:func:`flax.linen.dot_product_attention_weights` on jaxops: scaling, bias, mask and softmax in one kernel.

    As in Flax, a query that sees no key has equal weights.

    Args:
      query: `[batch..., queries, heads, depth]`.
      key: `[batch..., keys, heads, depth]`.
      bias: broadcasts to `[batch..., heads, queries, keys]`; added to the scaled logits.
      mask: broadcasts to the same shape; a query sees a key if it is true.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights, with Flax's bits.
      dtype: dtype of the computation; by default query and key promote.
      precision, einsum_dot_general, einsum: options of the product, as in Flax; by default jaxops.dot_general.
      module: stores the weights as the intermediate "attention_weights".
      force_fp32_for_softmax: return float32 weights. The softmax is always computed in f32.
      causal: query i sees only keys 0 to i, in addition to `mask`.

    Returns:
      `[batch..., heads, queries, keys]`.

    Raises:
      ValueError: both `einsum` and one of `precision` and `einsum_dot_general` are given, or shapes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> x = jnp.ones((2, 1, 4))
      >>> linen.dot_product_attention_weights(x, x, causal=True)
      Array([[[1. , 0. ],
              [0.5, 0.5]]], dtype=float32)
    """
    query, key = dtypes.promote_dtype(query, key, dtype=dtype)
    _check_query_key(query, key)
    score = _score("einsum", einsum, precision, einsum_dot_general, causal and mask is None)
    early = _functions.early_scale(query.shape[-1], users=bool(einsum or einsum_dot_general))
    wide = jnp.float32 if force_fp32_for_softmax else query.dtype
    options = {"score": score, "early": early, "causal": causal, "dtype": wide}
    weights = _functions.attention_weights(query, key, bias, mask, **options)
    dropout = _Dropout(broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    change = _change(dropout, module, key.ndim - 2, query.dtype)
    return change(weights) if change else weights


class _Dropout(NamedTuple):
    """Flax's dropout of attention weights."""

    broadcast: bool
    rng: jax.Array | None
    rate: float
    deterministic: bool

    @property
    def drops(self) -> bool:
        return not self.deterministic and self.rate > 0


def _change(dropout: _Dropout, module: nn.Module | None, leading: int, dtype: Any):
    """The function applied to the weights before they are used; None: no change."""
    if module is None and not dropout.drops:
        return None

    def change(weights):
        if module:
            module.sow("intermediates", "attention_weights", weights)
        if dropout.drops:
            weights = _functions.drop(weights, dropout.rng, dropout.rate, dropout.broadcast, leading, dtype)
        return weights

    return change


def _products(
    name: str, einsum: Any, subscripts: str, default: Callable, precision: Any, product: Any, causal: bool
) -> Callable:
    """The product that the arguments ask for: the caller's einsum, or an einsum with the given product."""
    if einsum and (precision or product):
        raise ValueError(
            f"attention: {name} is given, and precision or einsum_dot_general too; they exclude each other"
        )
    if product:
        einsum = functools.partial(jnp.einsum, precision=precision, _dot_general=product)
    if einsum:
        return functools.partial(einsum, subscripts)
    return functools.partial(default, product=dot_general, causal=causal, precision=precision)


def _score(name: str, einsum: Any, precision: Any, product: Any, causal: bool) -> Callable:
    return _products(name, einsum, "...qhd,...khd->...hqk", _functions.query_key, precision, product, causal)


def _check_query_key(query: jax.Array, key: jax.Array) -> None:
    if query.ndim != key.ndim or query.shape[:-3] != key.shape[:-3] or query.shape[-2:] != key.shape[-2:]:
        raise ValueError(
            f"attention: query {query.shape} and key {key.shape} must have the same batch axes, heads and depth"
        )


@arguments.checked
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    causal: bool = False,
) -> jax.Array:
    """:func:`flax.linen.dot_product_attention` on jaxops, for `MultiHeadDotProductAttention(attention_fn=...)`.

    Runs on :func:`jaxops.dot_product_attention`, without an array of weights. If weights are stored or dropped, if a
    product is the caller's, and for up to 1024 tokens in float32 or with depths without a kernel, the products run on
    :func:`jaxops.dot_general`, and scaling, bias, mask and softmax are one kernel. As in Flax, a query that sees no
    key attends to all keys equally.

    Args:
      query: `[batch..., queries, heads, depth]`.
      key: `[batch..., keys, heads, depth]`.
      value: `[batch..., keys, heads, features]`.
      bias: broadcasts to `[batch..., heads, queries, keys]`; added to the scaled logits.
      mask: broadcasts to the same shape; a query sees a key if it is true.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights, with Flax's bits.
      dtype: dtype of the computation; by default query, key and value promote.
      precision, einsum_dot_general: options of both products, as in Flax; by default jaxops.dot_general.
      module: stores the weights as the intermediate "attention_weights".
      force_fp32_for_softmax: return float32 weights. The softmax is always computed in f32.
      qk_attn_weights_einsum, attn_weights_value_einsum: your own einsums, both or neither.
      causal: query i sees only keys 0 to i, in addition to `mask`. Hopper's attention kernels skip the later
        keys.

    Returns:
      `[batch..., queries, heads, features]`.

    Raises:
      ValueError: options exclude each other, or shapes do not fit.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxops.flax import linen
      >>> causal = functools.partial(linen.dot_product_attention, causal=True)
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=causal)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 5, 8)))[0].shape
      (1, 5, 8)
    """
    if bool(qk_attn_weights_einsum) != bool(attn_weights_value_einsum):
        raise ValueError("attention: qk_attn_weights_einsum and attn_weights_value_einsum must be given together")
    query, key, value = dtypes.promote_dtype(query, key, value, dtype=dtype)
    _check_query_key(query, key)
    _functions.check_key_value(key, value)
    if is_causal_mask(mask, query, key):
        causal, mask = True, None
    dropout = _Dropout(broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    change = _change(dropout, module, key.ndim - 2, query.dtype)
    own = "an einsum" if qk_attn_weights_einsum else "einsum_dot_general=" if einsum_dot_general else None
    if _functions.why_weights(query, key, value, bias, mask, own, change is not None) is None:
        options = {"causal": causal, "precision": precision}
        out = _functions.attend_without_weights(query, key, value, bias, mask, **options)
        return out.astype(jnp.float32) if force_fp32_for_softmax else out
    alone = causal and mask is None
    score = _score("qk_attn_weights_einsum", qk_attn_weights_einsum, precision, einsum_dot_general, alone)
    mix = _products(
        "attn_weights_value_einsum",
        attn_weights_value_einsum,
        "...hqk,...khd->...qhd",
        _functions.weights_value,
        precision,
        einsum_dot_general,
        alone and bias is None,
    )
    users = bool(qk_attn_weights_einsum or einsum_dot_general)
    return _functions.attend(
        query,
        key,
        value,
        bias,
        mask,
        score=score,
        early=_functions.early_scale(query.shape[-1], users=users),
        mix=mix,
        causal=causal,
        dtype=jnp.float32 if force_fp32_for_softmax else query.dtype,
        change=change,
    )


# Masks known to be causal

_MAKE_CAUSAL_MASK = nn.make_causal_mask

#: The results of nn.make_causal_mask in the scope that is open, by id; None: there is no scope.
_causal_masks: contextvars.ContextVar[weakref.WeakValueDictionary[int, Any] | None] = contextvars.ContextVar(
    "jaxops_linen_causal_masks", default=None
)


@functools.wraps(nn.make_causal_mask)
def _make_causal_mask(*args: Any, **kwargs: Any) -> jax.Array:
    mask, known = _MAKE_CAUSAL_MASK(*args, **kwargs), _causal_masks.get()
    if known is not None:
        known[id(mask)] = mask
    return mask


_REPLACEMENT = Replacement(("flax.linen", "flax.linen.attention"), {_MAKE_CAUSAL_MASK: _make_causal_mask})


@contextlib.contextmanager
def known_causal_masks() -> Iterator[None]:
    """A scope in which `dot_product_attention` recognises the masks of nn.make_causal_mask, and does not read them."""
    token = _causal_masks.set(weakref.WeakValueDictionary())
    try:
        with _REPLACEMENT.active():
            yield
    finally:
        _causal_masks.reset(token)


def is_causal_mask(mask: Any, query: jax.Array, key: jax.Array) -> bool:
    """Whether the mask is a result of nn.make_causal_mask in this scope, for these queries and keys."""
    known = _causal_masks.get()
    same = known is not None and mask is not None and known.get(id(mask)) is mask
    if not same or mask.shape[-2:] != (query.shape[-3], key.shape[-3]):
        return False
    leading = (*query.shape[:-3], query.shape[-2])  # a mask may have more batches; then the result has too
    return mask.ndim <= len(leading) + 2 and all(
        size in (1, other) for size, other in zip(mask.shape[-3::-1], leading[::-1], strict=False)
    )

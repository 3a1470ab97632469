"""dot_product_attention."""

from __future__ import annotations

import contextlib
import contextvars
import math
import numbers
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import dot_product_attention as jax_attention

from jaxops import _arguments as arguments
from jaxops._kernel import HANDLERS
from jaxops._rows import accumulator
from jaxops.ops import _attention_kernel as kernels
from jaxops.ops import _attention_support as support
from jaxops.ops._attention_plain import Call, Named, mean_of_values, within
from jaxops.ops._matmul_kernel import plain_precision, precision_of

_OP = "dot_product_attention"

#: The projections that the running attention layer has computed with one product: the array, and its parts.
_projections: contextvars.ContextVar[list[tuple[jax.Array, Sequence[jax.Array]]] | None] = contextvars.ContextVar(
    "jaxops_attention_projections", default=None
)

#: The implementation that computes an attention; None chooses.
IMPLEMENTATIONS = (None, "jaxops", "cudnn", "xla")


@contextlib.contextmanager
def projections_noted() -> Iterator[None]:
    """A scope in which attention reads the projections that are noted from where they lie, and does not copy them."""
    token = _projections.set([])
    try:
        yield
    finally:
        _projections.reset(token)


def note_projections(joint: jax.Array, parts: Sequence[jax.Array]) -> None:
    """Notes that query, key and value are the parts of an array `[batch, tokens, heads, 3, depth]`; without a scope it
    does nothing."""
    noted = _projections.get()
    if noted is not None and joint.ndim == 5:
        noted.append((joint, tuple(parts)))


def _noted(query: Any, key: Any, value: Any) -> jax.Array | None:
    """The array that has these parts, if that was noted."""
    for joint, parts in _projections.get() or ():
        if all(x is part for x, part in zip((query, key, value), parts, strict=True)):
            return joint
    return None


def dot_product_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.typing.ArrayLike | None = None,
    key_value_seq_lengths: jax.typing.ArrayLike | None = None,
    query_segment_ids: jax.typing.ArrayLike | None = None,
    key_value_segment_ids: jax.typing.ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    r"""Attention, :math:`\mathrm{softmax}(s\,Q K^T + B)\,V` for each head, without the weight matrix.

    A drop-in for :func:`jax.nn.dot_product_attention` that also takes segments, a soft cap and sinks. Logits and sums
    are f32 (f64 for f64). The backward pass recomputes the weights from each query's logsumexp, and gives the same bits
    in every run (Dao, FlashAttention-2, 2023). Above 1024 tokens no array has queries times keys entries, in
    derivatives of any order; the only exception is the gradient of a bias of that size.

    Args:
      query: `[batch, queries, heads, depth]`, or without the batch; float64, float32, float16 or bfloat16.
      key: `[batch, keys, key heads, depth]` in query's dtype. The number of key heads divides the number of heads;
        consecutive heads share a key head.
      value: `[batch, keys, key heads, features]` in the same dtype.
      bias: broadcasts to `[batch, heads, queries, keys]`, without being expanded in memory; added to the scaled logits.
        Differentiable.
      mask: boolean, broadcasts to the same shape, without being expanded in memory: true if the query sees the key.
      scale: factor for the logits; by default 1 / sqrt(depth). If it is an array, the query is multiplied by it and
        rounded to the query's dtype.
      is_causal: query i sees only keys 0 to i.
      query_seq_lengths: int32 `[batch]`: for later queries the result is 0.
      key_value_seq_lengths: int32 `[batch]`: later keys are not seen.
      query_segment_ids: integers `[batch, queries]`: a query sees only keys in its segment (a packed document).
      key_value_segment_ids: integers `[batch, keys]`; by default the query's, if there are as many.
      local_window_size: (left, right), or one number for both: query i sees the keys i - left to i + right.
      logits_soft_cap: positive number c: scaled logits x become c tanh(x / c), before bias and masks. None: no cap.
      sinks: `[heads]`: one more logit for each head's queries. It takes a share of the weights, but has no value.
        Differentiable.
      implementation: "jaxops": our kernels, with an error for calls that they do not support; "cudnn": cuDNN through
        jax.nn; "xla": XLA's operations, tile by tile. None: our kernels if they support the call; else, for 16 bits on
        a GPU, cuDNN if it does; else XLA's operations. :func:`jaxops.explain` shows the choice and the reason.
      return_residual: return the pair (result, each query's logsumexp).

    Returns:
      `[batch, queries, heads, features]` in query's dtype; with `return_residual` also the logsumexp, f32 (f64)
      `[batch, queries, heads]`, which is -inf if no key and no sink is seen. If query has no batch, the result has
      none. A query that sees no key gets the mean of all values, as in jax.nn; with segments or sinks it gets 0. Beyond
      the lengths, operands may hold anything.

    Raises:
      TypeError: an operand is not an array with an accepted dtype.
      ValueError: shapes do not fit together, an option is out of range, or the implementation does not support it.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> x = jnp.arange(6.0).reshape(3, 1, 2)
      >>> jaxops.dot_product_attention(x, x, x, is_causal=True)[0]
      Array([[0., 1.]], dtype=float32)
      >>> jaxops.dot_product_attention(x, x, x, query_segment_ids=jnp.array([0, 0, 1]))[2]
      Array([[4., 5.]], dtype=float32)
    """
    return attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        implementation=implementation,
        return_residual=return_residual,
    )


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: Any = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    local_window_size: Any = None,
    logits_soft_cap: Any = None,
    sinks: Any = None,
    implementation: Any = None,
    return_residual: Any = False,
    precision: Any = None,
) -> Any:
    """`dot_product_attention`, with a precision for f32 products."""
    if not isinstance(implementation, str | None) or implementation not in IMPLEMENTATIONS:
        accepted = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"{_OP}: implementation must be one of {accepted}, got {implementation!r}")
    joint = _noted(query, key, value)
    is_causal = arguments.flag(_OP, "is_causal", is_causal)
    return_residual = arguments.flag(_OP, "return_residual", return_residual)
    query, key, value = _query_key_value(query, key, value)
    batched = query.ndim == 4
    query, key, value = (x if batched else x[None] for x in (query, key, value))
    batch, queries, heads, depth = query.shape
    keys = key.shape[1]
    wide = accumulator(query.dtype)

    if scale is None or isinstance(scale, numbers.Real):
        scale = 1 / math.sqrt(depth) if scale is None and depth else 1.0 if scale is None else float(scale)
        if not math.isfinite(scale):
            raise ValueError(f"{_OP}: scale must be finite, got {scale}")
    else:
        scale = arguments.real_array(_OP, "scale", scale)
        if scale.ndim:
            raise ValueError(f"{_OP}: scale must be a scalar, got shape {scale.shape}")
        query, scale, joint = (query.astype(wide) * scale.astype(wide)).astype(query.dtype), 1.0, None
    window = _window(local_window_size)
    cap = 0.0
    if logits_soft_cap is not None:
        cap = arguments.static_float(_OP, "logits_soft_cap", logits_soft_cap)
        if not cap:
            raise ValueError(f"{_OP}: logits_soft_cap must be positive, got {logits_soft_cap}")

    logits = (batch, heads, queries, keys)
    if bias is not None:
        bias = _of_logits("bias", arguments.real_array(_OP, "bias", bias), logits)
        bias = bias if bias.dtype in (query.dtype, wide) else bias.astype(wide)
        bias = jnp.broadcast_to(bias, (*bias.shape[:-1], keys))
    if mask is not None:
        mask = _of_logits("mask", arguments.boolean(_OP, "mask", mask), logits)
    lengths = {
        "query_lengths": _integers("query_seq_lengths", query_seq_lengths, (batch,), batched),
        "key_value_lengths": _integers("key_value_seq_lengths", key_value_seq_lengths, (batch,), batched),
    }
    segments = _segments(query_segment_ids, key_value_segment_ids, batch, queries, keys, batched)
    if sinks is not None:
        sinks = arguments.real_array(_OP, "sinks", sinks)
        if sinks.shape != (heads,):
            raise ValueError(f"{_OP}: sinks must have the shape ({heads},), one for each head, got {sinks.shape}")
        sinks = sinks.astype(wide)

    precision = plain_precision(query.dtype, key.dtype, precision_of(arguments.precision(_OP, "precision", precision)))
    call = Call(scale, is_causal, window, cap, precision, implementation == "xla")
    x: Named = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, "sinks": sinks}
    x |= lengths | segments
    if implementation == "cudnn":
        out, sums = _on_cudnn(call, x, return_residual)
    else:
        why = support.why_not(_grouped(x))
        if implementation == "jaxops" and why:
            raise ValueError(f"{_OP}: implementation='jaxops' does not take this call: {why}")
        if implementation is None and not return_residual and _prefers_cudnn(call, x, why):
            out, sums = _on_cudnn_or_kernels(call, x), None
        else:
            out, sums = _on_kernels(call, x, joint)
    out, sums = (y if batched or y is None else y[0] for y in (out, sums))
    return (out, sums) if return_residual else out


# Arguments


def _query_key_value(query: Any, key: Any, value: Any) -> list[jax.Array]:
    given = {"query": query, "key": key, "value": value}
    query, key, value = found = [arguments.real_array(_OP, name, x) for name, x in given.items()]
    shapes = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in zip(given, found, strict=True))
    if any(x.ndim not in (3, 4) or x.ndim != query.ndim for x in found):
        raise ValueError(f"{_OP}: query, key and value must all have 3 or all have 4 dimensions, got {shapes}")
    if any(x.dtype != query.dtype for x in found):
        raise ValueError(f"{_OP}: query, key and value must have one dtype, got {shapes}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"{_OP}: value must have key's shape up to its last axis, got {shapes}")
    if query.shape[:-3] != key.shape[:-3] or query.shape[-1] != key.shape[-1]:
        raise ValueError(f"{_OP}: query and key must have the same batch and depth, got {shapes}")
    if not key.shape[-2] or query.shape[-2] % key.shape[-2]:
        raise ValueError(f"{_OP}: the number of key heads must divide the query's, got {shapes}")
    return found


def _window(given: Any) -> tuple[int, int]:
    """Of each side; -1: no limit."""
    if given is None:
        return -1, -1
    try:
        pair = given if isinstance(given, tuple | list) else (given, given)
        left, right = map(operator.index, pair)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{_OP}: local_window_size must be an int or a pair of ints, got {given!r}") from error
    if left < 0 or right < 0:
        raise ValueError(f"{_OP}: local_window_size must be at least 0 on both sides, got {given!r}")
    return left, right


def _of_logits(name: str, x: jax.Array, logits: tuple[int, ...]) -> jax.Array:
    """x with the logits' rank."""
    if x.ndim > 4 or arguments.joint_shape(_OP, logits=logits, **{name: x.shape}) != logits:
        raise ValueError(f"{_OP}: {name} must broadcast to [batch, heads, queries, keys] = {logits}, got {x.shape}")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _integers(name: str, given: Any, shape: tuple[int, ...], batched: bool) -> jax.Array | None:
    if given is None:
        return None
    x = arguments.array(_OP, name, given)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{_OP}: {name} must be of integers, got {x.dtype}")
    if not batched and x.shape == shape[1:]:
        x = x[None]
    if x.shape != shape:
        raise ValueError(f"{_OP}: {name} must have the shape {shape if batched else shape[1:]}, got {x.shape}")
    return x.astype(np.int32)


def _segments(query: Any, key: Any, batch: int, queries: int, keys: int, batched: bool) -> Named:
    if query is None and key is None:
        return {}
    names = ("query_segment_ids", "key_value_segment_ids")
    if query is None:
        raise ValueError(f"{_OP}: {names[1]} needs {names[0]}")
    if key is None and queries != keys:
        raise ValueError(f"{_OP}: {names[0]} needs {names[1]} where there are {queries} queries and {keys} keys")
    found = _integers(names[0], query, (batch, queries), batched)
    other = found if key is None else _integers(names[1], key, (batch, keys), batched)
    return {"query_segments": found, "key_value_segments": other}


# Implementations


def _grouped(x: Named) -> Named:
    """The operands as the kernels take them: heads as [key heads, group]."""
    groups = x["key"].shape[2]
    heads = x["query"].shape[2]

    def split(value, axis):
        parts = (1, 1) if value.shape[axis] == 1 and heads > 1 else (groups, heads // groups)
        return value.reshape(*value.shape[:axis], *parts, *value.shape[axis + 1 :])

    found = {name: value for name, value in x.items() if value is not None}
    found["query"] = split(x["query"], 2)
    for name in ("bias", "mask"):
        if name in found:
            found[name] = split(found[name], 1)
    if "sinks" in found:
        found["sinks"] = split(found["sinks"][None], 1)
    return found


def _on_kernels(call: Call, x: Named, joint: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The result and the logsumexp [batch, queries, heads]; joint: the array that has query, key and value as parts."""
    batch, queries, heads, _ = x["query"].shape
    keys, features = x["key"].shape[1], x["value"].shape[-1]
    mask, seeing = x["mask"], None
    window = call.limits[0]
    beyond = window is not None and isinstance(queries, int) and queries > keys - window
    averages = x["sinks"] is None and x.get("query_segments") is None and keys != 0
    if mask is not None and mask.shape[-1] != keys:  # which queries see anything
        seeing = jnp.swapaxes(mask[..., 0], 1, 2)
        x = x | {"mask": None}
    hidden = beyond or any(x[name] is not None for name in ("mask", "bias", "key_value_lengths"))
    call = call._replace(unseen_mean=averages and hidden)
    given = _grouped(x)
    if joint is not None:
        given = {"joint": joint} | {name: x for name, x in given.items() if name not in ("query", "key", "value")}
    parts = kernels.PARTS if "bias" in given else ()
    out, sums, *_ = kernels.forward(call, given, ("out", "lse", *parts)).values()
    out = out.reshape(batch, queries, heads, features)
    sums = jnp.swapaxes(sums.reshape(batch, heads, queries), 1, 2)
    if seeing is not None:
        nothing = jnp.full((), -jnp.inf, sums.dtype)
        if x["sinks"] is not None:  # which such a query sees alone
            nothing = x["sinks"].astype(sums.dtype)
            nothing = nothing if nothing.ndim == 1 else nothing[:, None]
        if x["query_lengths"] is not None:
            nothing = jnp.where(within(x["query_lengths"], queries)[..., None], nothing, -jnp.inf)
        sums = jnp.where(seeing, sums, nothing)
        unseen = ~seeing[..., None]
        if x["query_lengths"] is not None:  # beyond them it stays 0
            unseen = unseen & within(x["query_lengths"], queries)[..., None, None]
        instead = jnp.zeros((), out.dtype)
        if averages:
            mean = jnp.repeat(mean_of_values(x["value"]), heads // x["value"].shape[2], 3)
            instead = mean.reshape(batch, 1, heads, features)
        out = jnp.where(unseen, instead, out)
    return out, sums


def _prefers_cudnn(call: Call, x: Named, why: str | None) -> bool:
    """Whether the machine has a GPU: jaxops has no GPU kernel for a call that cuDNN takes."""
    if x["query"].dtype.name not in support.DTYPES or jax.default_backend() != "gpu":
        return False
    here = why is None and support.why_not_here() is None and "attention_fwd" in HANDLERS.get("cuda", ())
    if here or _beyond_cudnn(call, x):
        return False
    try:
        jax.eval_shape(lambda x: _on_cudnn(call, x, False)[0], x)
    except Exception:  # many types, for shapes, dtypes, devices and cuDNN versions
        return False
    return True


def _on_cudnn_or_kernels(call: Call, x: Named) -> jax.Array:
    """cuDNN if the lowering is for CUDA; elsewhere the kernels."""
    return lax.platform_dependent(
        x, cuda=lambda x: _on_cudnn(call, x, False)[0], default=lambda x: _on_kernels(call, x)[0]
    )


def _beyond_cudnn(call: Call, x: Named) -> list[str]:
    """The options that cuDNN, as jax.nn calls it, does not have."""
    options = {
        "query_segment_ids": x.get("query_segments"),
        "sinks": x["sinks"],
        "logits_soft_cap": call.soft_cap or None,
    }
    return [name for name, value in options.items() if value is not None]


def _on_cudnn(call: Call, x: Named, return_residual: bool) -> tuple[jax.Array, jax.Array | None]:
    if given := _beyond_cudnn(call, x):
        raise ValueError(f"{_OP}: implementation='cudnn' does not take {', '.join(given)}")
    found = jax_attention(
        x["query"],
        x["key"],
        x["value"],
        x["bias"],
        x["mask"],
        scale=call.scale,
        is_causal=call.causal,
        query_seq_lengths=x["query_lengths"],
        key_value_seq_lengths=x["key_value_lengths"],
        local_window_size=None if call.window == (-1, -1) else call.window,
        implementation="cudnn",
        return_residual=return_residual,
    )
    return (found[0], found[1].astype(jnp.float32)) if return_residual else (found, None)

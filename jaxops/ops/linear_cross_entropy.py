"""linear_cross_entropy: from hidden states to the loss, without all logits at once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxops import _arguments as arguments
from jaxops._rows import accumulator
from jaxops.ops import _linear_cross_entropy as kernels
from jaxops.ops.cross_entropy import Options, checked_labels


def _losses(values, options: Options, columns: int):
    return options.loss(*(values.get(name) for name in kernels.VALUES), columns)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _weighted_sum(static, x, w, bias, weights, labels):
    """The sum of weights times losses; a weight of 0 leaves a token out."""
    spec, options = static
    values = kernels.forward({"x": x, "w": w, "bias": bias, "labels": labels}, spec)
    loss, _ = _losses(values, options, w.shape[0 if spec.transposed else 1])
    return jnp.sum(jnp.where(weights == 0, 0, weights * loss))


@functools.partial(_weighted_sum.defjvp, symbolic_zeros=True)
def _weighted_sum_jvp(static, primals, tangents):
    """With the sum's gradients, which one pass over the chunks computes with the losses."""
    (spec, options), (x, w, bias, weights, labels) = static, primals
    moving = dict(zip(("dx", "dw", "dbias", "dweights"), tangents, strict=False))
    zero = jax.custom_derivatives.SymbolicZero
    moving = {n: t for n, t in moving.items() if t is not None and not isinstance(t, zero)}
    columns = w.shape[0 if spec.transposed else 1]
    named = {"x": x, "w": w, "bias": bias, "labels": labels, "dlog": weights}
    named["dpicked"] = -options.label_weight() * weights
    if options.smoothing:
        named["dsum"] = -options.smoothing / columns * weights
    spec = spec._replace(results=(*spec.results, *(n for n in ("dx", "dw", "dbias") if n in moving)))
    values = kernels.forward(named, spec) if moving.keys() <= {"dweights"} else kernels.both(named, spec)
    loss, _ = _losses(values, options, columns)
    if options.ignore_index is not None:  # an ignored label may be out of range, so that its loss is NaN
        limits = jnp.iinfo(labels.dtype)
        loss = jnp.where(labels == min(max(options.ignore_index, limits.min), limits.max), 0, loss)
    out, tangent = jnp.sum(jnp.where(weights == 0, 0, weights * loss)), jnp.zeros((), loss.dtype)
    for name, direction in moving.items():
        gradient = loss if name == "dweights" else values[name]
        tangent += jnp.sum(gradient.astype(loss.dtype) * direction.astype(loss.dtype))
    return out, tangent


def linear_cross_entropy(
    x: jax.typing.ArrayLike,
    w: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    *,
    bias: jax.typing.ArrayLike | None = None,
    transposed: bool = False,
    weights: jax.typing.ArrayLike | None = None,
    reduction: str | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int | None = None,
    return_logsumexp: bool = False,
    precision: Any = None,
    chunk_tokens: int | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Softmax cross entropy of the logits `x @ w + bias` [tokens, vocabulary], a chunk of tokens at a time.

    The function computes the logits for one chunk of tokens at a time, and reduces them to one loss a token. If it is
    differentiated and has a `reduction`, it knows the tokens' weights in the forward pass, and computes the gradients
    there: three products, the fewest possible. The backward pass only multiplies them by the cotangent. Without a
    reduction, the tokens' cotangents are known only in the backward pass, which then computes each chunk's logits
    again: four products. So let this function reduce. Under :func:`jax.checkpoint` the forward pass computes no
    gradients, and the backward pass repeats the product. The gradient of `w` is summed over the chunks in f32, in their
    order, so its bits do not change from run to run.

    On a Hopper GPU a forward pass that computes no gradients, as in evaluation, reduces the logits inside the product's
    kernel, so that they never reach memory. This takes `x` in 16 bits with a width that is a multiple of 8, 128 or more
    tokens in a chunk, and no algorithm as `precision`. A chunk is then longer: the summaries of its tiles take at
    most 512 MiB.

    Args:
      x: hidden states [..., width]; float64, float32, float16 or bfloat16.
      w: weights [width, vocabulary] in a floating dtype. They are rounded to the dtype of `x`, in which the products
        and a chunk's logits are computed; sums are f32. f32 weights get an f32 gradient.
      labels: integers [...]; see :func:`jaxops.softmax_cross_entropy_with_integer_labels`.
      bias: [vocabulary], added to the logits.
      transposed: `w` is [vocabulary, width], as an embedding table to which the output is tied.
      weights: a factor for every token's loss, [...] or broadcasting to it.
      reduction: None, "sum" (of the weighted losses), or "mean": that sum divided by the sum of the weights. Ignored
        tokens do not count. If no token counts, the mean is 0.
      label_smoothing: the uniform distribution's weight in the targets, in [0, 1].
      z_loss: factor for the squared logsumexp.
      logits_soft_cap: bound on the logits; None: no bound.
      ignore_index: label of tokens with zero loss and gradient; None: no such label.
      return_logsumexp: return a pair: the loss and every token's logsumexp. Only without a reduction.
      precision: as in :func:`jax.numpy.matmul`, for the products.
      chunk_tokens: the most tokens in a chunk; None: 2048, or fewer if their logits would take more than 512 MiB. With
        `w` in 16 bits: all tokens, if their logits take no more memory than an f32 gradient of `w`.

    Returns:
      The losses [...], or with a reduction a scalar; f32 (f64 for f64).

    Raises:
      TypeError: `x`, `w`, `bias` or `weights` are not floating, or `labels` are not integers.
      ValueError: shapes do not fit, or a label in a NumPy array or an option is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, jaxops
      >>> x, w, labels = jnp.ones((5, 4)), jnp.eye(4, 7), jnp.arange(5)
      >>> loss = lambda x, w: jaxops.linear_cross_entropy(x, w, labels, reduction="mean")
      >>> value, (dx, dw) = jax.value_and_grad(loss, (0, 1))(x, w)
      >>> value.dtype, dx.shape, dw.shape
      (dtype('float32'), (5, 4), (4, 7))
    """
    op = "linear_cross_entropy"
    x, w = (_floating(op, name, value) for name, value in (("x", x), ("w", w)))
    transposed = arguments.flag(op, "transposed", transposed)
    return_logsumexp = arguments.flag(op, "return_logsumexp", return_logsumexp)
    if reduction not in (None, "sum", "mean"):
        raise ValueError(f"{op}: reduction must be None, 'sum' or 'mean', got {reduction!r}")
    if reduction is not None and return_logsumexp:
        raise ValueError(f"{op}: return_logsumexp must be False with a reduction, got True and {reduction!r}")
    if not x.ndim:
        raise ValueError(f"{op}: x must have at least 1 dimension, [..., width], got a scalar")
    if w.ndim != 2 or w.shape[1 if transposed else 0] != x.shape[-1]:
        wanted = "[vocabulary, width]" if transposed else "[width, vocabulary]"
        raise ValueError(f"{op}: w must be {wanted} with the width of x, {x.shape[-1]}, got {list(w.shape)}")
    columns = w.shape[0 if transposed else 1]
    options = Options.checked(op, label_smoothing, z_loss, logits_soft_cap, ignore_index)
    labels, kept = checked_labels(op, labels, columns, options.ignore_index)
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: labels must have the shape {list(x.shape[:-1])} of x's tokens, got {list(labels.shape)}"
        )
    if bias is not None:
        bias = _floating(op, "bias", bias)
        if bias.shape != (columns,):
            raise ValueError(f"{op}: bias must have the vocabulary's shape [{columns}], got {list(bias.shape)}")
    wide = accumulator(x.dtype)
    if weights is not None:
        weights = arguments.real_array(op, "weights", weights).astype(wide)
        if arguments.joint_shape(op, tokens=labels.shape, weights=weights.shape) != labels.shape:
            raise ValueError(f"{op}: weights must broadcast to {list(labels.shape)}, got {list(weights.shape)}")
    if chunk_tokens is not None:
        chunk_tokens = arguments.static_int(op, "chunk_tokens", chunk_tokens)
        if chunk_tokens < 1:
            raise ValueError(f"{op}: chunk_tokens must be at least 1, got {chunk_tokens}")
    precision = arguments.precision(op, "precision", precision)
    results = ("sum",) if options.smoothing else ()
    spec = kernels.Spec((), results, transposed, options.cap, options.z_loss, chunk_tokens, precision)
    if reduction is None:
        loss, lse = _losses(kernels.forward({"x": x, "w": w, "bias": bias, "labels": labels}, spec), options, columns)
        loss = loss if kept is None else jnp.where(kept, loss, 0)
        loss = loss if weights is None else weights * loss
        return (loss, lse) if return_logsumexp else loss
    factors = jnp.ones(labels.shape, wide) if weights is None else jnp.broadcast_to(weights, labels.shape)
    factors = factors if kept is None else jnp.where(kept, factors, 0)
    if reduction == "mean":
        total = jnp.sum(factors)
        factors = factors / jnp.where(total == 0, 1, total)
    return _weighted_sum((spec, options), x, w, bias, factors, labels)


def _floating(op: str, name: str, value: Any) -> jax.Array:
    x = arguments.array(op, name, value)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{op}: {name} must be of a floating dtype, got {x.dtype}")
    return arguments.real_array(op, name, x)

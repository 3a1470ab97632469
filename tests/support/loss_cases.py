"""The exact loss in float64, for the losses' tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

#: Option sets, by name.
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z loss": {"z_loss": 1e-2},
    "soft cap": {"logits_soft_cap": 5.0},
    "ignore": {"ignore_index": 2},
    "everything": {"label_smoothing": 0.2, "z_loss": 3e-3, "logits_soft_cap": 4.0, "ignore_index": 1},
}


def exact_loss(
    x, labels, where=None, *, label_smoothing=0.0, z_loss=0.0, logits_soft_cap=None, ignore_index=None, lse=False
):
    """Of logits [..., columns], in jax.numpy on float64, from the definition. Labels must be in range."""
    z = x if logits_soft_cap is None else logits_soft_cap * jnp.tanh(x / logits_soft_cap)
    visible = jnp.ones(x.shape, bool) if where is None else jnp.broadcast_to(where, x.shape)
    some = jnp.any(visible, -1, keepdims=True)
    hidden = jnp.where(visible | ~some, z, -jnp.inf)
    max = jax.lax.stop_gradient(jnp.max(hidden, -1, keepdims=True))
    max = jnp.where(jnp.isfinite(max), max, 0)
    logsumexp = (max + jnp.log(jnp.sum(jnp.where(visible | ~some, jnp.exp(hidden - max), 0), -1, keepdims=True)))[
        ..., 0
    ]
    if lse:
        return logsumexp
    one_hot = jnp.arange(x.shape[-1]) == (labels % x.shape[-1])[..., None]
    picked = jnp.sum(jnp.where(one_hot, z, 0), -1)
    mean = jnp.sum(jnp.where(visible, z, 0), -1) / jnp.maximum(jnp.sum(visible, -1), 1)
    loss = logsumexp - (1 - label_smoothing) * picked + z_loss * logsumexp**2
    if label_smoothing:
        loss -= label_smoothing * mean
    counted = some[..., 0] if ignore_index is None else some[..., 0] & (labels != ignore_index)
    return jnp.where(counted, loss, 0)


def exact(
    x,
    labels,
    cotangent,
    where=None,
    *,
    label_smoothing=0.0,
    z_loss=0.0,
    logits_soft_cap=None,
    ignore_index=None,
    lse=False,
) -> tuple[np.ndarray, np.ndarray]:
    """The loss, or the logsumexp, and the gradient for its product with `cotangent`, in numpy on float64."""
    x, labels = np.asarray(x).astype(np.float64), np.asarray(labels)
    cap = 1.0 if logits_soft_cap is None else logits_soft_cap
    z, slope = (x, 1.0) if logits_soft_cap is None else (cap * np.tanh(x / cap), 1 - np.tanh(x / cap) ** 2)
    visible = np.broadcast_to(True if where is None else where, x.shape)
    some = visible.any(-1, keepdims=True)
    counted = visible | ~some  # a row without visible columns has a loss of zero
    largest = np.max(z, -1, keepdims=True, where=counted, initial=-np.inf)
    exponentials = np.where(counted, np.exp(np.where(counted, z - largest, 0)), 0)
    total = exponentials.sum(-1, keepdims=True)
    logsumexp, weights = (largest + np.log(total))[..., 0], exponentials / total
    cotangent = np.asarray(cotangent).astype(np.float64)
    if lse:
        return logsumexp, weights * slope * cotangent[..., None]
    one_hot = np.arange(x.shape[-1]) == (labels % x.shape[-1])[..., None]
    share = visible / np.maximum(visible.sum(-1, keepdims=True), 1)
    kept = (some[..., 0] & (labels != ignore_index)) if ignore_index is not None else some[..., 0]
    loss = logsumexp - (1 - label_smoothing) * z[one_hot].reshape(labels.shape) + z_loss * logsumexp**2
    loss = loss - label_smoothing * (share * np.where(visible, z, 0)).sum(-1)
    gradient = weights * (1 + 2 * z_loss * logsumexp)[..., None]
    gradient = gradient - (1 - label_smoothing) * one_hot - label_smoothing * share
    return np.where(kept, loss, 0), gradient * slope * np.where(kept, cotangent, 0)[..., None]

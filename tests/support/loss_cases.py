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


def exact(x, labels, cotangent, where=None, **options) -> tuple[np.ndarray, np.ndarray]:
    """The loss and the gradient for its product with `cotangent`, in float64 on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = jnp.asarray(np.asarray(x).astype(np.float64))
        cotangent = jnp.asarray(np.asarray(cotangent).astype(np.float64))
        value, pullback = jax.vjp(lambda x: exact_loss(x, np.asarray(labels), where, **options), wide)
        return np.asarray(value), np.asarray(pullback(cotangent)[0])

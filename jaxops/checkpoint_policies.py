"""Policies for :func:`jax.checkpoint` that know jaxops' kernels.

JAX's own policies treat a jaxops product as JAX's own dot; the policies here work on any jaxops op.

Example:
  >>> import jax, jax.numpy as jnp, jaxops
  >>> layer = lambda x, w: jaxops.softmax(jaxops.matmul(x, w))
  >>> layer = jax.checkpoint(layer, policy=jaxops.checkpoint_policies.dots_saveable)
  >>> jax.grad(lambda x: layer(x, x)[0, 0])(jnp.eye(2)).shape
  (2, 2)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import checkpoint_policies as jax_policies

from jaxops._kernel import KERNELS

_jax_dots_saveable = jax_policies.dots_saveable
_jax_dots_with_no_batch_dims_saveable = jax_policies.dots_with_no_batch_dims_saveable


def dots_saveable(primitive: Any, *operands: Any, **params: Any) -> bool:
    """:func:`jax.checkpoint_policies.dots_saveable`; saves jaxops' products too, with their preactivations.

    It also saves attention's results, which are products, with their logsumexp.
    """
    if primitive in (KERNELS["matmul"].primitive, KERNELS["attention_fwd"].primitive):
        return True
    return _jax_dots_saveable(primitive, *operands, **params)


def dots_with_no_batch_dims_saveable(primitive: Any, *operands: Any, **params: Any) -> bool:
    """:func:`jax.checkpoint_policies.dots_with_no_batch_dims_saveable`; saves such jaxops products too.

    A product has a batch dimension if both operands have more than one matrix along an axis.
    """
    matmul = KERNELS["matmul"]
    if primitive is matmul.primitive:
        lhs, rhs, *_ = matmul.layout(*operands, **params).operands
        batch = (name for name in set(lhs) & set(rhs) if name.startswith("batch"))
        return all(operands[0].shape[lhs.index(name)] == 1 for name in batch)
    return _jax_dots_with_no_batch_dims_saveable(primitive, *operands, **params)


def save_only_these_ops(*ops: str) -> Callable[..., bool]:
    """A policy that saves the named ops' results and nothing else.

    Args:
      ops: "softmax", "log_softmax", "layer_norm", "rms_norm", "cross_entropy", "linear_cross_entropy", "matmul",
        "gated_matmul", "attention".

    Returns:
      A policy. An op's results include the values that its backward pass saves, such as row statistics and
      preactivations.

    Raises:
      ValueError: a name is not an op.
    """
    kernels = {name.removesuffix("_fwd"): kernel for name, kernel in KERNELS.items() if not name.endswith("_bwd")}
    if unknown := [op for op in ops if not isinstance(op, str) or op not in kernels]:
        raise ValueError(f"save_only_these_ops: ops must be among {', '.join(kernels)}, got {unknown[0]!r}")
    saved = {kernels[op].primitive for op in ops}

    def policy(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive in saved

    return policy

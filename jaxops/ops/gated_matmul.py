"""gated_matmul."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxops import _arguments as arguments
from jaxops._rows import accumulator
from jaxops.ops._epilogue import ACTIVATIONS
from jaxops.ops.matmul import matmul


def gated_matmul(
    x: jax.typing.ArrayLike,
    w_gate: jax.typing.ArrayLike,
    w_up: jax.typing.ArrayLike,
    *,
    activation: str = "silu",
    precision: Any = None,
    recompute: bool = False,
) -> jax.Array:
    r"""First half of a gated MLP: :math:`\mathrm{activation}(x\,w_{gate}) \odot x\,w_{up}` (Shazeer, 2020).

    With "silu" this is SwiGLU, with "gelu" GEGLU. Both products run on :func:`jaxops.matmul` and are rounded to the
    result's dtype; activation and multiplication are computed in f32 (f64 for f64) and rounded once. The backward pass
    keeps the two products and nothing else of their size: it computes the activation again, in the pass that makes the
    cotangents of both.

    Args:
      x: array `[..., k]`.
      w_gate: array `[k, n]`.
      w_up: array `[k, n]`.
      activation: "silu", "gelu" (the tanh form), "gelu_exact" (with erf) or "relu".
      precision: of the products, as in jax.numpy.matmul.
      recompute: the backward pass keeps only the operands, and computes both products again.

    Returns:
      Array `[..., n]` of the dtype to which the operands promote.

    Raises:
      TypeError: an operand is a list, or the operands promote to a dtype that is not floating.
      ValueError: shapes do not fit, or `activation` is unknown.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.gated_matmul(jnp.array([[1.0, 2.0]]), jnp.eye(2), 3 * jnp.eye(2), activation="relu")
      Array([[ 3., 12.]], dtype=float32)
    """
    x, w_gate, w_up = (
        arguments.array("gated_matmul", name, value) for name, value in (("x", x), ("w_gate", w_gate), ("w_up", w_up))
    )
    accepted = [name for name in ACTIVATIONS if name is not None]
    if not isinstance(activation, str) or activation not in accepted:
        raise ValueError(
            f"gated_matmul: activation must be one of {', '.join(map(repr, accepted))}, got {activation!r}"
        )
    recompute = arguments.flag("gated_matmul", "recompute", recompute)
    if not x.ndim:
        raise ValueError("gated_matmul: x must have at least 1 dimension, got a scalar")
    for name, w in (("w_gate", w_gate), ("w_up", w_up)):
        if w.ndim != 2 or w.shape[0] != x.shape[-1]:
            raise ValueError(f"gated_matmul: {name} must be [{x.shape[-1]}, n] for x {x.shape}, got {w.shape}")
    if w_gate.shape != w_up.shape:
        raise ValueError(f"gated_matmul: w_up must have the shape {w_gate.shape} of w_gate, got {w_up.shape}")
    arguments.precision("gated_matmul", "precision", precision)
    dtype = jnp.result_type(x, w_gate, w_up)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"gated_matmul: x, w_gate and w_up must promote to a floating dtype, got {dtype}")

    def gate(gates, ups):
        wide = accumulator(dtype)
        return (ACTIVATIONS[activation](gates.astype(wide)) * ups.astype(wide)).astype(dtype)

    def whole(x, w_gate, w_up):
        products = (matmul(x, w, precision=precision, preferred_element_type=dtype) for w in (w_gate, w_up))
        # Else what JAX keeps for the backward pass are the activation and its derivative, in f32.
        return jax.checkpoint(gate, prevent_cse=False)(*products)

    return (jax.checkpoint(whole) if recompute else whole)(x, w_gate, w_up)

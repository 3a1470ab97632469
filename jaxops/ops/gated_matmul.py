"""gated_matmul and gated_mlp."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxops import _arguments as arguments
from jaxops.ops._epilogue import ACTIVATIONS
from jaxops.ops._gated_kernel import gate, gate_into, kernel, mlp
from jaxops.ops._matmul_kernel import arithmetic_of, precision_of
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
    r"""First half of a gated MLP: :math:`\mathrm{activation}(x\,w_{gate}) \odot x\,w_{up}`.

    After Shazeer, "GLU Variants Improve Transformer" (2020): with "silu" this is SwiGLU, with "gelu" GEGLU. On a Hopper
    GPU, for 16-bit operands whose sizes are multiples of 8, one kernel computes both products, activates and multiplies
    their f32 sums, and rounds once, if it is expected to be faster; :func:`jaxops.explain` shows the choice. Otherwise
    both products run on :func:`jaxops.matmul` and are rounded to the result's dtype; activation and multiplication are
    computed in f32 (f64 for f64) and rounded once more. The backward pass keeps the two products, rounded, and nothing
    else of their size: it computes the activation again, in the pass that makes the cotangents of both.

    Args:
      x: array `[..., k]`.
      w_gate: array `[k, n]`.
      w_up: array `[k, n]`.
      activation: "silu", "gelu" (the tanh form), "gelu_exact" (with erf) or "relu".
      precision: the products' precision, as in jax.numpy.matmul.
      recompute: if True, the backward pass keeps only the operands, and computes both products again.

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
    x, w_gate, w_up = _checked("gated_matmul", x=x, w_gate=w_gate, w_up=w_up)
    activation, wanted = checked_options("gated_matmul", activation, precision)
    recompute = arguments.flag("gated_matmul", "recompute", recompute)
    dtype = _joint_dtype("gated_matmul", x=x, w_gate=w_gate, w_up=w_up)

    def whole(x, w_gate, w_up):
        if _fits_kernel(wanted, x, w_gate, w_up):
            return _in_rows(
                lambda x: kernel.bind(x, w_gate, w_up, activation=activation, precision=wanted, kept=False), x
            )
        products = (matmul(x, w, precision=precision, preferred_element_type=dtype) for w in (w_gate, w_up))
        return gate(*products, activation)

    return (jax.checkpoint(whole) if recompute else whole)(x, w_gate, w_up)


def gated_mlp(
    x: jax.typing.ArrayLike,
    w_gate: jax.typing.ArrayLike,
    w_up: jax.typing.ArrayLike,
    w_down: jax.typing.ArrayLike,
    *,
    activation: str = "silu",
    precision: Any = None,
    recompute: bool = False,
) -> jax.Array:
    r"""A gated MLP: :math:`(\mathrm{activation}(x\,w_{gate}) \odot x\,w_{up})\,w_{down}` (Shazeer, 2020).

    The same as :func:`jaxops.matmul` of :func:`jaxops.gated_matmul`. On a Hopper GPU, if it is expected to be
    faster, one kernel multiplies the result's 16-bit cotangent by w_down's transpose, and computes the cotangents of
    both products from the f32 sums. The backward pass keeps the two products, rounded, and nothing else of their
    size: it computes activation and multiplication again, for the gradient of w_down.

    Args:
      x: array `[..., k]`.
      w_gate: array `[k, n]`.
      w_up: array `[k, n]`.
      w_down: array `[n, d]`.
      activation: "silu", "gelu" (the tanh form), "gelu_exact" (with erf) or "relu".
      precision: the products' precision, as in jax.numpy.matmul.
      recompute: if True, the backward pass keeps only the operands, and computes again what it needs.

    Returns:
      Array `[..., d]` of the dtype to which the operands promote.

    Raises:
      TypeError: an operand is a list, or the operands promote to a dtype that is not floating.
      ValueError: shapes do not fit, or `activation` is unknown.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.gated_mlp(jnp.array([[1.0, 2.0]]), jnp.eye(2), 3 * jnp.eye(2), jnp.ones((2, 1)), activation="relu")
      Array([[15.]], dtype=float32)
    """
    x, w_gate, w_up, w_down = _checked("gated_mlp", x=x, w_gate=w_gate, w_up=w_up, w_down=w_down)
    activation, wanted = checked_options("gated_mlp", activation, precision)
    recompute = arguments.flag("gated_mlp", "recompute", recompute)
    dtype = _joint_dtype("gated_mlp", x=x, w_gate=w_gate, w_up=w_up, w_down=w_down)

    def whole(x, w_gate, w_up, w_down):
        if _fits_kernel(wanted, x, w_gate, w_up, w_down):
            run = functools.partial(mlp.bind, activation=activation, precision=wanted)
            return _in_rows(run, x, w_gate, w_up, w_down)
        product = functools.partial(matmul, precision=precision, preferred_element_type=dtype)
        return gate_into(product, product(x, w_gate), product(x, w_up), w_down, activation)

    return (jax.checkpoint(whole) if recompute else whole)(x, w_gate, w_up, w_down)


def _checked(op: str, **operands: Any) -> list[jax.Array]:
    """The operands as arrays whose shapes fit."""
    arrays = {name: arguments.array(op, name, value) for name, value in operands.items()}
    x, w_gate, w_up = (arrays[name] for name in ("x", "w_gate", "w_up"))
    if not x.ndim:
        raise ValueError(f"{op}: x must have at least 1 dimension, got a scalar")
    for name, w in (("w_gate", w_gate), ("w_up", w_up)):
        if w.ndim != 2 or w.shape[0] != x.shape[-1]:
            raise ValueError(f"{op}: {name} must be [{x.shape[-1]}, n] for x {x.shape}, got {w.shape}")
    if w_gate.shape != w_up.shape:
        raise ValueError(f"{op}: w_up must have the shape {w_gate.shape} of w_gate, got {w_up.shape}")
    w_down = arrays.get("w_down")
    if w_down is not None and (w_down.ndim != 2 or w_down.shape[0] != w_gate.shape[1]):
        columns = w_gate.shape[1]
        raise ValueError(f"{op}: w_down must be [{columns}, d] for w_gate {w_gate.shape}, got {w_down.shape}")
    return [*arrays.values()]


def checked_options(op: str, activation: Any, precision: Any) -> tuple[str, Any]:
    """The activation, and the precision as `precision_of` gives it."""
    accepted = [name for name in ACTIVATIONS if name is not None]
    if not isinstance(activation, str) or activation not in accepted:
        raise ValueError(f"{op}: activation must be one of {', '.join(map(repr, accepted))}, got {activation!r}")
    return activation, precision_of(arguments.precision(op, "precision", precision))


def _joint_dtype(op: str, **operands: jax.Array) -> Any:
    dtype = jnp.result_type(*operands.values())
    if not jnp.issubdtype(dtype, jnp.floating):
        *names, last = operands
        raise TypeError(f"{op}: {', '.join(names)} and {last} must promote to a floating dtype, got {dtype}")
    return dtype


def _fits_kernel(precision: Any, x: jax.Array, *weights: jax.Array) -> bool:
    """Whether Hopper's kernel takes such operands, however they are split over devices: of one 16-bit dtype, rows
    aligned to 16 bytes. Others are left to matmul from the start."""
    alike = all(w.dtype == x.dtype for w in weights) and arithmetic_of(x.dtype, x.dtype, precision) == "16bit"
    columns = [d for w in weights for d in w.shape]
    static = all(isinstance(d, int) and d > 0 for d in (*x.shape, *columns))
    return alike and static and all(d % 8 == 0 for d in columns)


def _in_rows(function: Callable[..., list[jax.Array]], x: jax.Array, *weights: jax.Array) -> jax.Array:
    """The function's only result; x of one dimension is a row."""
    return function(x, *weights)[0] if x.ndim > 1 else function(x[None], *weights)[0][0]

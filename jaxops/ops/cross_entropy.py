"""softmax_cross_entropy_with_integer_labels, and its value and gradient in one pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops import _arguments as arguments
from jaxops._rows import accumulator
from jaxops.ops import _cross_entropy as kernels


@dataclasses.dataclass(frozen=True)
class Options:
    """A loss's options, checked; an option that is 0 or None is off.

    A token's loss is lse - (1 - smoothing) z[label] - smoothing mean(z) + z_loss lse^2, with lse = logsumexp(z).
    """

    smoothing: float
    z_loss: float
    cap: float
    ignore_index: int | None

    @classmethod
    def checked(cls, op: str, label_smoothing, z_loss, logits_soft_cap, ignore_index) -> Options:
        """From a public function's arguments."""
        smoothing = arguments.static_float(op, "label_smoothing", label_smoothing)
        if smoothing > 1:
            raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {smoothing}")
        cap = 0.0
        if logits_soft_cap is not None:
            cap = arguments.static_float(op, "logits_soft_cap", logits_soft_cap)
            if not cap:
                raise ValueError(f"{op}: logits_soft_cap must be above 0, or None, got {cap}")
        if ignore_index is not None:
            ignore_index = arguments.static_int(op, "ignore_index", ignore_index)
        return cls(smoothing, arguments.static_float(op, "z_loss", z_loss), cap, ignore_index)

    def label_weight(self) -> float:
        """The target weight of the label's logit."""
        return 1 - self.smoothing

    def loss(self, origin, total, picked, sum, count):
        """Every row's loss, from the kernel's values; count: how many entries take part."""
        log_total = kernels.log_total(total)
        target = self.label_weight() * picked if self.smoothing else picked
        if self.smoothing:
            target += self.smoothing * (sum / count)
        loss = (origin - target) + log_total  # in this order large logits cancel exactly
        lse = origin + log_total
        return loss + self.z_loss * jnp.square(lse) if self.z_loss else loss, lse


def checked_labels(op: str, labels: Any, columns: int, ignore_index: int | None) -> tuple[jax.Array, Any]:
    """The labels as int32, and where they are not ignored (None: everywhere).

    Raises:
      ValueError: a NumPy array, whose values are known, has labels that are out of range and not ignored.
    """
    x = arguments.array(op, "labels", labels)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{op}: labels must be integers, got dtype {x.dtype}")
    if isinstance(labels, np.ndarray | np.generic | int) and isinstance(columns, int):
        wrong = np.asarray(labels)
        wrong = wrong[(wrong < -columns) | (wrong >= columns)]
        wrong = wrong if ignore_index is None else wrong[wrong != ignore_index]
        if wrong.size:
            raise ValueError(f"{op}: labels must be in [{-columns}, {columns}), got {wrong.flat[0]}")
    kept = None if ignore_index is None else x != ignore_index
    if x.dtype.itemsize > 4 or x.dtype == np.uint32:  # labels out of range stay so
        limits = np.iinfo(np.int32)
        x = jnp.clip(x, max(limits.min, np.iinfo(x.dtype).min), limits.max)
    return x.astype(np.int32), kept


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Logits and labels with the columns along one axis; a row's labels, losses and weights have size 1 there."""

    logits: jax.Array
    labels: jax.Array
    axis: int
    where: jax.Array | None  # of the logits' rank; None: everything takes part, or a whole row does or does not
    count: Any  # how many entries in each row take part
    counted: Any  # the rows whose loss counts; None: all

    @classmethod
    def of(cls, op: str, logits, labels, axis, where, options: Options) -> _Rows:
        """From a public function's arguments; axes are joined, and operands that may broadcast do."""
        if not (hasattr(logits, "dtype") and jnp.issubdtype(logits.dtype, jnp.floating)):
            arguments.array(op, "logits", logits)
            raise TypeError(f"{op}: logits must be of a floating dtype, got {jnp.result_type(logits)}")
        logits = arguments.real_array(op, "logits", logits)
        axes = arguments.ordered_axes(op, axis, logits.ndim)
        if not axes:
            raise ValueError(f"{op}: axis must name at least one axis, got {axis!r}")
        if where is not None:
            where = arguments.boolean(op, "where", where)
            if where.ndim == logits.ndim - len(axes):
                where = jnp.expand_dims(where, axes)
            if where.ndim != logits.ndim:
                raise ValueError(
                    f"{op}: where must have the shape of labels or of logits, got {where.ndim} dimensions for logits "
                    f"{list(logits.shape)}"
                )
        if len(axes) > 1:  # columns are counted in the order in which the axes are named
            rest = [a for a in range(logits.ndim) if a not in axes]

            def joined(x):
                x = jnp.transpose(x, (*rest, *axes))
                return x.reshape(*x.shape[: len(rest)], -1)

            if where is not None and any(where.shape[a] != 1 for a in axes):
                shape = [logits.shape[a] if a in axes else d for a, d in enumerate(where.shape)]
                where = jnp.broadcast_to(where, shape)
            logits, where, axis = joined(logits), None if where is None else joined(where), len(rest)
        else:
            (axis,) = axes
        columns = logits.shape[axis]
        labels, kept = checked_labels(op, labels, columns, options.ignore_index)
        if labels.ndim != logits.ndim - 1:
            raise ValueError(
                f"{op}: labels must have the shape of logits without axis, got {list(labels.shape)} for logits "
                f"{list(logits.shape)}"
            )
        labels = jnp.expand_dims(labels, axis)
        shapes = {"logits": [1 if a == axis else d for a, d in enumerate(logits.shape)], "labels": labels.shape}
        if where is not None:
            shapes["where"] = [1 if a == axis else d for a, d in enumerate(where.shape)]
            if where.shape[axis] not in (1, columns):
                raise ValueError(f"{op}: where {list(where.shape)} does not fit logits {list(logits.shape)}")
        rows = arguments.joint_shape(op, **shapes)
        logits = jnp.broadcast_to(logits, [columns if a == axis else d for a, d in enumerate(rows)])
        labels = jnp.broadcast_to(labels, rows)
        counted, count = None if kept is None else jnp.expand_dims(kept, axis), columns
        if where is not None:
            any_visible = jnp.any(where, axis, keepdims=True)
            counted = any_visible if counted is None else counted & any_visible
            if where.shape[axis] == 1 and columns != 1:
                where = None
            else:
                count = jnp.maximum(jnp.sum(where, axis, keepdims=True), 1)
        return cls(logits, labels, axis, where, count, counted)

    def squeezed(self, x: jax.Array) -> jax.Array:
        return jnp.squeeze(x, self.axis)

    def finished(self, loss: jax.Array) -> jax.Array:
        return self.squeezed(loss if self.counted is None else jnp.where(self.counted, loss, 0))


def softmax_cross_entropy_with_integer_labels(
    logits: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    axis: int | tuple[int, ...] = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int | None = None,
    return_logsumexp: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Softmax cross entropy of `logits` with every token's label, without a one-hot array.

    A token's loss is
    :math:`\mathrm{lse} - (1 - \epsilon) z_{label} - \epsilon\,\mathrm{mean}(z) + \zeta\,\mathrm{lse}^2`, where
    :math:`\mathrm{lse} = \log \sum_j e^{z_j}`, :math:`\epsilon` is the label smoothing, and :math:`\zeta` is the z-loss
    factor. With a soft cap c the logits are :math:`z = c\,\tanh(x / c)`, else :math:`z = x`. Without keyword arguments
    the function is a drop-in for :func:`optax.softmax_cross_entropy_with_integer_labels`, except that the loss is
    computed and returned in f32 (f64 for f64).

    The forward pass reads the logits once and keeps two numbers a token. The backward pass reads them once and writes
    their gradient once, in their dtype. If the logits are the product of hidden states and the output weights,
    :func:`jaxops.linear_cross_entropy` computes the loss without storing them.

    Args:
      logits: array of any shape; float64, float32, float16 or bfloat16.
      labels: integers, shaped like `logits` without `axis`, in [0, columns); negative labels count from the end. If a
        label is out of range, the token's loss is NaN. In a NumPy array, whose values are known while tracing, it is an
        error.
      axis: the vocabulary's axis. With several axes, the label is a flat index over them, in their order.
      where: boolean mask with the shape of `labels`, or one that broadcasts with `logits`. Softmax and smoothing
        include the entries where it is True; the label's logit always counts. If all entries of a token are masked, its
        loss is 0.
      label_smoothing: the uniform distribution's weight in the targets, in [0, 1].
      z_loss: factor for the squared logsumexp, such as 1e-4, which keeps logits from drifting.
      logits_soft_cap: bound on the logits, such as 30.0; None: no bound.
      ignore_index: label of tokens with zero loss and gradient; None: no such label.
      return_logsumexp: return a pair: every token's loss and its logsumexp over the logits that take part.

    Returns:
      Every token's loss, with the shape of `labels`; f32 (f64 for f64).

    Raises:
      TypeError: `logits` are not floating, or `labels` are not integers.
      ValueError: shapes do not fit, a NumPy array has a label that is out of range, or an option is out of range.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> logits = jnp.array([[1.2, -0.8, -0.5], [0.9, -1.2, 1.1]])
      >>> jaxops.softmax_cross_entropy_with_integer_labels(logits, jnp.array([0, 1]))
      Array([0.2761297, 2.951799 ], dtype=float32)
    """
    op = "softmax_cross_entropy_with_integer_labels"
    options = Options.checked(op, label_smoothing, z_loss, logits_soft_cap, ignore_index)
    return_logsumexp = arguments.flag(op, "return_logsumexp", return_logsumexp)
    rows = _Rows.of(op, logits, labels, axis, where, options)
    values = kernels.forward(
        rows.logits,
        rows.labels,
        rows.where,
        axes=(rows.axis,),
        dtype=accumulator(rows.logits.dtype),
        cap=options.cap,
        results=("sum",) if options.smoothing else (),
    )
    loss, lse = options.loss(*values, rows.count)
    if not return_logsumexp:
        return rows.finished(loss)
    visible = None if where is None else rows.counted
    return rows.finished(loss), rows.squeezed(lse if visible is None else jnp.where(visible, lse, -jnp.inf))


def softmax_cross_entropy_value_and_grad(
    logits: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    weights: jax.typing.ArrayLike | None = None,
    axis: int = -1,
    where: jax.typing.ArrayLike | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The losses of :func:`jaxops.softmax_cross_entropy_with_integer_labels` and the logits' gradient, in one pass.

    On GPUs with compute capability 9.0 or 10.x, rows of up to 524288 16-bit or 262144 f32 logits are read once and
    their gradient is written once; on 12.x half as many, and on 8.x up to 32768 or 16384. Longer rows take two passes.
    Give the gradient to the model's pullback: call `logits, pullback = jax.vjp(model, parameters)`, then
    `pullback(gradient)`.

    Args:
      logits: as for softmax_cross_entropy_with_integer_labels.
      labels: integers, shaped like `logits` without `axis`.
      weights: each token's factor in the sum that is differentiated; broadcasts to the shape of `labels`. It does not
        change the returned losses. None: 1. For a mean use 1 / tokens.
      axis: the vocabulary's axis, an int.
      where: as for softmax_cross_entropy_with_integer_labels.
      label_smoothing: the uniform distribution's weight in the targets, in [0, 1].
      z_loss: factor for the squared logsumexp.
      logits_soft_cap: bound on the logits; None: no bound.
      ignore_index: label of tokens with zero loss and gradient; None: no such label.

    Returns:
      Every token's loss, without the weights, in f32 (f64 for f64), and the gradient of the weighted losses' sum, with
      the shape and dtype of `logits`.

    Raises:
      TypeError: `logits` or `weights` are not floating, `labels` are not integers, or `axis` is not an int.
      ValueError: as for softmax_cross_entropy_with_integer_labels.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> logits = jnp.zeros((2, 4), jnp.bfloat16)
      >>> loss, gradient = jaxops.softmax_cross_entropy_value_and_grad(logits, jnp.array([0, 3]), 1 / 2)
      >>> loss, gradient[0]
      (Array([1.3862944, 1.3862944], dtype=float32), Array([-0.375, 0.125, 0.125, 0.125], dtype=bfloat16))
    """
    op = "softmax_cross_entropy_value_and_grad"
    options = Options.checked(op, label_smoothing, z_loss, logits_soft_cap, ignore_index)
    axis = arguments.static_int(op, "axis", axis)
    rows = _Rows.of(op, logits, labels, axis, where, options)
    if rows.logits.shape != jnp.shape(logits):
        raise ValueError(f"{op}: labels and where must not enlarge logits {list(jnp.shape(logits))}")
    wide = accumulator(rows.logits.dtype)
    shape = rows.labels.shape
    factors = jnp.ones(shape, wide)
    if weights is not None:
        weights = arguments.real_array(op, "weights", weights).astype(wide)
        tokens = shape[: rows.axis] + shape[rows.axis + 1 :]
        if arguments.joint_shape(op, labels=tokens, weights=weights.shape) != tokens:
            raise ValueError(f"{op}: weights must broadcast to {list(tokens)}, got {list(weights.shape)}")
        factors = jnp.expand_dims(jnp.broadcast_to(weights, tokens), rows.axis)
    if rows.counted is not None:
        factors = jnp.where(rows.counted, factors, 0)
    gradient, *values = kernels.forward_backward(
        rows.logits,
        rows.labels,
        rows.where,
        factors,
        -options.label_weight() * factors,
        -options.smoothing * factors / rows.count if options.smoothing else None,
        axes=(rows.axis,),
        dtype=rows.logits.dtype,
        cap=options.cap,
        z_loss=options.z_loss,
        in_place=False,
    )
    loss, _ = options.loss(*values, rows.count)
    return rows.finished(loss), gradient

"""matmul and dot_general."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import dot_general as jax_dot_general
from jax.numpy import matmul as jax_matmul

from jaxops import _arguments as arguments
from jaxops._rows import accumulator, expand_rank, promoted
from jaxops._warnings import warn_fallback
from jaxops.ops._epilogue import ACTIVATIONS
from jaxops.ops._matmul_kernel import EIGHT_BITS, Spec, arithmetic_of, has_algorithm, kernel, precision_of


@functools.lru_cache(maxsize=1024)
def _reference_shape(function, a, b, x64, promotion):
    """The reference's result shape and dtype; for bad operands, the reference's error."""
    del x64, promotion  # part of the cache's key: dtypes promote differently under them
    return jax.eval_shape(function, a, b)


@dataclasses.dataclass(frozen=True)
class _Reference:
    """jnp.matmul or lax.dot_general with its options: hashable, so that `_reference_shape` can cache."""

    dimension_numbers: Any
    precision: Any
    preferred: Any

    def __call__(self, a, b, **options):
        options |= {"precision": self.precision, "preferred_element_type": self.preferred}
        if self.dimension_numbers is None:
            return jax_matmul(a, b, **options)
        return jax_dot_general(a, b, self.dimension_numbers, **options)


def _plan(op, a, b, precision, preferred, out_sharding, dimension_numbers=None):
    """The reference, its result's shape and dtype, the kernels' operand dtypes or None, the precision."""
    if preferred is not None:
        preferred = arguments.result_dtype(op, preferred, None, "preferred_element_type", accepted=None)
    precision = arguments.precision(op, "precision", precision)
    if not isinstance(out_sharding, jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None):
        accepted = "a NamedSharding, a PartitionSpec or None"
        raise TypeError(f"{op}: out_sharding must be {accepted}, got {out_sharding!r}")
    reference = _Reference(dimension_numbers, precision, preferred)
    # jax.numpy lets a weakly typed operand take the other's dtype, lax does not.
    promotes = dimension_numbers is None
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=promotes and x.weak_type) for x in (a, b)]
    try:
        out = _reference_shape(reference, *avals, jax.config.jax_enable_x64, jax.config.jax_numpy_dtype_promotion)
    except (TypeError, ValueError) as error:
        names = ("a", "b") if dimension_numbers is None else ("lhs", "rhs")
        given = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in zip(names, (a, b), strict=True))
        given += f", dimension_numbers {dimension_numbers}" if dimension_numbers is not None else ""
        given += f", preferred_element_type {preferred}" if preferred is not None else ""
        raise type(error)(f"{op}: {given} do not fit together: {error}") from error
    wanted = precision_of(precision)
    dtypes, why = _kernel_operands(a, b, out.dtype, wanted, promotes)
    if out_sharding is not None:
        why = "out_sharding is left to XLA's dot"
    if why:
        warn_fallback(op, why)
        dtypes = None
    return reference, out, dtypes, wanted


def _kernel_operands(a, b, result, precision, promotes: bool) -> tuple[tuple[Any, Any], str | None]:
    """The kernels' operand dtypes, and why there is no kernel; precision: as `precision_of` gives it."""
    dtypes, names = (a.dtype, b.dtype), {a.dtype.name, b.dtype.name}
    if names <= set(EIGHT_BITS):
        fits = result in (np.float32, jnp.bfloat16)
    else:
        try:
            common = promoted(*((a, b) if promotes else dtypes))
        except ValueError:  # no promotion is defined, as from 8-bit floats
            common = None
        fits = common is not None and common.name in arguments.FLOATS and result in (common, accumulator(common))
        dtypes = (common, common)
    if not fits:
        return dtypes, f"there is no kernel for {a.dtype} and {b.dtype} with a result of {result}"
    if has_algorithm(precision) and arithmetic_of(*dtypes, precision) is None:
        name = getattr(precision, "name", precision)
        return dtypes, f"there is no kernel for the dot algorithm {name} of {a.dtype} and {b.dtype}"
    return dtypes, None


def why_no_kernel(lhs: Any, rhs: Any, result: Any, precision: Any) -> str | None:
    """Why `dot_general` on operands of these types would fall back to XLA's dot; None: it has a kernel."""
    return _kernel_operands(lhs, rhs, np.dtype(result), precision_of(precision), promotes=False)[1]


def matmul(
    a: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    bias: jax.typing.ArrayLike | None = None,
    activation: str | None = None,
    lhs_scale: jax.typing.ArrayLike | None = None,
    rhs_scale: jax.typing.ArrayLike | None = None,
) -> jax.Array:
    r"""Matrix product as in :func:`jax.numpy.matmul`: :math:`\mathrm{activation}(s\,a b + \mathrm{bias})`.

    Sums are kept in f32 (f64 for f64). Scales, bias and activation are applied to these sums before the result is
    rounded. If the contracted axis is split over devices, each device's sum is rounded to the result's dtype before
    the sums are added, as in XLA.

    On a GPU, f32 operands are rounded to TF32, as in XLA; with the highest precision the error is as small as with f32
    arithmetic. Shapes, dtypes and the device decide which kernel runs, by measured rates. If XLA's own dot is faster,
    it runs instead; :func:`jaxops.explain` shows the choice. XLA's dot also runs on the CPU, and, with a
    :class:`jaxops.FallbackWarning`, for dtypes and options that no kernel supports.

    Args:
      a: array of 1 or more dimensions, `[..., m, k]`; 1-D as in numpy.
      b: array of 1 or more dimensions, `[..., k, n]`; 1-D as in numpy. Leading axes broadcast.
      precision: as in jax.numpy.matmul; see above.
      preferred_element_type: the result's dtype; by default `a` and `b` promote.
      out_sharding: as in jax.numpy.matmul.
      bias: array that broadcasts to the result's shape; added in f32 (f64).
      activation: None, "relu", "gelu" (the tanh form), "gelu_exact" (with erf) or "silu".
      lhs_scale: scalar that multiplies `a`, such as an 8-bit tensor's scale; used in f32 (f64).
      rhs_scale: scalar that multiplies `b`. In the formula, s is the product of both scales.

    Returns:
      The product, with the same shape as in numpy; never weakly typed.

    Raises:
      TypeError: an operand is a list, or the contracted axes differ.
      ValueError: an operand is a scalar, `activation` is unknown, `bias` does not broadcast, or a scale has axes.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.matmul(jnp.eye(2), jnp.array([[1.0, -2.0], [3.0, 4.0]]), bias=jnp.array([0.0, 1.0]), activation="relu")
      Array([[1., 0.],
             [3., 5.]], dtype=float32)
    """
    a, b = arguments.array("matmul", "a", a), arguments.array("matmul", "b", b)
    if not isinstance(activation, str | None) or activation not in ACTIVATIONS:
        accepted = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"matmul: activation must be one of {accepted}, got {activation!r}")
    reference, out, dtypes, wanted = _plan("matmul", a, b, precision, preferred_element_type, out_sharding)
    if bias is not None:
        bias = arguments.real_array("matmul", "bias", bias)
        if arguments.joint_shape("matmul", result=out.shape, bias=bias.shape) != out.shape:
            raise ValueError(f"matmul: bias must broadcast to the result's shape {out.shape}, got {bias.shape}")
    scale = _joint_scale("matmul", lhs_scale, rhs_scale, out.dtype)
    if dtypes is None:
        return _compose("matmul", reference, (a, b), out, out_sharding, scale, bias, activation)

    rank = max(a.ndim, b.ndim, 2)
    lhs = (a[None, :] if a.ndim == 1 else a).astype(dtypes[0])
    rhs = (b[:, None] if b.ndim == 1 else b).astype(dtypes[1])
    if bias is not None:
        bias = expand_rank(bias.astype(accumulator(*dtypes)), len(out.shape))
        bias = jnp.expand_dims(bias, [axis for axis, x in ((-2, a), (-1, b)) if x.ndim == 1])
        bias = expand_rank(bias, rank)
    # With one matrix for the whole batch, the batch axes are rows.
    one_matrix = all(d == 1 for d in rhs.shape[:-2]) and (bias is None or all(d == 1 for d in bias.shape[:-1]))
    lhs = expand_rank(lhs, rank)
    rhs = rhs.reshape(rhs.shape[-2:]) if one_matrix else expand_rank(rhs, rank)
    counts = (rank - 1, 1, 1) if one_matrix else (1, 1, 1)
    spec = Spec(False, False, np.dtype(out.dtype), activation, wanted, counts)
    scale = None if scale is None else expand_rank(scale, lhs.ndim)
    return kernel(lhs, rhs, scale, bias, spec)[0].reshape(out.shape)


def _joint_scale(op, lhs_scale, rhs_scale, dtype):
    """The product of the given scales, in the dtype that sums `dtype` results; None if there are no scales."""
    scales = []
    for name, scale in (("lhs_scale", lhs_scale), ("rhs_scale", rhs_scale)):
        if scale is None:
            continue
        scale = arguments.real_array(op, name, scale)
        if scale.ndim:
            raise ValueError(f"{op}: {name} must be a scalar, got shape {scale.shape}")
        scales.append(scale.astype(accumulator(dtype)))
    return functools.reduce(operator.mul, scales) if scales else None


def _compose(op, reference, operands, out, out_sharding, scale=None, bias=None, activation=None):
    """XLA's dot with scale, bias and activation, for products without a kernel; never weakly typed.

    Scale, bias and activation get the dot's sums, as in the kernels, not sums rounded to the result's dtype.
    """
    dtype = out.dtype
    if scale is bias is activation is None:
        return reference(*operands, out_sharding=out_sharding).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{op}: scales, bias and activation need a result of a floating dtype, got {dtype}")
    wide = accumulator(dtype)
    out = dataclasses.replace(reference, preferred=wide)(*operands, out_sharding=out_sharding).astype(wide)
    out = out if scale is None else out * scale
    out = out if bias is None else out + expand_rank(bias.astype(wide), out.ndim)
    return ACTIVATIONS[activation](out).astype(dtype)


def _ordered(x, batch, first, second):
    """x with its axes in the order batch, first, second; or batch, second, first (True), if they already lie so."""
    straight, swapped = (*batch, *first, *second), (*batch, *second, *first)
    if swapped == tuple(range(x.ndim)) and straight != swapped:
        return x, True
    return (x if straight == tuple(range(x.ndim)) else jnp.transpose(x, straight)), False


def dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    lhs_scale: jax.typing.ArrayLike | None = None,
    rhs_scale: jax.typing.ArrayLike | None = None,
) -> jax.Array:
    """General contraction with the semantics of :func:`jax.lax.dot_general`, on the kernels of :func:`jaxops.matmul`.

    Pass it wherever a layer or function accepts a dot_general: `flax.linen.Dense(dot_general=jaxops.dot_general)`,
    `jax.numpy.einsum(..., _dot_general=jaxops.dot_general)`.

    Args:
      lhs: array.
      rhs: array; if the dtypes differ, both operands promote.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`, each operand's axes.
      precision: as in jax.lax.dot_general; see :func:`jaxops.matmul`.
      preferred_element_type: the result's dtype; by default the operands promote.
      out_sharding: as in jax.lax.dot_general.
      lhs_scale: scalar that multiplies `lhs`; see :func:`jaxops.matmul`.
      rhs_scale: scalar that multiplies `rhs`.

    Returns:
      The contraction, with batch axes first, then lhs's free axes, then rhs's free axes.

    Raises:
      TypeError, ValueError: axes do not exist or do not match, as in jax.lax.dot_general; a scale is not a scalar.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.dot_general(jnp.ones((2, 3)), jnp.ones((4, 3)), (((1,), (1,)), ((), ()))).shape
      (2, 4)
    """
    return general_product(
        lhs,
        rhs,
        dimension_numbers,
        precision,
        preferred_element_type,
        out_sharding=out_sharding,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
    )


def general_product(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    lhs_scale: Any = None,
    rhs_scale: Any = None,
    bias: jax.Array | None = None,
    activation: str | None = None,
    triangle: str | None = None,
) -> jax.Array:
    """`dot_general` with the options of `matmul`, or without a triangle of the product: see `Spec`.

    bias: in a floating dtype, with the result's rank.
    """
    lhs, rhs = arguments.array("dot_general", "lhs", lhs), arguments.array("dot_general", "rhs", rhs)
    try:
        numbers = tuple(
            tuple(tuple(map(operator.index, axes)) for axes in (lhs_axes, rhs_axes))
            for lhs_axes, rhs_axes in dimension_numbers
        )
        _, _ = numbers
    except (TypeError, ValueError) as error:
        raise TypeError(
            "dot_general: dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), "
            f"sequences of ints, got {dimension_numbers!r}"
        ) from error
    reference, out, dtypes, wanted = _plan(
        "dot_general", lhs, rhs, precision, preferred_element_type, out_sharding, numbers
    )
    scale = _joint_scale("dot_general", lhs_scale, rhs_scale, out.dtype)
    if dtypes is None:
        return _compose("dot_general", reference, (lhs, rhs), out, out_sharding, scale, bias, activation)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    order = np.argsort(lhs_contract)
    lhs_contract, rhs_contract = ([axes[i] for i in order] for axes in (lhs_contract, rhs_contract))
    lhs_free = [a for a in range(lhs.ndim) if a not in lhs_contract and a not in lhs_batch]
    rhs_free = [a for a in range(rhs.ndim) if a not in rhs_contract and a not in rhs_batch]
    left, lhs_transposed = _ordered(lhs.astype(dtypes[0]), lhs_batch, lhs_free, lhs_contract)
    right, rhs_transposed = _ordered(rhs.astype(dtypes[1]), rhs_batch, rhs_contract, rhs_free)
    counts = (len(lhs_free), len(rhs_free), len(lhs_contract))
    spec = Spec(lhs_transposed, rhs_transposed, np.dtype(out.dtype), activation, wanted, counts, triangle=triangle)
    scale = None if scale is None else expand_rank(scale, len(out.shape))
    bias = None if bias is None else bias.astype(accumulator(*dtypes))
    return kernel(left, right, scale, bias, spec)[0]

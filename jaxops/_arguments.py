"""Checks for public arguments. Every error names the argument, the value it got and the values it accepts."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.numpy import matmul as _jax_matmul

from jaxops._warnings import warn

FLOATS = ("float64", "float32", "float16", "bfloat16")


def array(op: str, name: str, value: Any) -> jax.Array:
    """The argument as an array. Like JAX, refuses lists and tuples; accepts Flax variables."""
    arrays = (jax.Array, np.ndarray, np.generic, int, float, complex)
    if not isinstance(value, arrays) and not hasattr(value, "__jax_array__"):
        raise TypeError(f"{op}: {name} must be an array or a scalar, got {type(value).__name__}")
    try:
        x = jnp.asarray(value)
    except (TypeError, OverflowError) as error:
        what = f"dtype {value.dtype}" if isinstance(value, np.ndarray | np.generic) else repr(value)
        raise type(error)(f"{op}: {name} must be an array or a scalar of numbers, got {what}") from error
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # jax.random's keys
        raise TypeError(f"{op}: {name} must be an array or a scalar of numbers, got dtype {x.dtype}")
    return x


@functools.lru_cache(maxsize=256)
def _inexact(dtype: np.dtype, x64: bool) -> np.dtype:
    del x64  # part of the cache's key: integers promote differently under it
    return np.dtype(jax.eval_shape(jnp.exp, jax.ShapeDtypeStruct((), dtype)).dtype)


def float_array(op: str, name: str, value: Any, *, real: bool = False) -> jax.Array:
    """The argument as an array of a floating dtype; integers promote as in jax.numpy. real: refuse complex."""
    x = array(op, name, value)
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(_inexact(np.dtype(x.dtype), jax.config.jax_enable_x64))
    if x.dtype.name not in FLOATS and (real or not jnp.issubdtype(x.dtype, jnp.complexfloating)):
        others = " and integers" if real else ", integers and complex"
        raise TypeError(f"{op}: {name} has dtype {x.dtype}; accepted are {', '.join(FLOATS)}{others}")
    return x


def real_array(op: str, name: str, value: Any) -> jax.Array:
    """The argument as an array with a floating dtype that has kernels."""
    return float_array(op, name, value, real=True)


def result_dtype(
    op: str, dtype: Any, default: Any, name: str = "dtype", accepted: Sequence[str] | None = FLOATS
) -> np.dtype:
    """The result's dtype; `default` if dtype is None. accepted: the accepted dtypes' names; None: any dtype."""
    if dtype is None:
        return np.dtype(default)
    listed = "a dtype or None" if accepted is None else f"one of {', '.join(accepted)}"
    try:
        found = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} must be {listed}, got {dtype!r}") from error
    if accepted is not None and found.name not in accepted:
        raise TypeError(f"{op}: {name} must be {listed}, got {found}")
    if not any(dtype is scalar for scalar in (int, float, complex)) and found != np.dtype(dtype):
        warn(f"{op}: {name} {np.dtype(dtype)} is {found} unless jax_enable_x64 is set")
    return found


@functools.lru_cache(maxsize=256)
def _check_precision(precision: Any) -> None:
    matrix = jax.ShapeDtypeStruct((1, 1), np.float32)
    jax.eval_shape(functools.partial(_jax_matmul, precision=precision), matrix, matrix)


def precision(op: str, name: str, value: Any) -> Any:
    """A precision that jax.numpy.matmul accepts; lists become tuples."""
    value = tuple(value) if isinstance(value, list) else value
    try:
        _check_precision(value)
    except (TypeError, ValueError, KeyError) as error:
        raise type(error)(f"{op}: {name} must be one that jax.numpy.matmul takes, got {value!r}: {error}") from error
    return value


def passes(check: Callable[..., Any], *values: Any) -> bool:
    """Whether the values pass a check in this module."""
    try:
        check("", *values)
    except (TypeError, ValueError):
        return False
    return True


def joint_dtype(op: str, **arrays: jax.Array | None) -> np.dtype:
    """The dtype to which the arrays promote; None is ignored."""
    given = {name: value for name, value in arrays.items() if value is not None}
    try:
        return np.dtype(jnp.result_type(*given.values()))
    except ValueError as error:  # under jax.numpy_dtype_promotion("strict")
        listed = ", ".join(f"{name} {value.dtype}" for name, value in given.items())
        raise type(error)(f"{op}: the dtypes of {listed} do not promote: {error}") from error


def axes(op: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """The axes as ascending, non-negative integers; None means all."""
    return tuple(sorted(ordered_axes(op, axis, ndim)))


def ordered_axes(op: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """The axes as non-negative integers in the order in which they are given; None means all."""
    if axis is None:
        return tuple(range(ndim))
    given = tuple(axis) if isinstance(axis, tuple | list) or np.ndim(axis) == 1 else (axis,)
    try:
        wanted = [operator.index(a) for a in given]
    except TypeError as error:
        raise TypeError(f"{op}: axis must be an int, a tuple of ints or None, got {axis!r}") from error
    for a in wanted:
        if not -ndim <= a < ndim:
            raise ValueError(f"{op}: axis {a} is out of bounds for an array of {ndim} dimensions")
    found = [a % ndim for a in wanted]
    if len(set(found)) != len(found):
        raise ValueError(f"{op}: axis must not name an axis twice, got {axis!r}")
    return tuple(found)


def boolean(op: str, name: str, value: Any) -> jax.Array:
    """A boolean mask."""
    mask = array(op, name, value) if not isinstance(value, bool) else jnp.asarray(value)
    if mask.dtype != np.bool_:
        raise ValueError(f"{op}: {name} must be boolean, got dtype {mask.dtype}")
    return mask


def flag(op: str, name: str, value: Any) -> bool:
    """True or False, known at trace time."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}")
    return bool(value)


def joint_shape(op: str, **shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which all broadcast."""
    try:
        return jnp.broadcast_shapes(*(tuple(shape) for shape in shapes.values()))
    except ValueError as error:
        given = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(f"{op}: shapes do not broadcast: {given}") from error


def static_float(op: str, name: str, value: Any) -> float:
    """A finite, non-negative number known at trace time."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{op}: {name} must be a Python number, got a traced array")
    if isinstance(value, str | bytes | bytearray) or np.ndim(value):
        raise TypeError(f"{op}: {name} must be a Python number, got {value!r:.100}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{op}: {name} must be a Python number, got {value!r:.100}") from error
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{op}: {name} must be finite and at least 0, got {number}")
    return number


def static_int(op: str, name: str, value: Any) -> int:
    """An integer known at trace time."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{op}: {name} must be a Python int, got {value!r:.100}") from error

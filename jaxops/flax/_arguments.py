"""Checks, by name, of arguments that linen and nnx functions and layers share."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxops import _arguments as arguments
from jaxops.ops.gated_matmul import checked_options

_Function = TypeVar("_Function", bound=Callable[..., Any])


def array(where: str, name: str, value: Any) -> jax.Array:
    """Any value that jax.numpy accepts as an array, as in Flax."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{where}: {name} must be an array, got {type(value).__name__}") from error


def inputs(where: str, value: Any) -> jax.Array:
    """A layer's inputs; the last axis holds features."""
    value = array(where, "inputs", value)
    if not value.ndim:
        raise ValueError(f"{where}: inputs must have at least 1 dimension, the features, got shape ()")
    return value


def mask(where: str, value: Any, shape: Sequence[int]) -> jax.Array | None:
    """A mask of x, of the given shape, as booleans."""
    if value is None:
        return None
    value = array(where, "mask", value).astype(bool)
    if arguments.joint_shape(where, x=shape, mask=value.shape) != tuple(shape):
        raise ValueError(f"{where}: mask must broadcast to x's shape {shape}, got {value.shape}")
    return value


def _heads(where: str, name: str, value: Any) -> None:
    if arguments.array(where, name, value).ndim < 3:
        raise ValueError(f"{where}: {name} must be [batch..., tokens, heads, features], got shape {value.shape}")


def _optional_array(where: str, name: str, value: Any) -> None:
    if value is not None:
        arguments.array(where, name, value)


def _callable(where: str, name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{where}: {name} must be callable, got {value!r}")


def _optional_callable(where: str, name: str, value: Any) -> None:
    if value is not None:
        _callable(where, name, value)


def _rate(where: str, name: str, value: Any) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{where}: {name} must be a Python number, got {value!r}")
    if not 0 <= value < 1:
        raise ValueError(f"{where}: {name} must be in [0, 1), got {value}")


def _key(where: str, name: str, value: Any) -> None:
    keys = jax.dtypes.prng_key
    if value is not None and not (
        isinstance(value, jax.Array | np.ndarray) and (value.dtype == np.uint32 or jnp.issubdtype(value.dtype, keys))
    ):
        raise TypeError(f"{where}: {name} must be a key of jax.random or None, got {value!r}")


def _dtype(where: str, name: str, value: Any) -> None:
    if value is not None:
        arguments.result_dtype(where, value, None, name)


def _module(where: str, name: str, value: Any) -> None:
    if value is not None and not hasattr(value, "sow"):
        raise TypeError(f"{where}: {name} must be a Flax module or None, got {value!r}")


def _positions(where: str, name: str, value: Any) -> None:
    if value is not None:
        arguments.real_array(where, name, value)


def model(value: Any, module: type, library: str, other: str) -> None:
    """Raises TypeError unless the value is a module of the given library and base class."""
    if isinstance(value, type):
        raise TypeError(f"swap: model must be an instance, got the class {value.__name__}")
    if not isinstance(value, module):
        raise TypeError(
            f"swap: model must be a flax.{library} module, got {type(value).__name__}; see jaxops.flax.{other}.swap"
        )


def widths(where: str, **given: Any) -> None:
    """Raises an error unless all are integers above 0; None is left out."""
    for name, value in given.items():
        if value is not None and arguments.static_int(where, name, value) < 1:
            raise ValueError(f"{where}: {name} must be at least 1, got {value}")


def gated_mlp(**given: Any) -> None:
    """Raises an error that names the attribute unless all attributes of a GatedMLP fit."""
    where = "GatedMLP"
    widths(where, **{name: value for name, value in given.items() if name.endswith("_features")})
    checked_options(where, given["activation"], given["precision"])
    arguments.flag(where, "recompute", given["recompute"])
    arguments.result_dtype(where, given["dtype"], jnp.float32, "dtype")
    if given["param_dtype"] is None:
        raise TypeError(f"{where}: param_dtype must be one of {', '.join(arguments.FLOATS)}, got None")
    arguments.result_dtype(where, given["param_dtype"], None, "param_dtype")
    for name in ("kernel_init", "promote_dtype"):
        _callable(where, name, given[name])
    _optional_callable(where, "down_kernel_init", given["down_kernel_init"])
    for name in ("kernel_metadata", "down_kernel_metadata"):
        if not isinstance(given.get(name), Mapping | None):
            raise TypeError(f"{where}: {name} must be a mapping or None, got {given[name]!r}")


_CHECKS: dict[str, Callable[[str, str, Any], Any]] = {
    **dict.fromkeys(("query", "key", "value"), _heads),
    **dict.fromkeys(("bias", "mask"), _optional_array),
    **dict.fromkeys(("broadcast_dropout", "deterministic", "force_fp32_for_softmax"), arguments.flag),
    **dict.fromkeys(("causal", "is_causal", "functions", "products", "copy"), arguments.flag),
    **dict.fromkeys(("einsum_dot_general", "einsum"), _optional_callable),
    **dict.fromkeys(("qk_attn_weights_einsum", "attn_weights_value_einsum"), _optional_callable),
    **dict.fromkeys(("promote_dtype", "dot_general", "rope"), _callable),
    "dropout_rate": _rate,
    "dropout_rng": _key,
    "dtype": _dtype,
    "precision": arguments.precision,
    "module": _module,
    "input_positions": _positions,
}


def checked(function: _Function) -> _Function:
    """The function, with a check of every argument whose name has one."""
    signature, where = inspect.signature(function), function.__name__

    @functools.wraps(function)
    def call(*args, **options):
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from None
        for name, value in given.items():
            if name in _CHECKS:
                _CHECKS[name](where, name, value)
        if given.get("dropout_rate", 0) > 0 and not given.get("deterministic") and given.get("dropout_rng") is None:
            rate = given["dropout_rate"]
            raise ValueError(f"{where}: dropout_rate={rate} needs a dropout_rng, or deterministic=True")
        return function(*args, **options)

    return call

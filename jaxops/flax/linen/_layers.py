"""flax.linen's normalisation and dense layers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.linen import dtypes

from jaxops._warnings import warn_fallback
from jaxops.flax import _arguments as arguments
from jaxops.flax import _functions


def raw(layer: type[nn.Module]) -> Callable[..., Any]:
    """A layer's own `__call__`, without linen's wrapper."""
    return inspect.unwrap(layer.__call__)


#: The calls of Flax's own layers, even if their names stand for something else later.
FLAX_CALLS = {
    layer.__name__: raw(layer)
    for layer in (nn.LayerNorm, nn.RMSNorm, nn.Dense, nn.DenseGeneral, nn.MultiHeadDotProductAttention)
}


# Normalisation


def _normalise(layer: Any, x: jax.Array, mask: Any, centred: bool, residual: Any = None) -> Any:
    name = "LayerNorm" if centred else "RMSNorm"
    x = arguments.array(name, "x", x)
    mask = arguments.mask(name, mask, x.shape)
    why = _functions.why_no_norm(layer) or _functions.why_no_norm_of(centred, mask, x)
    if why:
        warn_fallback(name, why)
        total = x if residual is None else x + residual
        y = FLAX_CALLS[name](layer, total, mask=mask)
        return y if residual is None else (y, total)
    shape = [x.shape[a] for a in _functions.canonical_axes(layer.feature_axes, x.ndim)]
    scale = layer.param("scale", layer.scale_init, shape, layer.param_dtype) if layer.use_scale else None
    use_bias = centred and layer.use_bias
    bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype) if use_bias else None
    return _functions.normalise(
        x,
        scale,
        bias,
        mask,
        centred=centred,
        reduction_axes=layer.reduction_axes,
        feature_axes=layer.feature_axes,
        epsilon=layer.epsilon,
        dtype=dtypes.canonicalize_dtype(x, scale, bias, dtype=layer.dtype),
        residual=residual,
    )


def layer_norm(self: Any, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    return _normalise(self, x, mask, True)


def rms_norm(self: Any, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    return _normalise(self, x, mask, False)


class LayerNorm(nn.LayerNorm):
    """:class:`flax.linen.LayerNorm` on :func:`jaxops.layer_norm`: the same attributes, parameters and results.

    The variance is always computed stably, whatever `use_fast_variance` says, and statistics are f32 or wider, whatever
    `force_float32_reductions` says. Statistics over a mesh axis (`axis_name`) run on Flax's code, with a warning.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> y, variables = linen.LayerNorm().init_with_output(jax.random.key(0), jnp.ones((2, 4)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'bias': (4,), 'scale': (4,)}}
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Normalises x. If `mask`, which broadcasts to x's shape, is given, only positions where it is true count.

        With `residual`, an array of x's shape, returns the pair (normalised sum, sum).
        """
        return _normalise(self, x, mask, True, residual)


class RMSNorm(nn.RMSNorm):
    """:class:`flax.linen.RMSNorm` on :func:`jaxops.rms_norm`: the same attributes, parameters and results.

    Masks and statistics over a mesh axis (`axis_name`) run on Flax's code, with a warning.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> linen.RMSNorm(epsilon=0.0, use_scale=False).apply({}, jnp.array([3.0, 4.0]))
      Array([0.84852815, 1.1313709 ], dtype=float32)
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Normalises x; with a mask on Flax's code.

        With `residual`, an array of x's shape, returns the pair (normalised sum, sum).
        """
        return _normalise(self, x, mask, False, residual)


# Linear layers


def why_no_product(layer: Any) -> str | None:
    for name in ("dot_general", "dot_general_cls"):
        if getattr(layer, name, None) is not None:
            return f"{name}= is given"
    return None


def dense(
    self: Any,
    inputs: jax.Array,
    activation: str | None = None,
    note: Callable[[jax.Array, Callable[..., jax.Array]], None] | None = None,
) -> jax.Array:
    """If there is a bias, calls `note` with the result and with a function that computes it with a given activation."""
    inputs = arguments.inputs("Dense", inputs)
    shape = (inputs.shape[-1], self.features)
    kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
    bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
    inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
    multiply = functools.partial(
        _functions.contract, inputs, kernel, bias, axes=(inputs.ndim - 1,), precision=self.precision
    )
    out = multiply(activation=activation)
    if note is not None and bias is not None:
        note(out, multiply)
    return out


def _initialise_flat(init: Callable[..., Any], *flat: int) -> Callable[..., Any]:
    """Initialises a matrix or vector of shape `flat`, then reshapes it to the parameter's shape."""

    def initialise(rng, shape, dtype=jnp.float32):
        value = init(rng, flat, dtype)
        if isinstance(value, meta.AxisMetadata):
            return meta.replace_boxed(value, jnp.reshape(value.unbox(), shape))
        return jnp.reshape(value, shape)

    return initialise


def _as_tuple(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,)


def dense_general(self: Any, inputs: jax.Array) -> jax.Array:
    features, batch_axes = _as_tuple(self.features), _as_tuple(self.batch_dims)
    inputs = arguments.inputs("DenseGeneral", inputs)
    axes = _functions.canonical_axes(_as_tuple(self.axis), inputs.ndim)
    if set(batch_axes) != set(range(len(batch_axes))):
        raise ValueError(f"DenseGeneral: batch_dims must be the leading axes 0, 1, ..., got {batch_axes}")
    batch, contracted = ([inputs.shape[a] for a in named] for named in (sorted(batch_axes), axes))
    rows, columns = math.prod(batch) * math.prod(contracted), math.prod(features)
    init = _initialise_flat(self.kernel_init, rows, columns)
    kernel = self.param("kernel", init, (*batch, *contracted, *features), self.param_dtype)
    bias = None
    if self.use_bias:
        init = _initialise_flat(self.bias_init, math.prod(batch) * columns)
        bias = self.param("bias", init, (*batch, *features), self.param_dtype)
    inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
    return _functions.contract(inputs, kernel, bias, axes=axes, batch_axes=sorted(batch_axes), precision=self.precision)


class Dense(nn.Dense):
    """:class:`flax.linen.Dense` on :func:`jaxops.matmul`, bias and activation in the same kernel.

    Attributes, parameters and results are Flax's, up to rounding (see :func:`jaxops.matmul`). If you pass your
    own `dot_general=`, the layer is Flax's.

    Attributes:
      activation: None, "relu", "gelu" (the tanh form), "gelu_exact" (with erf) or "silu"; applied to the result.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> layer = linen.Dense(2, kernel_init=jax.nn.initializers.ones, activation="relu")
      >>> layer.init_with_output(jax.random.key(0), jnp.array([[1.0, 2.0], [1.0, -2.0]]))[0]
      Array([[3., 3.],
             [0., 0.]], dtype=float32)
    """

    activation: str | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`[..., k]` to `[..., features]`."""
        why = why_no_product(self)
        if why and self.activation is not None:
            raise ValueError(f"Dense: activation={self.activation!r} is part of the kernel, but {why}")
        return FLAX_CALLS["Dense"](self, inputs) if why else dense(self, inputs, self.activation)


class DenseGeneral(nn.DenseGeneral):
    """:class:`flax.linen.DenseGeneral` on :func:`jaxops.matmul`, the bias in the same kernel.

    Attributes, parameters and results are Flax's, up to rounding (see :func:`jaxops.matmul`). If you pass your
    own `dot_general=`, the layer is Flax's.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> layer = linen.DenseGeneral((4, 5), axis=(1, -1))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 3, 6, 7)))[0].shape
      (2, 6, 4, 5)
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Contracts the axes `axis`; the new feature axes come last."""
        return FLAX_CALLS["DenseGeneral"](self, inputs) if why_no_product(self) else dense_general(self, inputs)


class _Kernel(nn.Module):
    """The kernel that a dense layer of this module's name has."""

    shape: tuple[int, int]
    dtype: Any
    kernel_init: Callable[..., Any]

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("kernel", self.kernel_init, self.shape, self.dtype)


class GatedMLP(nn.Module):
    """A gated MLP on :func:`jaxops.gated_mlp`: `down(activation(gate(x)) * up(x))`, of three dense layers without bias.

    Flax has no such layer. Three `nn.Dense(use_bias=False)` named `gate`, `up` and `down` inside a module have the same
    parameters, also from the same key: `gate/kernel` and `up/kernel` of shape `[k, hidden_features]`, `down/kernel` of
    shape `[hidden_features, out_features]`. dtypes are Dense's.

    Attributes:
      hidden_features: width between the products.
      out_features: width of the result; by default the width of the inputs.
      activation: "silu" (SwiGLU), "gelu" (the tanh form; GEGLU), "gelu_exact" (with erf) or "relu".
      dtype: dtype of the computation; by default inputs and parameters promote.
      param_dtype: dtype of the parameters, float32 by default.
      precision: the products' precision, as in jax.numpy.matmul.
      kernel_init: initialises the kernels. `nn.with_partitioning` and the like are respected.
      down_kernel_init: initialises the kernel of `down`, which is split along other axes; by default `kernel_init`.
      promote_dtype: as in `nn.Dense`; takes the inputs and all three kernels.
      recompute: if True, the backward pass keeps only the inputs and parameters, and computes two products again.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> layer = linen.GatedMLP(hidden_features=16)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 4)))
      >>> y.shape
      (2, 4)
      >>> jax.tree.map(jnp.shape, variables["params"])
      {'down': {'kernel': (16, 4)}, 'gate': {'kernel': (4, 16)}, 'up': {'kernel': (4, 16)}}
    """

    hidden_features: int
    out_features: int | None = None
    activation: str = "silu"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal()
    down_kernel_init: Callable[..., Any] | None = None
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype
    recompute: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`[..., k]` to `[..., out_features]`."""
        arguments.gated_mlp(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        inputs = arguments.inputs("GatedMLP", inputs)
        first = (inputs.shape[-1], self.hidden_features)
        last = (self.hidden_features, self.out_features or inputs.shape[-1])
        inits = (self.kernel_init, self.kernel_init, self.down_kernel_init or self.kernel_init)
        kernels = [
            _Kernel(shape, self.param_dtype, init, name=name)()
            for name, shape, init in zip(("gate", "up", "down"), (first, first, last), inits, strict=True)
        ]
        inputs, *kernels = self.promote_dtype(inputs, *kernels, dtype=self.dtype)
        return _functions.run_gated_mlp(
            inputs, kernels, activation=self.activation, precision=self.precision, recompute=self.recompute
        )

"""flax.linen's layers on jaxops' kernels, and `swap`, which puts them into an existing linen model.

Every layer is a subclass of Flax's, of the same name: attributes, defaults, parameters, automatic names and result
dtypes are Flax's, and checkpoints fit both ways. What a layer has no kernel for (see `why_not` in
:class:`jaxops.flax._report.SwapReport`) it computes as Flax does, with a :class:`jaxops.FallbackWarning`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.linen import dtypes

from jaxops._kernel import warn_fallback
from jaxops._patch import Replacement, patch_jax_nn
from jaxops.flax import _layers
from jaxops.flax._report import SwapReport
from jaxops.ops.matmul import dot_general

__all__ = [
    "Dense",
    "DenseGeneral",
    "LayerNorm",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "RMSNorm",
    "SwapReport",
    "dot_product_attention",
    "dot_product_attention_weights",
    "swap",
    "swapped",
]

_Model = TypeVar("_Model", bound=nn.Module)


def _raw(layer: type[nn.Module]) -> Callable[..., Any]:
    """A layer's own `__call__`, without what linen wraps around it."""
    return inspect.unwrap(layer.__call__)


# Normalisation


def _why_no_norm(layer: Any) -> str | None:
    return _layers.why_no_norm(layer)


def _normalise(layer: Any, x: jax.Array, mask: Any, centred: bool, flax: type[nn.Module], residual: Any = None) -> Any:
    why = _why_no_norm(layer) or _layers.why_no_norm_of(x)
    if not centred and mask is not None:
        why = why or "a mask has no kernel"
    if why:
        warn_fallback(flax.__name__, why)
        total = x if residual is None else x + residual
        y = _raw(flax)(layer, total, mask=mask)
        return y if residual is None else (y, total)
    shape = [x.shape[a] for a in _layers.canonical_axes(layer.feature_axes, x.ndim)]
    scale = layer.param("scale", layer.scale_init, shape, layer.param_dtype) if layer.use_scale else None
    use_bias = centred and layer.use_bias
    bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype) if use_bias else None
    return _layers.normalise(
        jnp.asarray(x),
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


def _layer_norm(self: Any, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    return _normalise(self, x, mask, True, nn.LayerNorm)


def _rms_norm(self: Any, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    return _normalise(self, x, mask, False, nn.RMSNorm)


class LayerNorm(nn.LayerNorm):
    """:class:`flax.linen.LayerNorm` on :func:`jaxops.layer_norm`: the same attributes, parameters and results.

    The variance is always the stable one, whatever `use_fast_variance` says, and the statistics are in f32 or wider,
    whatever `force_float32_reductions` says. Statistics over a mesh axis (`axis_name`) are Flax's own, with a warning.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> y, variables = linen.LayerNorm().init_with_output(jax.random.key(0), jnp.ones((2, 4)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'bias': (4,), 'scale': (4,)}}
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Normalises x; the statistics count the positions where `mask`, which broadcasts to x's shape, is true.

        With `residual`, an array of x's shape, the result is the pair of the normalised sum and the sum.
        """
        return _normalise(self, x, mask, True, nn.LayerNorm, residual)


class RMSNorm(nn.RMSNorm):
    """:class:`flax.linen.RMSNorm` on :func:`jaxops.rms_norm`: the same attributes, parameters and results.

    A call with a mask, and statistics over a mesh axis (`axis_name`), are Flax's own, with a warning.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> linen.RMSNorm(epsilon=0.0, use_scale=False).apply({}, jnp.array([3.0, 4.0]))
      Array([0.84852815, 1.1313709 ], dtype=float32)
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Normalises x; a mask is Flax's own.

        With `residual`, an array of x's shape, the result is the pair of the normalised sum and the sum.
        """
        return _normalise(self, x, mask, False, nn.RMSNorm, residual)


# Linear layers


def _why_no_product(layer: Any) -> str | None:
    for name in ("dot_general", "dot_general_cls"):
        if getattr(layer, name, None) is not None:
            return f"{name}= is given"
    return None


def _dense(self: Any, inputs: jax.Array, activation: str | None = None) -> jax.Array:
    shape = (jnp.shape(inputs)[-1], self.features)
    kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
    bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
    inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
    return _layers.contract(
        inputs, kernel, bias, axes=(inputs.ndim - 1,), activation=activation, precision=self.precision
    )


def _initialise_flat(init: Callable[..., Any], rows: int, columns: int) -> Callable[..., Any]:
    """The initialiser for a matrix, or for a vector (rows = 0), that then takes the parameter's own shape."""

    def initialise(rng, shape, dtype=jnp.float32):
        value = init(rng, (rows, columns) if rows else (columns,), dtype)
        if isinstance(value, meta.AxisMetadata):
            return meta.replace_boxed(value, jnp.reshape(value.unbox(), shape))
        return jnp.reshape(value, shape)

    return initialise


def _as_tuple(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,)


def _dense_general(self: Any, inputs: jax.Array) -> jax.Array:
    features, batch_axes = _as_tuple(self.features), _as_tuple(self.batch_dims)
    axes = tuple(sorted(a % inputs.ndim for a in _as_tuple(self.axis)))
    if set(batch_axes) != set(range(len(batch_axes))):
        raise ValueError(f"DenseGeneral: batch_dims must be the leading axes 0, 1, ..., got {batch_axes}")
    batch, contracted = ([inputs.shape[a] for a in named] for named in (sorted(batch_axes), axes))
    rows, columns = math.prod(batch) * math.prod(contracted), math.prod(features)
    init = _initialise_flat(self.kernel_init, rows, columns)
    kernel = self.param("kernel", init, (*batch, *contracted, *features), self.param_dtype)
    bias = None
    if self.use_bias:
        init = _initialise_flat(self.bias_init, 0, math.prod(batch) * columns)
        bias = self.param("bias", init, (*batch, *features), self.param_dtype)
    inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
    return _layers.contract(inputs, kernel, bias, axes=axes, batch_axes=sorted(batch_axes), precision=self.precision)


class Dense(nn.Dense):
    """:class:`flax.linen.Dense` on :func:`jaxops.matmul`, bias and activation in the same kernel.

    Attributes, parameters and results are Flax's; the bias is added before the product is rounded. With a
    `dot_general=` of the user's own it is Flax's layer.

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
        why = _why_no_product(self)
        if why and self.activation is not None:
            raise ValueError(f"Dense: activation={self.activation!r} is part of the kernel, but {why}")
        return _raw(nn.Dense)(self, inputs) if why else _dense(self, inputs, self.activation)


class DenseGeneral(nn.DenseGeneral):
    """:class:`flax.linen.DenseGeneral` on :func:`jaxops.matmul`, the bias in the same kernel.

    Attributes, parameters and results are Flax's; the bias is added before the product is rounded. With a
    `dot_general=` of the user's own it is Flax's layer.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> layer = linen.DenseGeneral((4, 5), axis=(1, -1))
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 3, 6, 7)))[0].shape
      (2, 6, 4, 5)
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Contracts the axes `axis`; the features come last."""
        return _raw(nn.DenseGeneral)(self, inputs) if _why_no_product(self) else _dense_general(self, inputs)


# Attention


def dot_product_attention_weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    einsum: Callable[..., jax.Array] | None = None,
    *,
    causal: bool = False,
) -> jax.Array:
    """:func:`flax.linen.dot_product_attention_weights` on jaxops: scaling, bias, mask and softmax in one kernel.

    A query that sees no key has equal weights, as in Flax.

    Args:
      query: `[batch..., queries, heads, depth]`.
      key: `[batch..., keys, heads, depth]`.
      bias: broadcasts to `[batch..., heads, queries, keys]`; added to the scaled logits.
      mask: broadcasts to the same shape; an entry takes part where it is true.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights, as in Flax, bit by bit.
      dtype: of the computation; by default the one to which query and key promote.
      precision, einsum_dot_general, einsum: of the product, as in Flax; by default jaxops.dot_general's.
      module: stores the weights as the intermediate "attention_weights".
      force_fp32_for_softmax: the weights are float32. The softmax is computed in f32 in any case.
      causal: query i sees the keys 0 to i, besides `mask`.

    Returns:
      `[batch..., heads, queries, keys]`.

    Raises:
      ValueError: both `einsum` and one of `precision` and `einsum_dot_general` are given, or shapes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> x = jnp.ones((2, 1, 4))
      >>> linen.dot_product_attention_weights(x, x, causal=True)
      Array([[[1. , 0. ],
              [0.5, 0.5]]], dtype=float32)
    """
    query, key = dtypes.promote_dtype(query, key, dtype=dtype)
    options = _Weights(bias, mask, causal, broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    einsum = _einsum("einsum", einsum, precision, einsum_dot_general)
    return _weights(query, key, options, einsum, precision, module, force_fp32_for_softmax, uniform=True)


class _Weights(NamedTuple):
    """Arguments of attention that concern its weights."""

    bias: jax.Array | None
    mask: jax.Array | None
    causal: bool
    broadcast_dropout: bool
    dropout_rng: jax.Array | None
    dropout_rate: float
    deterministic: bool

    @property
    def drops(self) -> bool:
        return not self.deterministic and self.dropout_rate > 0


def _einsum(name, einsum, precision, product):
    """The einsum that the arguments ask for; None: the default products."""
    if einsum and (precision or product):
        raise ValueError(
            f"attention: {name} is given, and precision or einsum_dot_general too; they exclude each other"
        )
    if product:
        return functools.partial(jnp.einsum, precision=precision, _dot_general=product)
    return einsum


def _weights(query, key, options, einsum, precision, module, force_float32, uniform):
    if query.ndim != key.ndim or query.shape[:-3] != key.shape[:-3] or query.shape[-2:] != key.shape[-2:]:
        raise ValueError(
            f"attention: query {query.shape} and key {key.shape} must have the same batch axes, heads and depth"
        )
    dtype = query.dtype
    if einsum:
        logits = einsum("...qhd,...khd->...hqk", query, key)
    else:
        logits = _layers.query_key(query, key, dot_general, precision=precision)
    weights = _layers.attention_weights(
        logits,
        options.bias,
        options.mask,
        scale=query.shape[-1] ** -0.5,
        causal=options.causal,
        dtype=jnp.promote_types(dtype, jnp.float32) if force_float32 else dtype,
        uniform=uniform,
    )
    if module:
        module.sow("intermediates", "attention_weights", weights)
    if options.drops:
        rng, rate, broadcast = options.dropout_rng, options.dropout_rate, options.broadcast_dropout
        weights = _layers.drop(weights, rng, rate, broadcast, key.ndim - 2, dtype)
    return weights


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    causal: bool = False,
) -> jax.Array:
    """:func:`flax.linen.dot_product_attention` on jaxops, for `MultiHeadDotProductAttention(attention_fn=...)`.

    The products run on :func:`jaxops.dot_general`; scaling, bias, mask and softmax are one kernel. A query that sees
    no key attends to all equally, as in Flax.

    Args:
      query: `[batch..., queries, heads, depth]`.
      key: `[batch..., keys, heads, depth]`.
      value: `[batch..., keys, heads, features]`.
      bias: broadcasts to `[batch..., heads, queries, keys]`; added to the scaled logits.
      mask: broadcasts to the same shape; an entry takes part where it is true.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights, as in Flax, bit by bit.
      dtype: of the computation; by default the one to which query, key and value promote.
      precision, einsum_dot_general: of both products, as in Flax; by default jaxops.dot_general's.
      module: stores the weights as the intermediate "attention_weights".
      force_fp32_for_softmax: the weights are float32. The softmax is computed in f32 in any case.
      qk_attn_weights_einsum, attn_weights_value_einsum: einsums of the user's own, both or none.
      causal: query i sees the keys 0 to i, besides `mask`; masked keys are not even read.

    Returns:
      `[batch..., queries, heads, features]`.

    Raises:
      ValueError: options that exclude each other, or shapes that do not fit.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxops.flax import linen
      >>> causal = functools.partial(linen.dot_product_attention, causal=True)
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=causal)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((1, 5, 8)))[0].shape
      (1, 5, 8)
    """
    if bool(qk_attn_weights_einsum) != bool(attn_weights_value_einsum):
        raise ValueError("attention: qk_attn_weights_einsum and attn_weights_value_einsum must be given together")
    query, key, value = dtypes.promote_dtype(query, key, value, dtype=dtype)
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"attention: key {key.shape} and value {value.shape} must agree but for their last axes")
    qk = _einsum("qk_attn_weights_einsum", qk_attn_weights_einsum, precision, einsum_dot_general)
    mix = _einsum("attn_weights_value_einsum", attn_weights_value_einsum, precision, einsum_dot_general)
    if _is_causal(mask, query, key):
        causal, mask = True, None
    options = _Weights(bias, mask, causal, broadcast_dropout, dropout_rng, dropout_rate, deterministic)
    uniform = module is not None or options.drops  # the weights themselves are looked at
    weights = _weights(query, key, options, qk, precision, module, force_fp32_for_softmax, uniform)
    if mix:
        out = mix("...hqk,...khd->...qhd", weights, value)
    else:
        out = _layers.weights_value(weights, value, dot_general, precision=precision)
    return out if uniform else _layers.restore_rows(out, value, mask, causal)


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """:class:`flax.linen.MultiHeadDotProductAttention` on jaxops: projections, attention, normalisation of q and k.

    Attributes, parameters and results are Flax's; `attention_fn` is :func:`dot_product_attention` of this module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxops.flax import linen
      >>> layer = linen.MultiHeadDotProductAttention(num_heads=2)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((1, 5, 8)))
      >>> sorted(variables["params"])
      ['key', 'out', 'query', 'value']
    """

    attention_fn: Callable[..., jax.Array] = dot_product_attention

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """As Flax's: `(inputs_q, inputs_k=None, inputs_v=None, *, mask=None, deterministic=None, ...)`."""
        with nn.intercept_methods(_Interceptor(_Scope(SwapReport()))):
            return _raw(nn.MultiHeadDotProductAttention)(self, *args, **kwargs)


class MultiHeadAttention(MultiHeadDotProductAttention):
    """The same layer under the other of Flax's two names, which is part of automatic parameter names."""


# Whole models


class _Instead:
    """A module with some attributes replaced; for Flax's own methods, which only read attributes and call methods."""

    def __init__(self, module: nn.Module, **attributes: Any):
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attention(self: Any, *args: Any, products: bool = True, **kwargs: Any) -> jax.Array:
    attend = dot_product_attention if products else _attend_with_xla
    return _raw(nn.MultiHeadDotProductAttention)(_Instead(self, attention_fn=attend), *args, **kwargs)


#: The attention of a swap whose products stay XLA's.
_attend_with_xla = functools.partial(dot_product_attention, einsum_dot_general=jax.lax.dot_general)


def _why_no_attention(layer: Any) -> str | None:
    if layer.attention_fn is not nn.dot_product_attention:
        return f"attention_fn= is {getattr(layer.attention_fn, '__name__', layer.attention_fn)}"
    return None


class _Swap(NamedTuple):
    """What is called instead of a Flax layer's `__call__`, and why not, judging by the layer's attributes."""

    call: Callable[..., jax.Array]
    why_not: Callable[[Any], str | None]


_SWAPS = {
    _raw(nn.LayerNorm): _Swap(_layer_norm, _why_no_norm),
    _raw(nn.RMSNorm): _Swap(_rms_norm, _why_no_norm),
    _raw(nn.Dense): _Swap(_dense, _why_no_product),
    _raw(nn.DenseGeneral): _Swap(_dense_general, _why_no_product),
    _raw(nn.MultiHeadDotProductAttention): _Swap(_attention, _why_no_attention),
}


class _Scope:
    """What is swapped now: the report, where in the model we are, and the masks that are known to be causal.

    products: whether matrix products are swapped, too.
    """

    def __init__(self, report: SwapReport, products: bool = True):
        self.report = report
        self.products = products
        self.paths: list[str] = []
        self.causal_masks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @property
    def path(self) -> str:
        return self.paths[-1] if self.paths else "(no module)"

    def note_function(self, name: str) -> None:
        self.report.swapped[f"{self.path}: {name}"] = name

    def make_causal_mask(self, *args: Any, **kwargs: Any) -> jax.Array:
        mask = _MAKE_CAUSAL_MASK(*args, **kwargs)
        self.causal_masks[id(mask)] = mask
        return mask


_MAKE_CAUSAL_MASK = nn.make_causal_mask
_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("jaxops_linen_scope", default=None)


@functools.wraps(nn.make_causal_mask)
def _make_causal_mask(*args: Any, **kwargs: Any) -> jax.Array:
    scope = _scope.get()
    return scope.make_causal_mask(*args, **kwargs) if scope else _MAKE_CAUSAL_MASK(*args, **kwargs)


_CAUSAL_MASKS = Replacement(("flax.linen", "flax.linen.attention"), {_MAKE_CAUSAL_MASK: _make_causal_mask})


def _is_causal(mask: Any, query: jax.Array, key: jax.Array) -> bool:
    """Whether the mask is a result of nn.make_causal_mask in this scope, for these queries and keys."""
    scope = _scope.get()
    known = scope is not None and mask is not None and scope.causal_masks.get(id(mask)) is mask
    return known and mask.shape[-2:] == (query.shape[-3], key.shape[-3])


class _Interceptor:
    """Runs jaxops' code instead of the methods in `_SWAPS`; for nn.intercept_methods."""

    def __init__(self, scope: _Scope):
        self.scope = scope

    def __call__(self, next_method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, report = context.module, self.scope.report
        path = "/".join(module.path) or type(module).__name__
        swap = _SWAPS.get(context.orig_method.func)
        why = None if swap is None else swap.why_not(module)
        if swap is not None and not self.scope.products:
            why = why or ("products=False" if swap.why_not is _why_no_product else None)
            kwargs = {**kwargs, "products": False} if swap.call is _attention and why is None else kwargs
        if swap is not None and why is None:
            report.swapped[path] = type(module).__name__
            next_method = functools.partial(swap.call, module)
        self.scope.paths.append(path)
        try:
            out = next_method(*args, **kwargs)
        finally:
            self.scope.paths.pop()
        if path not in report.swapped:
            if swap is not None:
                report.kept[path] = why
            elif type(module).__module__ != __name__ and (own := _own_parameters(module)):
                what = f"jaxops has no {type(module).__name__}" if _is_flax(module) else "not a layer of Flax's"
                report.kept[path] = f"{what} (parameters {', '.join(own)})"
        return out


def _is_flax(module: nn.Module) -> bool:
    return type(module).__module__.startswith("flax.")


def _own_parameters(module: nn.Module) -> list[str]:
    parameters = module.variables.get("params", {}) if module.scope is not None else {}
    return sorted(name for name, value in parameters.items() if not isinstance(value, Mapping))


@contextlib.contextmanager
def swapped(*, functions: bool = True, products: bool = True) -> Iterator[SwapReport]:
    """A scope in which linen models run on jaxops.

    It works on what is traced in the scope: `model.init`, `model.apply` or the first call of a jitted function. What
    :func:`jax.jit` or `nn.jit` traced before keeps what it was traced with; `swap` has no such pitfall.

    Args:
      functions: also replace jax.nn's functions, as :func:`jaxops.patch_jax_nn` does, for models that call them.
      products: also swap dense layers and the products of attention; False: leave matrix products to XLA.

    Yields:
      The :class:`SwapReport`, filled while models are traced.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxops.flax import linen
      >>> model = nn.Sequential([nn.LayerNorm(), nn.Dense(3), lambda x: nn.softmax(x)])
      >>> with linen.swapped() as report:
      ...     variables = model.init(jax.random.key(0), jnp.ones((2, 4)))
      >>> print(report)
      3 on jaxops, 0 kept
      Sequential: softmax  jaxops softmax
      layers_0             jaxops LayerNorm
      layers_1             jaxops Dense
    """
    report = SwapReport()
    with _swapped(report, functions, products):
        yield report


@contextlib.contextmanager
def _swapped(report: SwapReport, functions: bool, products: bool) -> Iterator[None]:
    scope = _Scope(report, products)
    token = _scope.set(scope)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(nn.intercept_methods(_Interceptor(scope)))
            stack.enter_context(_CAUSAL_MASKS.active())
            if functions:
                stack.enter_context(patch_jax_nn(scope.note_function))
            yield
    finally:
        _scope.reset(token)


@functools.cache
def _swapped_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of the swapped models of a class: the same fields, and the report; one class for equal models."""

    def call(self, fun, args, kwargs):
        scope = _scope.get()
        if scope is not None and scope.report is self.swap_report:
            return cls._call_wrapped_method(self, fun, args, kwargs)
        with _swapped(self.swap_report, functions=True, products=self.swap_products):
            return cls._call_wrapped_method(self, fun, args, kwargs)

    report = dataclasses.field(default=None, compare=False, repr=False, kw_only=True)
    body = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__annotations__": {"swap_report": Any, "swap_products": bool},
        "swap_report": report,
        "swap_products": dataclasses.field(default=True, repr=False, kw_only=True),
    }
    made = type(cls)(cls.__name__, (cls,), body)
    made._call_wrapped_method = call  # not in the body, whose functions linen wraps
    return made


def swap(model: _Model, *, products: bool = True) -> tuple[_Model, SwapReport]:
    """The same linen model running on jaxops.

    The result has the model's class as its base, equal attributes, parameters and names, so that checkpoints,
    optimiser states and training loops stay as they are. Whenever it is called (`init`, `apply`, inside another model,
    under `jax.jit`), the layers of Flax's that it consists of run on jaxops: LayerNorm, RMSNorm, Dense, DenseGeneral,
    the attention layers, subclasses that do not define `__call__`, and the calls of `jax.nn.softmax`, `log_softmax`
    and `standardize` that its code makes. Layers with a `dot_general` or `attention_fn` of their own, or statistics
    over a mesh axis, stay Flax's. A mask straight from `nn.make_causal_mask` is recognised, and not read. Functions
    under `nn.jit` that the plain model traced in the same process stay plain: swap before the first call.

    Args:
      model: a linen model, not bound to variables.
      products: also swap dense layers and the products of attention; False: leave matrix products to XLA.

    Returns:
      The swapped model, and the :class:`SwapReport`, which is filled when the model is first traced.

    Raises:
      TypeError: `model` is not a linen module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxops.flax import linen
      >>> model, report = linen.swap(nn.Sequential([nn.Embed(10, 4), nn.RMSNorm(), nn.Dense(3)]))
      >>> variables = model.init(jax.random.key(0), jnp.arange(5))
      >>> print(report)
      2 on jaxops, 1 kept
      layers_0  kept: jaxops has no Embed (parameters embedding)
      layers_1  jaxops RMSNorm
      layers_2  jaxops Dense
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"swap: model must be a flax.linen module, got {type(model).__name__}; see jaxops.flax.nnx.swap"
        )
    if model.scope is not None:
        raise TypeError("swap: model is bound to variables; swap it before `bind`")
    report = SwapReport()
    attributes = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init and f.name != "parent"}
    swapped = _swapped_class(type(model))
    return swapped(**attributes, swap_report=report, swap_products=products, parent=None), report

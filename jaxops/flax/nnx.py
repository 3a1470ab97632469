"""flax.nnx's layers on jaxops' kernels, and `swap`, which moves an existing nnx model onto them.

Every layer but :class:`GatedMLP`, which Flax does not have, is a subclass of the Flax layer with the same name.
Constructors, attributes, variables with their metadata, and result dtypes are Flax's, and checkpoints fit both ways. A
call without a kernel runs on Flax's code, with a :class:`jaxops.FallbackWarning`. If you pass your own function for a
layer's products, the layer uses it without a warning.
"""

from __future__ import annotations

import contextvars
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.lax import dot_general as _jax_dot_general

from jaxops._warnings import warn_fallback
from jaxops.flax import _arguments as arguments
from jaxops.flax import _functions
from jaxops.flax._report import SwapReport, note_run
from jaxops.ops._attention_plain import WHOLE
from jaxops.ops._gated_kernel import gate as _gate
from jaxops.ops.attention import projections_noted
from jaxops.ops.matmul import dot_general

_dot_general = dot_general

__all__ = [
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "LinearGeneral",
    "MultiHeadAttention",
    "RMSNorm",
    "SwapReport",
    "dot_product_attention",
    "dot_product_attention_with_rope",
    "swap",
]

_Model = TypeVar("_Model", bound=nnx.Module)

#: Flax's own, even if their names stand for something else later.
_FLAX = types.SimpleNamespace(
    LayerNorm=nnx.LayerNorm,
    RMSNorm=nnx.RMSNorm,
    Linear=nnx.Linear,
    LinearGeneral=nnx.LinearGeneral,
    MultiHeadAttention=nnx.MultiHeadAttention,
    dot_product_attention=nnx.dot_product_attention,
    dot_product_attention_with_rope=getattr(nnx, "dot_product_attention_with_rope", None),  # since 0.12.9
)


# Normalisation


def _normalise(layer: Any, x: jax.Array, mask: Any, centred: bool, flax: type[nnx.Module], residual: Any) -> Any:
    note_run(layer)
    x = arguments.array(flax.__name__, "x", x)
    mask = arguments.mask(flax.__name__, mask, x.shape)
    given = (layer.scale, layer.bias if centred else None)
    scale, bias = (value[...] if value else None for value in given)
    why = _functions.why_no_norm(layer) or _functions.why_no_norm_of(centred, mask, x, scale, bias)
    if why:
        warn_fallback(flax.__name__, why)
        total = x if residual is None else x + residual
        y = flax.__call__(layer, total, mask=mask)
        return y if residual is None else (y, total)
    arrays = (x, scale, bias) if centred else (x, scale)
    promoted, *parameters = layer.promote_dtype(arrays, dtype=layer.dtype)
    if layer.promote_dtype is not dtypes.promote_dtype:
        x = promoted  # else the kernel reads x unpromoted, which is more accurate
    return _functions.normalise(
        x,
        *(parameters if centred else (*parameters, None)),
        mask,
        centred=centred,
        reduction_axes=layer.reduction_axes,
        feature_axes=layer.feature_axes,
        epsilon=layer.epsilon,
        dtype=dtypes.canonicalize_dtype(promoted, *parameters, dtype=layer.dtype),
        residual=residual,
    )


class LayerNorm(nnx.LayerNorm):
    """:class:`flax.nnx.LayerNorm` on :func:`jaxops.layer_norm`: the same arguments, variables and results.

    The variance is always computed stably, whatever `use_fast_variance` says. Statistics over a mesh axis (`axis_name`)
    run on Flax's code, with a warning.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as fast
      >>> fast.LayerNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([1.0, 3.0])).round(3)
      Array([-1.,  1.], dtype=float32)
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Normalises x. If `mask`, which broadcasts to x's shape, is given, only positions where it is true count.

        With `residual`, an array of x's shape, returns the pair (normalised sum, sum).
        """
        return _normalise(self, x, mask, True, _FLAX.LayerNorm, residual)


class RMSNorm(nnx.RMSNorm):
    """:class:`flax.nnx.RMSNorm` on :func:`jaxops.rms_norm`: the same arguments, variables and results.

    Masks and statistics over a mesh axis (`axis_name`) run on Flax's code, with a warning.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as fast
      >>> fast.RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([3.0, 4.0]))
      Array([0.84852815, 1.1313709 ], dtype=float32)
    """

    def __call__(self, x: jax.Array, mask: jax.Array | None = None, *, residual: jax.Array | None = None) -> Any:
        """Normalises x; with a mask on Flax's code.

        With `residual`, an array of x's shape, returns the pair (normalised sum, sum).
        """
        return _normalise(self, x, mask, False, _FLAX.RMSNorm, residual)


# Linear layers


def _why_no_product(layer: Any) -> str | None:
    if getattr(layer, "dot_general_cls", None) is not None:
        return "dot_general_cls= is given"
    if layer.dot_general not in (None, _jax_dot_general):
        return "dot_general= is given"
    return None


def _promoted(layer: Any, inputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The inputs, the kernel and the bias, as the layer promotes them."""
    bias = None if layer.bias is None else layer.bias[...]
    return layer.promote_dtype((inputs, layer.kernel[...], bias), dtype=layer.dtype)


def _product(layer: Any, inputs: jax.Array, axes, batch_axes, activation, out_sharding) -> jax.Array:
    inputs, kernel, bias = _promoted(layer, inputs)
    return _functions.contract(
        inputs,
        kernel,
        bias,
        axes=axes,
        batch_axes=batch_axes,
        activation=activation,
        precision=layer.precision,
        preferred_element_type=getattr(layer, "preferred_element_type", None),
        out_sharding=out_sharding,
    )


class Linear(nnx.Linear):
    """:class:`flax.nnx.Linear` on :func:`jaxops.matmul`, bias and activation in the same kernel.

    Arguments, variables and results are Flax's, up to rounding (see :func:`jaxops.matmul`). If you pass your
    own `dot_general=`, the layer is Flax's.

    Args:
      activation: None, "relu", "gelu" (the tanh form), "gelu_exact" (with erf) or "silu"; applied to the result.
      **options: as in `flax.nnx.Linear`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as fast
      >>> ones = jax.nn.initializers.ones
      >>> fast.Linear(2, 1, kernel_init=ones, activation="relu", rngs=nnx.Rngs(0))(jnp.array([[1.0, 2.0], [1.0, -2.0]]))
      Array([[3.],
             [0.]], dtype=float32)
    """

    activation: str | None = None

    def __init__(self, in_features: int, out_features: int, *, activation: str | None = None, **options: Any):
        super().__init__(in_features, out_features, **options)
        self.activation = activation
        if activation is not None and (why := _why_no_product(self)):
            raise ValueError(f"Linear: activation={activation!r} is part of the kernel, but {why}")

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """`[..., in_features]` to `[..., out_features]`; with `out_sharding` the product is XLA's."""
        note_run(self)
        if _why_no_product(self):
            return _FLAX.Linear.__call__(self, inputs, out_sharding)
        inputs = arguments.inputs("Linear", inputs)
        return _product(self, inputs, (inputs.ndim - 1,), (), self.activation, out_sharding)


class LinearGeneral(nnx.LinearGeneral):
    """:class:`flax.nnx.LinearGeneral` on :func:`jaxops.matmul`, the bias in the same kernel.

    Arguments, variables and results are Flax's, up to rounding (see :func:`jaxops.matmul`). If you pass your
    own `dot_general=`, the layer is Flax's.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as fast
      >>> fast.LinearGeneral((2, 3), (4, 5), axis=(1, -1), rngs=nnx.Rngs(0))(jnp.ones((16, 2, 3))).shape
      (16, 4, 5)
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Contracts the axes `axis`; the new feature axes come last."""
        note_run(self)
        if id(self) in (projections := _projections.get() or {}):
            return projections[id(self)]
        if _why_no_product(self):
            return _FLAX.LinearGeneral.__call__(self, inputs, out_sharding)
        inputs = arguments.inputs("LinearGeneral", inputs)
        named = (self.axis, self.batch_axis)
        axes, batch_axes = (_functions.canonical_axes(axes, inputs.ndim) for axes in named)
        return _product(self, inputs, axes, batch_axes, None, out_sharding)


_LECUN_NORMAL = nnx.initializers.lecun_normal()


class GatedMLP(nnx.Module):
    """A gated MLP on :func:`jaxops.gated_mlp`: `down(activation(gate(x)) * up(x))`, of three layers without bias.

    Flax has no such layer. `gate`, `up` and `down` are :class:`Linear` layers, made in this order. So a module with
    three `nnx.Linear(use_bias=False)` layers of these names has the same variables. If you replace one of them by
    another kind of layer, or change an attribute of one alone, the three run one by one, with a
    :class:`jaxops.FallbackWarning`.

    Args:
      in_features: width of the inputs.
      hidden_features: width between the products.
      out_features: width of the result; by default `in_features`.
      activation: "silu" (SwiGLU), "gelu" (the tanh form; GEGLU), "gelu_exact" (with erf) or "relu".
      dtype: dtype of the computation; by default inputs and parameters promote.
      param_dtype: dtype of the parameters.
      precision: the products' precision, as in jax.numpy.matmul.
      kernel_init: initialises the kernels. `nnx.with_partitioning` and the like are respected.
      down_kernel_init: initialises the kernel of `down`, which is split along other axes; by default `kernel_init`.
      promote_dtype: as in `nnx.Linear`; takes the inputs and all three kernels.
      recompute: if True, the backward pass keeps only the inputs and parameters, and computes two products again.
      kernel_metadata: of the kernels of `gate` and `up`, as in `nnx.Linear`.
      down_kernel_metadata: of the kernel of `down`.
      rngs: for the initial values.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as fast
      >>> layer = fast.GatedMLP(4, 16, activation="gelu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 4))).shape
      (2, 4)
      >>> layer.down.kernel.shape
      (16, 4)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str = "silu",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Callable[..., Any] = _LECUN_NORMAL,
        down_kernel_init: Callable[..., Any] | None = None,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        recompute: bool = False,
        kernel_metadata: Mapping[str, Any] | None = None,
        down_kernel_metadata: Mapping[str, Any] | None = None,
        rngs: nnx.Rngs,
    ):
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"GatedMLP: rngs must be flax.nnx.Rngs, got {type(rngs).__name__}")
        options = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision, "promote_dtype": promote_dtype}
        arguments.gated_mlp(
            in_features=in_features,
            hidden_features=hidden_features,
            out_features=out_features,
            activation=activation,
            kernel_init=kernel_init,
            down_kernel_init=down_kernel_init,
            recompute=recompute,
            kernel_metadata=kernel_metadata,
            down_kernel_metadata=down_kernel_metadata,
            **options,
        )

        def linear(widths, init, metadata):
            more = {"kernel_metadata": metadata} if metadata else {}
            return Linear(*widths, use_bias=False, kernel_init=init, rngs=rngs, **options, **more)

        self.gate = linear((in_features, hidden_features), kernel_init, kernel_metadata)
        self.up = linear((in_features, hidden_features), kernel_init, kernel_metadata)
        last = (hidden_features, out_features or in_features)
        self.down = linear(last, down_kernel_init or kernel_init, down_kernel_metadata)
        self.activation = activation
        self.recompute = recompute

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`[..., in_features]` to `[..., out_features]`."""
        inputs = arguments.inputs("GatedMLP", inputs)
        if why := self._why_not_together():
            warn_fallback("GatedMLP's activation", why)
            return self.down(_gate(self.gate(inputs), self.up(inputs), self.activation))
        kernels = (layer.kernel[...] for layer in (self.gate, self.up, self.down))
        inputs, *kernels = self.gate.promote_dtype((inputs, *kernels), dtype=self.gate.dtype)
        options = {"activation": self.activation, "precision": self.gate.precision, "recompute": self.recompute}
        return _functions.run_gated_mlp(inputs, kernels, **options)

    def _why_not_together(self) -> str | None:
        """Why the layers run one by one; None if they do not."""
        for name in ("gate", "up", "down"):
            layer = getattr(self, name)
            if type(layer) not in (Linear, _FLAX.Linear):
                return f"{name} is a {type(layer).__name__}"
            if layer.bias is not None or getattr(layer, "activation", None) is not None:
                return f"{name} has a bias or an activation"
            if why := _why_no_product(layer):
                return f"{why} to {name}"
            for attribute in ("dtype", "precision", "promote_dtype"):
                if getattr(layer, attribute) != getattr(self.gate, attribute):
                    return f"{name} has another {attribute} than gate"
            if getattr(layer, "preferred_element_type", None) is not None:
                return f"{name} has a preferred_element_type"
        return None


#: The projections of the self-attention that runs, by the layer's id: they read the same inputs and are one product.
_projections: contextvars.ContextVar[dict[int, jax.Array] | None] = contextvars.ContextVar(
    "jaxops_nnx_projections", default=None
)


# Attention


@arguments.checked
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
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    dot_general: Callable[..., jax.Array] = dot_general,
) -> jax.Array:
    """:func:`flax.nnx.dot_product_attention` on jaxops, for `MultiHeadAttention(attention_fn=...)`.

    Runs on :func:`jaxops.dot_product_attention`, without an array of weights. If weights are stored or dropped, if a
    product is the caller's, and for up to 1024 tokens in float32 or with depths without a kernel, the products run on
    :func:`jaxops.dot_general`, and scaling, bias, mask and softmax are one kernel. As in Flax, logits are
    float32 unless there is dropout or `module`, and a query that sees no key attends to all keys equally.

    Args:
      query: `[batch..., queries, heads, depth]`.
      key: `[batch..., keys, key heads, depth]`; the number of key heads divides the number of heads.
      value: `[batch..., keys, key heads, features]`.
      bias: broadcasts to `[batch..., heads, queries, keys]`; added to the scaled logits.
      mask: broadcasts to the same shape; a query sees a key if it is true.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout of the weights, with Flax's bits.
      dtype: dtype of the computation; by default query, key and value promote.
      precision: precision of the products if there is dropout or `module`, as in Flax.
      module: stores the weights as the intermediate `attention_weights`.
      promote_dtype: as in Flax.
      is_causal: query i sees only keys 0 to i, in addition to `mask`; later keys are not read.
      dot_general: computes both products.

    Returns:
      `[batch..., queries, heads, features]`.

    Raises:
      ValueError: shapes or options do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import nnx as fast
      >>> x = jnp.arange(4.0).reshape(2, 1, 2)
      >>> fast.dot_product_attention(x, x, x, is_causal=True)[0]
      Array([[0., 1.]], dtype=float32)
    """
    drops = not deterministic and dropout_rate > 0
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    heads, groups = query.shape[-2], key.shape[-2]
    if query.shape[:-3] != key.shape[:-3] or query.shape[-1] != key.shape[-1] or heads % groups:
        raise ValueError(
            f"attention: query {query.shape} and key {key.shape} must have the same batch axes and depth, "
            "and the key's heads must divide the query's"
        )
    _functions.check_key_value(key, value)
    weighted = module is not None or dropout_rate > 0  # then Flax keeps logits in the computation's dtype
    wide = None if weighted else jnp.promote_types(query.dtype, jnp.float32)
    precision = precision if weighted else None
    own = None if dot_general is _dot_general else "dot_general="
    changed = module is not None or drops
    if _functions.why_weights(query, key, value, bias, mask, own, changed) is None:
        options = {"causal": is_causal, "precision": precision}
        return _functions.attend_without_weights(query, key, value, bias, mask, **options)
    einsum = functools.partial(jnp.einsum, precision=precision, _dot_general=dot_general)

    alone = is_causal and mask is None

    def score(query, key):
        if heads == groups:
            options = {"precision": precision, "preferred_element_type": wide}
            return _functions.query_key(query, key, dot_general, alone, **options)
        query = query.reshape(*query.shape[:-2], groups, heads // groups, query.shape[-1])
        logits = einsum("...qhgd,...khd->...hgqk", query, key, preferred_element_type=wide)
        return logits.reshape(*logits.shape[:-4], heads, *logits.shape[-2:])

    def mix(weights, value):
        if heads == groups:
            return _functions.weights_value(weights, value, dot_general, alone and bias is None, precision=precision)
        weights = weights.reshape(*weights.shape[:-3], groups, heads // groups, *weights.shape[-2:])
        out = einsum("...hgqk,...khd->...qhgd", weights, value)
        return out.reshape(*out.shape[:-3], heads, out.shape[-1])

    def change(weights):
        if module:
            module.sow(nnx.Intermediate, "attention_weights", weights)
        if drops:
            leading = key.ndim - 2
            weights = _functions.drop(weights, dropout_rng, dropout_rate, broadcast_dropout, leading, query.dtype)
        return weights

    return _functions.attend(
        query,
        key,
        value,
        bias,
        mask,
        score=score,
        early=_functions.early_scale(query.shape[-1], widened=wide not in (None, query.dtype)),
        mix=mix,
        causal=is_causal,
        dtype=query.dtype,
        change=change if changed else None,
    )


@arguments.checked
def dot_product_attention_with_rope(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    rope: Any,
    input_positions: jax.Array | None = None,
    **options,
) -> jax.Array:
    """:func:`flax.nnx.dot_product_attention_with_rope` on jaxops.

    Args:
      query, key, value: as in `dot_product_attention`.
      rope: a `flax.nnx.RoPE`, or a similar function of `[..., tokens, depth]` and positions, for query and key.
      input_positions: `[tokens]`; by default 0, 1, ...
      **options: as in `dot_product_attention`.

    Returns:
      `[batch..., queries, heads, features]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxops.flax import nnx as fast
      >>> x = jnp.ones((3, 1, 4))
      >>> fast.dot_product_attention_with_rope(x, x, x, rope=lambda x, positions: -x).shape
      (3, 1, 4)
    """
    rotate = jax.vmap(rope, in_axes=(-2, None), out_axes=-2)
    query, key = (rotate(x, input_positions) for x in (query, key))
    return dot_product_attention(query, key, value, **options)


class MultiHeadAttention(nnx.MultiHeadAttention):
    """:class:`flax.nnx.MultiHeadAttention` on jaxops: projections, attention, normalisation of q and k.

    Arguments, variables and results are Flax's; `attention_fn` is :func:`dot_product_attention` of this module.

    Args:
      *args, attention_fn, **options: as in `flax.nnx.MultiHeadAttention`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as fast
      >>> layer = fast.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 5, 8)), is_causal=True).shape
      (1, 5, 8)
    """

    def __init__(self, *args: Any, attention_fn: Callable[..., jax.Array] = dot_product_attention, **options: Any):
        super().__init__(*args, attention_fn=attention_fn, **options)
        for child in (self.query, self.key, self.value, self.out, self.query_ln, self.key_ln):
            if type(child) in _SWAPS and _why_not(child) is None:
                _swap_layer(child)

    def __call__(self, inputs_q: jax.Array, *others: Any, **options: Any) -> jax.Array:
        """Flax's signature: `(inputs_q, inputs_k=None, inputs_v=None, *, mask=None, deterministic=None, ...)`."""
        note_run(self)
        arguments.array("MultiHeadAttention", "inputs_q", inputs_q)
        given = [x for x in (*others, options.get("inputs_k"), options.get("inputs_v")) if x is not None]
        together = options.get("qkv_sharding") is None and all(x is inputs_q for x in given)
        with projections_noted():
            token = _projections.set(self._project(inputs_q) if together else None)
            try:
                return super().__call__(inputs_q, *others, **options)
            finally:
                _projections.reset(token)

    def _project(self, inputs: jax.Array) -> dict[int, jax.Array]:
        layers = (self.query, self.key, self.value)
        ours = all(type(layer) is LinearGeneral and _why_no_product(layer) is None for layer in layers)
        if not ours or any(_of_projection(layer) != _of_projection(layers[0]) for layer in layers):
            return {}
        if layers[0].batch_axis or _functions.canonical_axes(layers[0].axis, inputs.ndim) != (inputs.ndim - 1,):
            return {}
        promoted, kernels, biases = zip(*(_promoted(layer, inputs) for layer in layers), strict=True)
        found = _functions.contract_together(
            promoted[0],
            kernels,
            None if None in biases else biases,
            precision=self.query.precision,
            preferred_element_type=self.query.preferred_element_type,
        )
        return {id(layer): projection for layer, projection in zip(layers, found, strict=True)}


def _of_projection(layer: nnx.LinearGeneral) -> tuple[Any, ...]:
    """The attributes that projections must share to be computed together; key and value may have fewer heads."""
    arrays = [(a.shape, a.dtype) if a is not None else None for a in (layer.kernel, layer.bias)]
    names = ("axis", "batch_axis", "dtype", "precision", "promote_dtype", "preferred_element_type")
    return (*arrays, *(getattr(layer, name) for name in names))


# Whole models

#: Whose `__call__` is replaced by which class's.
_SWAPS: dict[type, type] = {
    _FLAX.LayerNorm: LayerNorm,
    _FLAX.RMSNorm: RMSNorm,
    _FLAX.Linear: Linear,
    _FLAX.LinearGeneral: LinearGeneral,
    _FLAX.MultiHeadAttention: MultiHeadAttention,
}


#: The attention of a swap that leaves products to XLA. Like those in `_MADE` it is made once: layers that are equal
#: before a swap are equal after it, as functions compare by identity.
_attend_with_xla = functools.partial(dot_product_attention, dot_general=_jax_dot_general)

#: What `_own_attention` made of partial functions of Flax's, by whether products are swapped.
_MADE: weakref.WeakKeyDictionary[Any, dict[bool, Callable[..., Any]]] = weakref.WeakKeyDictionary()


def _own_attention(attention: Callable[..., Any], products: bool = True) -> Callable[..., Any] | None:
    """jaxops' counterpart of a Flax attention function."""
    if attention is _FLAX.dot_product_attention:
        return dot_product_attention if products else _attend_with_xla
    rope = _FLAX.dot_product_attention_with_rope
    if not isinstance(attention, functools.partial) or rope is None or attention.func is not rope:
        return None
    made = _MADE.setdefault(attention, {})
    if products not in made:
        options = {} if products else {"dot_general": _jax_dot_general}
        made[products] = functools.partial(
            dot_product_attention_with_rope, *attention.args, **attention.keywords, **options
        )
    return made[products]


def _why_not(layer: nnx.Module) -> str | None:
    """Why a layer of a class in `_SWAPS` stays with Flax."""
    if isinstance(layer, _FLAX.LayerNorm | _FLAX.RMSNorm):
        return _functions.why_no_norm(layer)
    if isinstance(layer, _FLAX.MultiHeadAttention):
        name = getattr(layer.attention_fn, "__name__", layer.attention_fn)
        return None if _own_attention(layer.attention_fn) else f"attention_fn= is {name}"
    return _why_no_product(layer)


def _how(layer: nnx.MultiHeadAttention, products: bool) -> str:
    """How its attention will run, as far as its attributes tell."""
    if not products:
        return "with an array of weights: products=False"
    dropped = ", while no weights are dropped" if layer.dropout_rate > 0 else ""
    return f"fused in 16 bits, and above {WHOLE} tokens{dropped}"


def _swap_layer(layer: nnx.Module, products: bool = True) -> None:
    """Turns the layer into ours: the same object, attributes and variables with another class."""
    if isinstance(layer, _FLAX.MultiHeadAttention):
        layer.attention_fn = _own_attention(layer.attention_fn, products)
    object.__setattr__(layer, "__class__", _SWAPS[type(layer)])


@arguments.checked
def swap(model: _Model, *, copy: bool = True, products: bool = True) -> tuple[_Model, SwapReport]:
    """Returns the same nnx model, running on jaxops.

    Flax's LayerNorm, RMSNorm, Linear, LinearGeneral and MultiHeadAttention become jaxops' layers with the same names.
    They keep their variables, so paths, state, checkpoints and optimisers stay as they are. A layer is not swapped if
    it has its own `dot_general` or `attention_fn`, if its statistics are over a mesh axis, or if it is a subclass that
    may compute something else. If the model calls `jax.nn.softmax` itself, also use :func:`jaxops.patch_jax_nn`.

    Args:
      model: an nnx module.
      copy: swap a copy, which has its own variables; False: swap the model in place.
      products: also swap linear layers and the products of attention; False: leave matrix products to XLA.

    Returns:
      The swapped model, and the :class:`SwapReport`.

    Raises:
      TypeError: `model` is not an nnx module.

    Example:
      >>> from flax import nnx
      >>> from jaxops.flax import nnx as fast
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Embed(10, 4, rngs=rngs), nnx.RMSNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs))
      >>> model, report = fast.swap(model)
      >>> print(report)
      2 on jaxops, 1 kept
      layers/0  kept: jaxops has no Embed (parameters embedding)
      layers/1  jaxops RMSNorm
      layers/2  jaxops Linear
    """
    arguments.model(model, nnx.Module, "nnx", other="linen")
    model = nnx.clone(model) if copy else model
    report = SwapReport()
    for path, layer in list(nnx.iter_modules(model)):
        where = "/".join(map(str, path)) or type(layer).__name__
        if type(layer) in _SWAPS:
            why = _why_not(layer)
            if not products and isinstance(layer, _FLAX.Linear | _FLAX.LinearGeneral):
                why = why or "products=False"
            if why is None:
                report.swapped[where] = type(layer).__name__
                report._layers[where] = weakref.ref(layer)
                if isinstance(layer, _FLAX.Linear) and layer.bias is None:
                    report._unbiased.add(where)
                if isinstance(layer, _FLAX.MultiHeadAttention):
                    report.attention[where] = _how(layer, products)
                _swap_layer(layer, products)
            else:
                report.kept[where] = why
        elif type(layer).__module__ != __name__ and (own := _own_parameters(layer)):
            report.kept[where] = f"{_what(layer)} (parameters {', '.join(own)})"
    return model, report


def _what(layer: nnx.Module) -> str:
    base = next((base for base in _SWAPS if isinstance(layer, base)), None)
    if base is not None:
        return f"a subclass of {base.__name__}"
    return f"jaxops has no {type(layer).__name__}" if type(layer).__module__.startswith("flax.") else "not Flax's"


def _own_parameters(layer: nnx.Module) -> list[str]:
    return sorted(name for name, value in vars(layer).items() if isinstance(value, nnx.Param))

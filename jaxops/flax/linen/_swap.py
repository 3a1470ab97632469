"""Whole linen models on jaxops, and the attention layers, which are swapped in the same way."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import linen as nn
from flax.core import meta
from jax.extend.core import get_opaque_trace_state
from jax.lax import dot_general as _jax_dot_general

from jaxops._arguments import FLOATS
from jaxops._patch import MODULES, Replacement, frames, patch_where
from jaxops.flax import _arguments as arguments
from jaxops.flax import _functions
from jaxops.flax._report import SwapReport
from jaxops.flax.linen._attention import dot_product_attention, known_causal_masks
from jaxops.flax.linen._layers import (
    FLAX_CALLS,
    dense,
    dense_general,
    layer_norm,
    rms_norm,
    why_no_product,
)
from jaxops.ops.attention import projections_noted

_Model = TypeVar("_Model", bound=nn.Module)

_FLAX_ATTENTION = nn.dot_product_attention


class _Instead:
    """A module with some attributes replaced, for Flax methods that only read attributes and call methods."""

    def __init__(self, module: nn.Module, **attributes: Any):
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def _projected_together(layer: nn.Module, inputs: Sequence[Any], options: Mapping[str, Any]) -> Iterator[None]:
    """A scope in which an attention layer's projections are one product, if they all read the same inputs."""
    others = (*inputs[1:], options.get("inputs_k"), options.get("inputs_v"), options.get("inputs_kv"))
    together = not layer.is_initializing() and inputs and all(x is None or x is inputs[0] for x in others)
    token = _projections.set({"of": layer, "inputs": inputs[0]} if together else None)
    try:
        with projections_noted():
            yield
    finally:
        _projections.reset(token)


def _attention(self: Any, *inputs: Any, products: bool = True, report: Any = None, **options: Any) -> jax.Array:
    def note(why: str | None) -> None:
        if report is not None:
            path = "/".join(self.path) or type(self).__name__
            report.attention[path] = "fused" if why is None else f"with an array of weights: {why}"

    with _projected_together(self, inputs, options), _functions.attention_told_to(note):
        own = (
            self.qk_attn_weights_einsum_cls or self.attn_weights_value_einsum_cls
        )  # the user's einsums, with their own products
        attend = dot_product_attention if products or own else _attend_with_xla
        return FLAX_CALLS["MultiHeadDotProductAttention"](_Instead(self, attention_fn=attend), *inputs, **options)


#: The projections of the attention that runs, by the layer's name, once they are computed; "of": the attention;
#: "inputs": what they read.
_projections: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "jaxops_linen_projections", default=None
)


def _project(self: Any, inputs: jax.Array) -> jax.Array:
    """A dense layer. The projections of self-attention, which read the same inputs, become one product.

    If parameters are missing or unusual, the layer runs alone, and gives Flax's own errors.
    """
    known, names = _projections.get(), ("query", "key", "value")
    if known is None or self.name not in names or self.parent is not known["of"] or inputs is not known["inputs"]:
        return dense_general(self, inputs)
    if self.name not in known:
        leaves = ("kernel", "bias") if self.use_bias else ("kernel",)
        parameters = [meta.unbox(self.parent.get_variable("params", name)) or {} for name in names]
        types = [{leaf: (value.shape, value.dtype) for leaf, value in p.items()} for p in parameters]
        kernel = (inputs.shape[-1], *self.features)
        wanted = dict(zip(leaves, (kernel, kernel[1:]), strict=False))
        if {leaf: shape for leaf, (shape, _) in types[0].items()} != wanted or any(t != types[0] for t in types):
            return dense_general(self, inputs)
        inputs, *arrays = self.promote_dtype(
            inputs, *(p[leaf] for leaf in leaves for p in parameters), dtype=self.dtype
        )
        found = _functions.contract_together(inputs, arrays[:3], arrays[3:] or None, precision=self.precision)
        known.update(zip(names, found, strict=True))
    return known[self.name]


#: The attention of a swap whose products stay XLA's.
_attend_with_xla = functools.partial(dot_product_attention, einsum_dot_general=_jax_dot_general)


def _why_no_attention(layer: Any) -> str | None:
    if layer.attention_fn is not _FLAX_ATTENTION:
        return f"attention_fn= is {getattr(layer.attention_fn, '__name__', layer.attention_fn)}"
    return None


class _Swap(NamedTuple):
    """call replaces a Flax layer's `__call__`; why_not says, from the layer's attributes, why it may not."""

    call: Callable[..., jax.Array]
    why_not: Callable[[Any], str | None]


_SWAPS = {
    FLAX_CALLS["LayerNorm"]: _Swap(layer_norm, _functions.why_no_norm),
    FLAX_CALLS["RMSNorm"]: _Swap(rms_norm, _functions.why_no_norm),
    FLAX_CALLS["Dense"]: _Swap(dense, why_no_product),
    FLAX_CALLS["DenseGeneral"]: _Swap(_project, why_no_product),
    FLAX_CALLS["MultiHeadDotProductAttention"]: _Swap(_attention, _why_no_attention),
}


class _Scope:
    """The state of a swap: its report, and the path of the current module.

    products: whether matrix products are swapped too.
    """

    def __init__(self, report: SwapReport, products: bool = True):
        self.report = report
        self.products = products
        self.paths: list[str] = []
        self.last_dense: _LastDense | None = None

    @property
    def path(self) -> str:
        return self.paths[-1] if self.paths else "(no module)"

    def note_function(self, name: str) -> None:
        self.report.swapped[f"{self.path}: {name}"] = name

    def stays(self, name: str, given: Mapping[str, Any]) -> bool:
        """Whether a call of a jax.nn function stays with XLA; the report says why.

        Attention weights in f32 usually come after a mask and before a cast. XLA computes both in the softmax's passes.
        With jaxops' softmax between them, a step of transformers' Llama took 42.3 ms instead of 38.2 (4096 tokens,
        H200).
        """
        x, axis = given.get("x"), given.get("axis", -1)
        if name != "softmax" or x.dtype != np.float32 or np.ndim(x) < 4 or axis not in (-1, np.ndim(x) - 1):
            return False
        self.report.kept[f"{self.path}: {name}"] = "f32 attention weights are faster on XLA; see jaxops.fuse"
        return True

    def note_dense(self, out: jax.Array, multiply: Callable[..., jax.Array]) -> None:
        self.last_dense = _LastDense(self.path, out, multiply, _settings())

    def joined(self, x: Any, activation: str | None) -> jax.Array | None:
        """Computes the activation of x with the product that gave x; returns None if x is no such result.

        The product without the activation is then dead code, unless the model uses it elsewhere. Without a bias a layer
        is often a gated MLP's: there the activation is better joined to the multiplication behind it.
        """
        last = self.last_dense
        if last is None or x is not last.out or activation is None or x.dtype.name not in FLOATS:
            return None
        if last.settings != _settings() or not [*frames(x)]:  # without a frame, x is computed already
            return None
        self.last_dense = None
        with jax.named_scope(last.path.rpartition("/")[2]):
            out = last.multiply(activation=activation)
        self.report.swapped[last.path] += f" with {activation}"
        return out


class _LastDense(NamedTuple):
    """The dense layer with a bias that ran last.

    multiply computes its result `out` with a given activation. settings: the program that was traced, and JAX's
    precision.
    """

    path: str
    out: jax.Array
    multiply: Callable[..., jax.Array]
    settings: tuple[Any, ...]


def _settings() -> tuple[Any, ...]:
    return get_opaque_trace_state(convention="flax"), jax.config.jax_default_matmul_precision


_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("jaxops_linen_scope", default=None)


def _joining(original: Callable[..., jax.Array], name: Callable[..., str | None]) -> Callable[..., jax.Array]:
    """jax.nn's function; it joins the dense layer before it. name: gives matmul's name for it, from its options."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def patched(*args, **kwargs):
        scope = _scope.get()
        try:
            x, *options = signature.bind(*args, **kwargs).args
        except TypeError:
            return original(*args, **kwargs)  # which raises the right error
        found = None if scope is None else scope.joined(x, name(*options))
        return original(*args, **kwargs) if found is None else found

    patched.__signature__ = signature
    return patched


def _gelu_name(approximate: Any = True) -> str | None:
    if not isinstance(approximate, bool):
        return None
    return "gelu" if approximate else "gelu_exact"


_ACTIVATIONS = Replacement(
    MODULES, {jax.nn.gelu: _joining(jax.nn.gelu, _gelu_name), jax.nn.relu: _joining(jax.nn.relu, lambda: "relu")}
)


class _Interceptor:
    """Runs jaxops' code instead of the methods in `_SWAPS`; for nn.intercept_methods."""

    def __init__(self, scope: _Scope):
        self.scope = scope

    def __call__(self, next_method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, report = context.module, self.scope.report
        # A method of an unbound module, such as a loss that calls `self.apply`, has no path.
        path = (module.scope is not None and "/".join(module.path)) or type(module).__name__
        swap = _SWAPS.get(context.orig_method.func)
        why = None if swap is None else swap.why_not(module)
        innermost = _scope.get() is self.scope  # else an inner scope swaps it
        if innermost and next_method is not context.orig_method:
            why = why or "another interceptor runs inside the swap"
        if swap is not None and not self.scope.products:
            why = why or ("products=False" if swap.why_not is why_no_product else None)
        if swap is not None and why is None:
            report.swapped[path] = type(module).__name__
            if swap.call is dense and not module.use_bias:
                report._unbiased.add(path)
            if innermost:
                options = {
                    _attention: {"products": self.scope.products, "report": report},
                    dense: {"note": self.scope.note_dense},
                }.get(swap.call, {})
                next_method = functools.partial(swap.call, module, **options)
        self.scope.paths.append(path)
        try:
            out = next_method(*args, **kwargs)
        finally:
            self.scope.paths.pop()
            if swap is None or swap.call is not dense:  # no activation follows, and JAX may look for leaked tracers
                self.scope.last_dense = None
        if path not in report.swapped:
            if swap is not None:
                report.kept[path] = why
            elif not type(module).__module__.startswith("jaxops.") and (own := _own_parameters(module)):
                what = f"jaxops has no {type(module).__name__}" if _is_flax(module) else "not a layer of Flax's"
                report.kept[path] = f"{what} (parameters {', '.join(own)})"
        return out


def _is_flax(module: nn.Module) -> bool:
    return type(module).__module__.startswith("flax.")


def _own_parameters(module: nn.Module) -> list[str]:
    parameters = module.variables.get("params", {}) if module.scope is not None else {}
    return sorted(name for name, value in parameters.items() if not isinstance(value, Mapping))


@arguments.checked
@contextlib.contextmanager
def swapped(*, functions: bool = True, products: bool = True) -> Iterator[SwapReport]:
    """A scope in which linen models run on jaxops.

    The scope affects tracing: `model.init`, `model.apply`, or the first call of a jitted function. A function that
    :func:`jax.jit` or `nn.jit` traced earlier does not change; `swap` has no such pitfall.

    Args:
      functions: also replace jax.nn's functions, as :func:`jaxops.patch_jax_nn` does, for models that call them, and
        join `gelu` and `relu` to dense layers, as :func:`swap` does.
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
    with _layers_swapped(scope), known_causal_masks(), contextlib.ExitStack() as stack:
        if functions:
            stack.enter_context(patch_where(scope.note_function, scope.stays))
            stack.enter_context(_ACTIVATIONS.active())
        yield


@contextlib.contextmanager
def _layers_swapped(scope: _Scope) -> Iterator[None]:
    token = _scope.set(scope)
    try:
        with nn.intercept_methods(_Interceptor(scope)):
            yield
    finally:
        _scope.reset(token)


def _swapped_class(cls: type[nn.Module], products: bool) -> type[nn.Module]:
    """The class of swapped models: a subclass of `cls` with a report; one for all models of the class.

    It is stored on the class itself, so that both are freed together.
    """
    if "swap_report" in cls.__dict__:  # already such a class
        cls = cls.__bases__[0]
    if "_jaxops_swapped" not in cls.__dict__:
        cls._jaxops_swapped = {}
    if products in cls._jaxops_swapped:
        return cls._jaxops_swapped[products]

    def within(method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            scope = _scope.get()
            if scope is not None and (self.swap_report is None or self.swap_report is scope.report):
                return method(self, *args, **kwargs)
            with _swapped(self.swap_report or SwapReport(), functions=True, products=products):
                return method(self, *args, **kwargs)

        return call

    def clone(self, **options):
        return _with_report(cls.clone(self, **options), self.swap_report)

    # Not an argument of __init__, because Flax's transforms pass those to the original class.
    report = dataclasses.field(default=None, init=False, compare=False, repr=False)
    body = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__annotations__": {"swap_report": Any},
        "swap_report": report,
    }
    made = type(cls)(cls.__name__, (cls,), body)

    def reduce(self, protocol):
        """For pickle, which finds classes by name and would find `cls`."""
        _, _, *state = super(made, self).__reduce_ex__(protocol)
        return _new_swapped, (cls, products), *state

    # Not in the body, because linen wraps functions there.
    made.__reduce_ex__, made.clone = reduce, clone
    for name in ("_call_wrapped_method", "apply", "init", "init_with_output"):
        setattr(made, name, within(getattr(cls, name)))
    cls._jaxops_swapped[products] = made
    return made


def _with_report(model: _Model, report: SwapReport | None) -> _Model:
    object.__setattr__(model, "swap_report", report)  # linen's modules are frozen
    return model


def _new_swapped(cls: type[nn.Module], products: bool) -> nn.Module:
    return object.__new__(_swapped_class(cls, products))


@arguments.checked
def swap(model: _Model, *, products: bool = True) -> tuple[_Model, SwapReport]:
    """Returns the same linen model, running on jaxops.

    The new model's class is a subclass of the model's class. Attributes, parameters and names are equal, so
    checkpoints, optimiser states and training loops stay as they are.

    When the model is called (`init`, `apply`, inside another model, under `jax.jit`), its Flax layers run on jaxops:
    LayerNorm, RMSNorm, Dense, DenseGeneral, the attention layers, and subclasses that do not define `__call__`. So do
    its own calls of `jax.nn.softmax`, `log_softmax`, `logsumexp`,
    `standardize` and `dot_product_attention`. If a Dense layer has a bias, `nn.gelu` and
    `nn.relu` of its result join its kernel. A mask straight from `nn.make_causal_mask` is recognised and not read.

    Some code stays with Flax:

    - layers with their own `dot_general` or `attention_fn`, or with statistics over a mesh axis;
    - functions under `nn.jit` that the plain model traced earlier in this process, so swap before the first call;
    - submodules of a bound model that you call directly, `model.bind(variables).part(x)`;
    - functions passed to `nn.apply`, and layers inside the model's own `nn.intercept_methods`;
    - a float32 softmax over the last of four or more axes, nearly always attention weights: XLA computes the mask
      before it and the cast after it in the same passes; :func:`jaxops.fuse` takes the whole attention.

    Args:
      model: a linen model, not bound to variables. A model that is already swapped gets a new report.
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
    arguments.model(model, nn.Module, "linen", other="nnx")
    if model.scope is not None:
        raise TypeError("swap: model is bound to variables; swap it before `bind`")
    report = SwapReport()
    attributes = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init and f.name != "parent"}
    swapped = _swapped_class(type(model), products)(**attributes, parent=None)
    return _with_report(swapped, report), report


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
        """Flax's signature: `(inputs_q, inputs_k=None, inputs_v=None, *, mask=None, deterministic=None, ...)`."""
        with _projected_together(self, args, kwargs), _layers_swapped(_Scope(SwapReport())):
            return FLAX_CALLS["MultiHeadDotProductAttention"](self, *args, **kwargs)


class MultiHeadAttention(MultiHeadDotProductAttention):
    """MultiHeadDotProductAttention under Flax's other name, which appears in automatic parameter names."""

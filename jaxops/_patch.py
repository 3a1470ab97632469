"""Replaces jax.nn's functions by jaxops' functions within a scope."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxops import _arguments as arguments
from jaxops.ops.attention import dot_product_attention
from jaxops.ops.cross_entropy import softmax_cross_entropy_with_integer_labels
from jaxops.ops.layer_norm import layer_norm
from jaxops.ops.log_softmax import log_softmax
from jaxops.ops.logsumexp import logsumexp
from jaxops.ops.softmax import softmax


class Replacement:
    """Replaces functions in some modules while at least one scope is open.

    Args:
      modules: module names; modules that are not imported are ignored.
      substitutes: the new function for each original. It must also work outside a scope, because other threads call it.
    """

    def __init__(self, modules: Sequence[str], substitutes: dict[Callable[..., Any], Callable[..., Any]]):
        self._modules = modules
        self._substitutes = {original.__name__: (original, new) for original, new in substitutes.items()}
        self._lock = threading.Lock()
        self._open = 0
        self._replaced: list[tuple[Any, str]] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A scope; they nest."""
        with self._lock:
            self._open += 1
            for module in (sys.modules.get(name) for name in self._modules):
                for name, (original, new) in self._substitutes.items():
                    if getattr(module, name, None) is original:
                        setattr(module, name, new)
                        self._replaced.append((module, name))
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                while not self._open and self._replaced:
                    module, name = self._replaced.pop()
                    original, new = self._substitutes[name]
                    if getattr(module, name) is new:
                        setattr(module, name, original)


#: In these modules, functions that are jax.nn's are replaced.
MODULES = (
    "jax.nn",
    "jax.scipy.special",  # whose logsumexp is jax.nn's
    "flax.linen",
    "flax.linen.activation",
    "flax.nnx",
    "flax.nnx.nn.activations",
)

_ORIGINALS = {
    name: getattr(jax.nn, name)
    for name in ("softmax", "log_softmax", "logsumexp", "standardize", "dot_product_attention")
}


class _Scope(NamedTuple):
    """listener: called with the function's name. stays: from the function's name and its arguments, whether jax.nn
    computes the call."""

    listener: Callable[[str], None]
    stays: Callable[[str, dict[str, Any]], bool]


#: The current scope in this thread (or task); None outside scopes.
_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("jaxops_patch", default=None)


def _standardize(x, axis=-1, epsilon=1e-5, where=None, algorithm="stable"):
    del algorithm  # the kernel is as accurate as "stable" and as fast as "fast"
    return layer_norm(x, axis=axis, epsilon=epsilon, where=where)


_REPLACEMENTS = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "standardize": _standardize,
    "dot_product_attention": dot_product_attention,
}


def _takes(x: Any, axis: Any = -1, where: Any = None, epsilon: Any = 1e-5, algorithm: str = "stable", **others) -> bool:
    """Whether jaxops can compute the call. others: options that jaxops does not have; their defaults are fine."""
    del where
    # NumPy scalars promote, Python numbers are weakly typed; axes may be mapped axes' names.
    return (
        hasattr(x, "dtype")
        and (x.dtype.name in arguments.FLOATS or jnp.issubdtype(x.dtype, jnp.integer))
        and arguments.passes(arguments.axes, axis, np.ndim(x))
        and isinstance(epsilon, int | float)
        and not isinstance(epsilon, np.generic)
        and arguments.passes(arguments.static_float, "epsilon", epsilon)
        and algorithm in ("fast", "stable")
        and all(value is None for value in others.values())
    )


def frames(x: Any) -> Iterator[Any]:
    """The frames of the programs that x is traced into, from the innermost; none if x is computed at once."""
    trace = getattr(x, "_trace", None)
    while trace is not None:
        if (frame := getattr(trace, "frame", None)) is not None:
            yield frame
        trace = getattr(trace, "parent_trace", None)


def _in_pallas_kernel(x: Any) -> bool:
    """Whether x is traced as part of a Pallas kernel, whose compilers do not know jaxops' primitives."""
    found = (getattr(getattr(frame, "debug_info", None), "traced_for", "") for frame in frames(x))
    return any(traced_for.startswith(("pallas", "mpmd_map")) for traced_for in found)


def _takes_logsumexp(a: Any, axis: Any = None, b: Any = None, **_) -> bool:
    """Whether there is a kernel: none has factors."""
    return b is None and _takes(a, axis)


def _takes_attention(**given: Any) -> bool:
    """Whether jaxops computes such a call, with the same results; which implementation computes it must not be said."""
    if given.get("implementation") is not None or given.get("return_residual", False):
        return False
    try:
        jax.eval_shape(lambda: dot_product_attention(**given))
    except (TypeError, ValueError):  # which jax.nn says in its own way, or takes
        return False
    return True


def _dispatch(name: str) -> Callable[..., jax.Array]:
    original, replacement = _ORIGINALS[name], _REPLACEMENTS[name]
    signature = inspect.signature(original)
    takes = {"dot_product_attention": _takes_attention, "logsumexp": _takes_logsumexp}.get(name, _takes)

    @functools.wraps(original)
    def patched(*args, **kwargs):
        scope = _scope.get()
        # Other threads, and jaxops' plain forms, get jax.nn's function.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if scope is None or caller.startswith("jaxops."):
            return original(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return original(*args, **kwargs)  # which raises the right error
        if not takes(**given) or _in_pallas_kernel(next(iter(given.values()))) or scope.stays(name, given):
            return original(*args, **kwargs)
        scope.listener(name)
        return replacement(
            **{option: value for option, value in given.items() if value is not None or option == "axis"}
        )

    patched.__signature__ = signature
    return patched


_PATCH = Replacement(MODULES, {original: _dispatch(name) for name, original in _ORIGINALS.items()})


@contextlib.contextmanager
def patch_jax_nn(listener: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """A scope in which jax.nn's softmax, log_softmax, logsumexp, standardize and dot_product_attention run on jaxops.

    The scope replaces them in `jax.nn`, `jax.scipy.special` and, if imported, in `flax.linen` and `flax.nnx`, and
    restores them at its end, also after an error. Scopes nest. Other threads, and Pallas kernels, keep jax.nn's
    functions.

    The scope must include tracing: functions that :func:`jax.jit` traced earlier do not change. Neither do names that
    code imported earlier (`from jax.nn import softmax`).

    Calls that jaxops does not support go to jax.nn: complex numbers, 8-bit floats, mapped axes' names, logsumexp with
    factors `b`, attention with an `implementation` or a residual, and `standardize` with a given mean or variance, or
    with an epsilon that is an array, a NumPy scalar, or negative. `standardize` always computes the variance stably,
    whatever `algorithm` says.

    Args:
      listener: called with the function's name for each call that runs on jaxops.

    Example:
      >>> import jax, jax.numpy as jnp, jaxops
      >>> calls = []
      >>> with jaxops.patch_jax_nn(calls.append):
      ...     y = jax.nn.softmax(jnp.zeros(4))
      >>> calls, y
      (['softmax'], Array([0.25, 0.25, 0.25, 0.25], dtype=float32))
    """
    if not callable(listener):
        raise TypeError(f"patch_jax_nn: listener must be callable, got {listener!r}")
    with patch_where(listener, lambda name, given: False):
        yield


@contextlib.contextmanager
def patch_where(listener: Callable[[str], None], stays: Callable[[str, dict[str, Any]], bool]) -> Iterator[None]:
    """As patch_jax_nn, without the calls for which stays(name, arguments) is true."""
    token = _scope.set(_Scope(listener, stays))
    try:
        with _PATCH.active():
            yield
    finally:
        _scope.reset(token)


#: The listener of the current patch_optax scope in this thread (or task); None outside scopes.
_optax_listener: contextvars.ContextVar[Callable[[str], None] | None] = contextvars.ContextVar(
    "jaxops_patch_optax", default=None
)


@functools.cache
def _optax_patch() -> Replacement:
    import optax

    original = optax.softmax_cross_entropy_with_integer_labels

    @functools.wraps(original)
    def patched(logits, labels, axis=-1, where=None):
        listener = _optax_listener.get()
        taken = (
            getattr(getattr(logits, "dtype", None), "name", None) in arguments.FLOATS
            and hasattr(labels, "dtype")
            and jnp.issubdtype(labels.dtype, jnp.integer)
            and isinstance(axis, int | tuple)
            and axis != ()
            and arguments.passes(arguments.axes, axis, np.ndim(logits))
            and (where is None or getattr(where, "dtype", None) == np.bool_)
        )
        if listener is None or not taken:
            return original(logits, labels, axis, where)
        listener(original.__name__)
        loss = softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels), axis, where)
        return loss.astype(jax.dtypes.canonicalize_dtype(logits.dtype))

    modules = ("optax", "optax.losses", "optax.losses._classification")
    return Replacement(modules, {original: patched})


@contextlib.contextmanager
def patch_optax(listener: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """A scope in which optax's softmax_cross_entropy_with_integer_labels is jaxops' own.

    Like :func:`jaxops.patch_jax_nn`, it replaces the function in `optax` and `optax.losses`, and restores it at the
    scope's end. Other threads keep optax's function, and only functions that are traced in the scope are affected. The
    loss is computed in f32 and, as in optax, returned in the logits' dtype.

    Args:
      listener: called with the function's name for each call that runs on jaxops.

    Raises:
      ImportError: optax is not installed.

    Example:
      >>> import jax.numpy as jnp, jaxops, optax
      >>> calls = []
      >>> with jaxops.patch_optax(calls.append):
      ...     loss = optax.softmax_cross_entropy_with_integer_labels(jnp.zeros((1, 4)), jnp.array([2]))
      >>> calls, loss
      (['softmax_cross_entropy_with_integer_labels'], Array([1.3862944], dtype=float32))
    """
    if not callable(listener):
        raise TypeError(f"patch_optax: listener must be callable, got {listener!r}")
    patch = _optax_patch()
    token = _optax_listener.set(listener)
    try:
        with patch.active():
            yield
    finally:
        _optax_listener.reset(token)

"""jax.nn's functions replaced by jaxops' for a scope."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops import _arguments as arguments
from jaxops.ops.layer_norm import layer_norm
from jaxops.ops.log_softmax import log_softmax
from jaxops.ops.softmax import softmax


class Replacement:
    """Functions that stand in for others in some modules while at least one scope is open.

    Args:
      modules: names of modules; those that are imported count.
      substitutes: by the function that they stand in for; they must work outside of scopes too, in other threads.
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


#: The modules whose functions of these names are replaced if they are jax.nn's.
_MODULES = ("jax.nn", "flax.linen", "flax.linen.activation", "flax.nnx", "flax.nnx.nn.activations")

_ORIGINALS = {name: getattr(jax.nn, name) for name in ("softmax", "log_softmax", "standardize")}

#: What this thread (or task) calls for each replaced call, with the function's name; None: it is in no scope.
_listener: contextvars.ContextVar[Callable[[str], None] | None] = contextvars.ContextVar("jaxops_patch", default=None)


def _standardize(x, axis=-1, epsilon=1e-5, where=None, algorithm="stable"):
    del algorithm  # that of the kernel is as exact as the stable one, and as fast as the fast one
    return layer_norm(x, axis=axis, epsilon=epsilon, where=where)


_REPLACEMENTS = {"softmax": softmax, "log_softmax": log_softmax, "standardize": _standardize}


def _takes(x: Any, axis: Any = -1, where: Any = None, epsilon: Any = 1e-5, algorithm: str = "stable", **others) -> bool:
    """Whether jaxops computes such a call; others: options that it does not have, or their defaults."""
    del where
    # NumPy's numbers promote, Python's are weakly typed; axes may be names of mapped ones.
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


def _in_pallas_kernel(x: Any) -> bool:
    """Whether x is traced as part of a Pallas kernel, whose compilers do not know jaxops' primitives."""
    trace = getattr(x, "_trace", None)
    while trace is not None:
        traced_for = getattr(getattr(getattr(trace, "frame", None), "debug_info", None), "traced_for", "")
        if traced_for.startswith(("pallas", "mpmd_map")):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def _dispatch(name: str) -> Callable[..., jax.Array]:
    original, replacement = _ORIGINALS[name], _REPLACEMENTS[name]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def patched(*args, **kwargs):
        listener = _listener.get()
        # jax.nn's own: for another thread's scope and for jaxops' plain forms.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if listener is None or caller.startswith("jaxops."):
            return original(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return original(*args, **kwargs)  # which says what is wrong
        if not _takes(**given) or _in_pallas_kernel(given["x"]):
            return original(*args, **kwargs)
        listener(name)
        return replacement(
            **{option: value for option, value in given.items() if value is not None or option == "axis"}
        )

    patched.__signature__ = signature
    return patched


_PATCH = Replacement(_MODULES, {original: _dispatch(name) for name, original in _ORIGINALS.items()})


@contextlib.contextmanager
def patch_jax_nn(listener: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """A scope in which jax.nn's softmax, log_softmax and standardize are jaxops' own.

    Replaces them in `jax.nn` and, if imported, in `flax.linen` and `flax.nnx`, for code that calls them there, and puts
    them back at the end of the scope, after an error too. Scopes nest; other threads keep jax.nn's functions meanwhile.
    Names that code imported before (`from jax.nn import softmax`) stay as they are, and so do functions that
    :func:`jax.jit` traced before: it is the tracing that has to happen in the scope. Pallas kernels
    keep jax.nn's functions. What jaxops does not take goes to jax.nn: complex numbers, 8-bit floats, names of mapped
    axes, `standardize` with a given mean or variance, or with an epsilon that is an array, one of NumPy's numbers, or
    negative. `standardize` computes the variance in the stable way, whichever `algorithm` is asked for.

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
    token = _listener.set(listener)
    try:
        with _PATCH.active():
            yield
    finally:
        _listener.reset(token)

"""Warnings, which point at the first line outside jaxops, JAX and Flax."""

from __future__ import annotations

import sys
import threading
import warnings

_INTERNAL = ("jaxops", "jax", "flax")


class FallbackWarning(UserWarning):
    """A call runs on XLA's own operations instead of a jaxops kernel. Given once for each cause."""


_said: set[str] = set()
_said_lock = threading.Lock()


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the caller's line: the first one outside jaxops, JAX and Flax."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_fallback(what: str, why: str) -> None:
    """Warns once a process that `what` runs on XLA's own operations, and why."""
    message = f"{what} runs on XLA's own operations: {why}"
    with _said_lock:
        if message in _said:
            return
        _said.add(message)
    warn(message, FallbackWarning)

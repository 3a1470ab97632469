"""Kernels as JAX primitives: one FFI target, its abstract evaluation, its lowering on every platform, its vmap rule."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla

# The version of the handlers' calling convention; part of every target's name, so that an exported program which
# names an older convention fails to find its target instead of calling a newer one wrongly.
CALLING_CONVENTION = 2

#: Every kernel by name, in the order of declaration.
KERNELS: dict[str, Kernel] = {}

#: The platforms (as JAX lowers for them: "cpu", "cuda") whose handlers are registered, and their kernels.
HANDLERS: dict[str, frozenset[str]] = {}


class FallbackWarning(UserWarning):
    """Says, once for each cause, that a call runs on XLA's own operations instead of a jaxops kernel."""


_said: set[str] = set()
_said_lock = threading.Lock()


def warn_fallback(what: str, why: str) -> None:
    """Warns once a process that `what` runs on XLA's own operations, and why."""
    message = f"{what} runs on XLA's own operations: {why}"
    with _said_lock:
        if message in _said:
            return
        _said.add(message)
    warnings.warn(message, FallbackWarning, stacklevel=4)


def target_name(kernel: str) -> str:
    """The name under which a kernel's handlers are registered with XLA and appear in HLO."""
    return f"jaxops.{kernel}.v{CALLING_CONVENTION}"


def register_handlers(platform: str, targets: dict[str, Any]) -> None:
    """Registers one half's handlers with XLA; `platform` is "cpu" or "cuda"."""
    for name, capsule in targets.items():
        jax.ffi.register_ffi_target(
            target_name(name), capsule, platform={"cpu": "cpu", "cuda": "CUDA"}[platform], api_version=1
        )
    HANDLERS[platform] = frozenset(targets)


class Kernel:
    """A primitive that runs one FFI target on the platforms that have it, and plain JAX on all others.

    A subclass says what the results are (`abstract`), how the target is called (`call_target`), what the same thing
    is in plain JAX (`plain`) and how a mapped axis enters (`batch`). All take the operands, then the parameters.

    Args:
      name: the target's name, without prefix and version.
      plain_on: platforms on which plain JAX is the intended implementation, used without a warning.
    """

    def __init__(self, name: str, *, plain_on: Sequence[str] = ()):
        self.name = name
        self.plain_on = frozenset(plain_on)
        self.primitive = primitive = Primitive(f"jaxops_{name}")
        primitive.multiple_results = True
        primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
        primitive.def_abstract_eval(self.abstract)
        batching.primitive_batchers[primitive] = self.batch
        for platform in ("cpu", "cuda"):
            lowering = mlir.lower_fun(functools.partial(self._lower, platform), multiple_results=True)
            mlir.register_lowering(primitive, lowering, platform=platform)
        other = mlir.lower_fun(functools.partial(self._lower, "this platform"), multiple_results=True)
        mlir.register_lowering(primitive, other)
        KERNELS[name] = self

    def _lower(self, platform: str, *operands, **params):
        if any(operand.size == 0 for operand in operands):
            return self.plain(*operands, **params)
        if self.name in HANDLERS.get(platform, ()):
            return self.call_target(*operands, **params)
        if platform not in self.plain_on:
            warn_fallback(f"{self.name} on {platform}", "jaxops was built without kernels for it")
        return self.plain(*operands, **params)

    def ffi_call(self, results: Sequence[jax.ShapeDtypeStruct], *operands, **attributes) -> list[jax.Array]:
        """Calls the FFI target itself."""
        return jax.ffi.ffi_call(target_name(self.name), results)(*operands, **attributes)

    def bind(self, *operands, **params) -> list[jax.Array]:
        return self.primitive.bind(*operands, **params)

    def explain(self, *operands: ShapedArray, **params: Any) -> str:
        """A call in one line, for jaxops.explain: its parameters; a kernel that chooses can say what."""
        del operands
        groups = (value._asdict() if hasattr(value, "_asdict") else {name: value} for name, value in params.items())
        shown = [(name, getattr(value, "name", value)) for group in groups for name, value in group.items()]
        return ", ".join(f"{name}={value}" for name, value in shown if value not in ((), None, False, -1))

    abstract: Callable[..., list[ShapedArray]]
    call_target: Callable[..., list[jax.Array]]
    plain: Callable[..., list[jax.Array]]
    batch: Callable[..., tuple[list[jax.Array], list[int]]]

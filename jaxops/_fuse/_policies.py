"""jax.checkpoint policies, which know products by the primitive that they had before they were replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax import lax

from jaxops._kernel import KERNELS


class _Translated:
    """A policy that is asked about lax's dot_general where the product is jaxops'."""

    def __init__(self, policy: Callable[..., Any]):
        functools.update_wrapper(self, policy, updated=())
        self._policy = policy

    def __call__(self, primitive: Any, *operands: Any, **params: Any) -> Any:
        if primitive is KERNELS["matmul"].primitive:
            operands, params = KERNELS["matmul"].as_dot_general(*operands, **params)
            primitive = lax.dot_general_p
        return self._policy(primitive, *operands, **params)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Translated) and self._policy == other._policy

    def __hash__(self) -> int:
        return hash(self._policy)


def translated(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The policy with its meaning: a product that it saves is saved as jaxops'."""
    return policy if policy is None or isinstance(policy, _Translated) else _Translated(policy)

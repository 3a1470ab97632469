"""Policies of jax.checkpoint, which know products by the primitive that they had before they were replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.core import ShapedArray

from jaxops._kernel import KERNELS


def _as_dot_general(lhs: Any, rhs: Any, *rest: Any, **params: Any) -> tuple[list[Any], dict[str, Any]]:
    """The operands and parameters of lax's dot_general, of a product of jaxops'.

    Along a batch axis an operand may have size 1; there it has no batch axis.
    """
    layout = KERNELS["matmul"].layout(lhs, rhs, *rest, **params)
    sides, names = [], []
    for x, given in zip((lhs, rhs), layout.operands[:2], strict=True):
        kept = [a for a, name in enumerate(given) if not name.startswith("own")]
        names.append([given[a] for a in kept])
        sides.append(ShapedArray([x.shape[a] for a in kept], x.dtype))

    def shared(kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        both = [name for name in names[0] if name in names[1] and name.startswith(kind)]
        return tuple(map(names[0].index, both)), tuple(map(names[1].index, both))

    spec = params["spec"]
    numbers = (shared("k"), shared("batch"))
    options = {"precision": spec.precision, "preferred_element_type": spec.dtype, "out_sharding": None}
    return sides, {"dimension_numbers": numbers, **options}


class _Translated:
    """A policy that is asked about lax's dot_general where the product is jaxops'."""

    def __init__(self, policy: Callable[..., Any]):
        functools.update_wrapper(self, policy, updated=())
        self._policy = policy

    def __call__(self, primitive: Any, *operands: Any, **params: Any) -> Any:
        if primitive is KERNELS["matmul"].primitive:
            operands, params = _as_dot_general(*operands, **params)
            primitive = lax.dot_general_p
        return self._policy(primitive, *operands, **params)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Translated) and self._policy == other._policy

    def __hash__(self) -> int:
        return hash(self._policy)


def translated(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The policy with its meaning: a product that it saves is saved as jaxops'."""
    return policy if policy is None or isinstance(policy, _Translated) else _Translated(policy)

"""fuse: any JAX function, with the ops in its jaxpr found and run on jaxops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np

from jaxops._fuse._report import FuseReport
from jaxops._fuse._rewrite import Rewriter
from jaxops._fuse._rules import OPS

__all__ = ["FuseReport", "fuse"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


_COMPUTED = object()  # in the place of a result that the function computes


def _is_traced(leaf: Any) -> bool:
    """Arrays are; Python's numbers, strings and the like are options, which the function takes as they are."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and getattr(leaf, "dtype", None) != np.dtype(object)


def fuse(
    f: _Function,
    *,
    only: str | Iterable[str] | None = None,
    report: Callable[[FuseReport], Any] | None = None,
) -> _Function:
    """Returns the same function with its norms, softmaxes, attention, losses and products on jaxops.

    The function is traced to a jaxpr before it is differentiated. If some equations compute the same value and
    derivative as a jaxops op, the op replaces them; everything else stays as it is. So it works for models from any
    library, and parameters and checkpoints do not change.

    A match must pass two checks: the structure of the equations, and a comparison of values and tangents on small
    random rows while the function is traced. Equations stay with XLA if the comparison fails, if an inner value is used
    elsewhere (such as a variance that is also returned), or if the user gave a derivative for them. 16-bit floats are
    rounded once, at the end; the original may round in between.

    The result can be transformed like the function itself, inside or outside `jax.jit`. jitted functions inside stay
    functions, compiled once; scans, loops, conditions, `jax.checkpoint` and `jax.shard_map` are looked into, and a
    checkpoint policy that saves products saves jaxops'. In a `jax.custom_jvp` or `jax.custom_vjp`, only the code that
    runs without differentiation is looked into. Fuse before differentiating: `jax.grad(jaxops.fuse(loss))`.

    Args:
      f: a function of arrays in any structure. Arguments that are not arrays are options and are not traced.
      only: the op or ops to look for; by default all: "dot_product_attention", "linear_cross_entropy",
        "softmax_cross_entropy_with_integer_labels", "layer_norm", "rms_norm", "softmax", "log_softmax", "gated_mlp",
        "gated_matmul", "matmul" (a product with a bias or an activation) and "dot_general".
      report: called with a :class:`jaxops.FuseReport` whenever the function is traced; `print` shows it.

    Returns:
      A function with the same arguments and results. Outside `jax.jit` each call traces `f` again.

    Raises:
      TypeError: `f` or `report` is not callable.
      ValueError: `only` names something else.

    Example:
      >>> import jax, jax.numpy as jnp, jaxops
      >>> def layer(x, w, scale):
      ...     normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
      ...     return jax.nn.softmax(normed @ w)
      >>> reports = []
      >>> step = jax.jit(jaxops.fuse(layer, report=reports.append))
      >>> step(jnp.ones((2, 4)), jnp.ones((4, 8)), jnp.ones(4)).shape
      (2, 8)
      >>> reports[0].counts
      {'rms_norm': 1, 'softmax': 1, 'dot_general': 1}
    """
    if not callable(f):
        raise TypeError(f"fuse: f must be callable, got {type(f).__name__}")
    if report is not None and not callable(report):
        raise TypeError(f"fuse: report must be callable or None, got {type(report).__name__}")
    wanted = (
        OPS if only is None else tuple(only) if isinstance(only, Iterable) and not isinstance(only, str) else (only,)
    )
    if unknown := [name for name in wanted if name not in OPS]:
        raise ValueError(f"fuse: only must name ops among {', '.join(OPS)}, got {unknown[0]!r}")
    rewriter = Rewriter(frozenset(wanted))

    @functools.wraps(f)
    def fused(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        traced = [i for i, leaf in enumerate(leaves) if _is_traced(leaf)]
        results: list[Any] = []
        result_structure = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal results, result_structure
            given = dict(zip(traced, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(structure, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
            found, result_structure = jax.tree.flatten(f(*args, **kwargs))
            results = [_COMPUTED if _is_traced(leaf) else leaf for leaf in found]  # no tracer outlives its trace
            return [leaf for leaf in found if _is_traced(leaf)]

        closed = jax.make_jaxpr(flat)(*(leaves[i] for i in traced))
        function, found = rewriter(closed.jaxpr, closed.consts)
        if report is not None:
            report(found.report())
        computed = iter(function(*(leaves[i] for i in traced)))
        return jax.tree.unflatten(result_structure, [next(computed) if x is _COMPUTED else x for x in results])

    return fused

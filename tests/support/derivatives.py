"""First and second derivatives against differences, along one random direction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def check_second_order(f, operands, rng, tolerance=1e-5, step=1e-5):
    """A scalar function's derivatives: forward, reverse, and all compositions of the two. In float64.

    The same as jax.test_util.check_grads of order 2 with both modes, in two compiled programs instead of about thirty.

    Args:
      f: a function of `operands`, arrays or trees of arrays.
      tolerance: the largest error, as a share of the largest value.
      step: of the differences, along a direction of length 1.
    """
    operands = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tuple(operands))
    everything = tuple(range(len(operands)))
    along = jax.tree.map(lambda x: rng.standard_normal(np.shape(x)), operands)
    length = np.sqrt(sum(np.sum(np.square(v)) for v in jax.tree.leaves(along)))
    along = jax.tree.map(lambda v: jnp.asarray(v / length), along)

    def dot(tree):
        return sum(map(jnp.vdot, jax.tree.leaves(tree), jax.tree.leaves(along)))

    gradient = jax.grad(f, everything)
    value_and_gradient = jax.jit(jax.value_and_grad(f, everything))

    @jax.jit
    def derivatives(*xs):
        def forward(*xs):
            return jax.jvp(f, xs, along)[1]

        return {
            "forward": forward(*xs),
            "forward over reverse": jax.jvp(gradient, xs, along)[1],
            "reverse over forward": jax.grad(forward, everything)(*xs),
            "reverse over reverse": jax.grad(lambda *xs: dot(gradient(*xs)), everything)(*xs),
            "forward over forward": jax.jvp(forward, xs, along)[1],
        }

    got = derivatives(*operands)
    _, first = value_and_gradient(*operands)
    (ahead, gradient_ahead), (behind, gradient_behind) = (
        value_and_gradient(*jax.tree.map(lambda x, v, h=h: x + h * v, operands, along)) for h in (step, -step)
    )
    slope = (ahead - behind) / (2 * step)
    second = jax.tree.map(lambda a, b: (a - b) / (2 * step), gradient_ahead, gradient_behind)
    wanted = {"forward": slope, "forward over forward": dot(second)}
    wanted |= dict.fromkeys(("forward over reverse", "reverse over forward", "reverse over reverse"), second)
    for name, target in [*wanted.items(), ("reverse", slope)]:
        mine = dot(first) if name == "reverse" else got[name]
        largest = max(float(np.max(np.abs(x), initial=0)) for x in jax.tree.leaves(target))
        assert largest > 0, f"{name}: a function with a derivative of 0 shows nothing"
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(target), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(largest, 1e-2), err_msg=name)

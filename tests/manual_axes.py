"""The ops in every kind of shard_map, with one way to give a mesh: `python tests/manual_axes.py KIND WAY`.

A script, as a fault may end the process: XLA aborts when it gets shardings that do not fit its devices.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=16"
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxops

NAMES = ("stage", "data", "model", "expert")


def ours(x, scale, weight):
    return jaxops.matmul(jaxops.layer_norm(jaxops.softmax(x), scale), weight, precision="highest")


def plain(x, scale, weight):
    y = jax.nn.softmax(x)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale
    return jnp.matmul(y, weight, precision="highest")


def gradients(f):
    def total(*xs):
        y = f(*xs)
        return jnp.sum(y / (2 + y * y))  # nonlinear, and compiled sooner than a sine

    return lambda *xs: jax.value_and_grad(total, (0, 1, 2))(*xs)


@contextlib.contextmanager
def both(mesh):
    with jax.set_mesh(mesh), mesh:
        yield


#: How the surroundings set a mesh.
WAYS = {
    "nothing": lambda mesh: contextlib.nullcontext(),
    "set_mesh": jax.set_mesh,
    "with": lambda mesh: mesh,
    "both": both,
    "with another": lambda mesh: Mesh(mesh.devices.reshape(4, 4), ("a", "b")),
    "with fewer devices": lambda mesh: Mesh(mesh.devices.ravel()[:2], ("data",)),
    "use_abstract_mesh": lambda mesh: jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
}


def cases(mesh):
    """By name: how many shards the first axis of x is cut into, and a function that gives each shard's gradients."""

    def split(x, spec):
        current = jax.sharding.get_abstract_mesh()
        sharding = NamedSharding(current if current.manual_axes else mesh, spec)
        return jax.reshard(x, sharding) if mesh.axis_types[0] == AxisType.Explicit else constrain(x, sharding)

    constrain = jax.lax.with_sharding_constraint

    def mapped(manual, spec, f=ours, **options):
        """Over the manual axes; inside, x is split as `spec` tells."""

        def local(x, *parameters):
            return jax.tree.map(lambda y: y[None], gradients(f)(split(x, spec), *parameters))

        specs = {"in_specs": (P(manual), P(), P()), "out_specs": P(manual)}
        return 2 ** len(manual), outer(local, specs, manual, **options)

    def outer(f, specs, manual, **options):
        f = jax.shard_map(f, mesh=mesh, **specs, axis_names=set(manual), **options)
        return lambda x, *parameters: f(split(x, P(manual)), *parameters)

    def nested(x, *parameters):
        specs = {"in_specs": (P("model"), P(), P()), "out_specs": P("model"), "axis_names": {"model"}}
        inner = lambda *xs: jax.tree.map(lambda y: y[None], gradients(ours)(*xs))  # noqa: E731
        return jax.shard_map(inner, **specs)(split(x, P("model", "expert", "data")), *parameters)

    for order in itertools.permutations(NAMES[1:]):
        yield f"one manual axis, split over {order}", mapped(("stage",), P(None, order[0], order[1:]))
    for manual in itertools.combinations(NAMES, 2):
        free = tuple(name for name in NAMES if name not in manual)
        yield f"manual {manual}", mapped(manual, P(None, *free[::-1]))
    yield "one free axis of three", mapped(("data",), P(None, None, "expert"))
    yield "one free axis", mapped(NAMES[1:], P(None, None, "stage"))
    yield "all manual", mapped(NAMES, P())
    yield "unchecked", mapped(("stage",), P(None, "model", "data"), check_vma=False)
    yield "jit inside", mapped(("stage",), P(None, "model", "data"), jax.jit(ours))
    yield "remat", mapped(("stage",), P(None, "model", "data"), jax.checkpoint(ours))
    yield "nested", (4, outer(nested, {"in_specs": (P("stage"), P(), P()), "out_specs": P("stage")}, ("stage",)))
    whole = lambda x, *rest: gradients(ours)(split(x, P("stage", "model", ("expert", "data"))), *rest)  # noqa: E731
    yield "no shard_map", (1, lambda *xs: jax.tree.map(lambda y: y[None], whole(*xs)))


def main(kind: str, way: str) -> None:
    warnings.filterwarnings("ignore", "`with mesh:`", DeprecationWarning)
    order = np.random.default_rng(0).permutation(16)
    devices = np.array(jax.devices("cpu"))[order].reshape(2, 2, 2, 2)
    mesh = Mesh(devices, NAMES, axis_types=(getattr(AxisType, kind),) * 4)
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal(shape).astype(np.float32) for shape in ((16, 8, 16), (16,), (16, 8))]
    with WAYS[way](mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P())) for x in xs]
        names, shards, functions = zip(*((name, *case) for name, case in cases(mesh)), strict=True)
        found = jax.jit(lambda *xs: [f(*xs) for f in functions])(*placed)
        found = jax.tree.map(np.asarray, found)
    of_shards = jax.jit(jax.vmap(gradients(plain), (0, None, None)))
    for name, count, got in zip(names, shards, found, strict=True):
        x = xs[0].reshape(count, -1, *xs[0].shape[1:])
        wanted = of_shards(x, *xs[1:])
        for i, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)):
            if i > 1:  # for parameters, which jax.shard_map sums unless it does not check
                a, b = jnp.sum(a, 0) if name == "unchecked" else a[0], jnp.sum(b, 0)
            np.testing.assert_allclose(jnp.reshape(a, b.shape), b, rtol=1e-4, atol=1e-4, err_msg=name)
    print(f"{len(names)} cases")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Every op under every JAX transformation, against the form that a user would write without jaxops.

`make matrix`, or `python tests/transformations.py`, runs all cells on the devices there are and prints the table;
pytest runs them as tests. Words as arguments select the transformations whose names contain such a word; --jobs N runs
N processes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.ad_checkpoint
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads
from support.ops import CASES, Variant

import jaxops

#: The ops, and again with some options.
OPS: dict[str, Variant] = {
    ", ".join(filter(None, (case.name, options))): variant
    for case in CASES.values()
    for options, variant in case.variants.items()
}

#: By name: a transformation of a function with operands; results must equal the reference's results.
TRANSFORMATIONS: dict[str, Callable] = {}


def transformation(name: str):
    def register(function):
        TRANSFORMATIONS[name] = function
        return function

    return register


def waves(x):
    """Positive and negative numbers with x's shape and dtype."""
    return ((jnp.arange(x.size) * 7 % 12 - 5.5) / 4).astype(x.dtype).reshape(x.shape)


def bend(x):
    """A nonlinear function, which XLA compiles sooner than a sine."""
    return x / (2 + x * x)


def scalar(f):
    """A nonlinear function of all of f's values."""

    def total(*xs):
        y = f(*xs)
        return jnp.sum(bend(y) * waves(y))

    return total


def every(xs):
    return tuple(range(len(xs)))


@functools.cache
def by_grad(f):
    """Compiled once for all transformations that do not change a gradient."""
    return jax.jit(lambda *xs: jax.value_and_grad(scalar(f), every(xs))(*xs))


#: What the reference does for a transformation, by its name, if a program that other transformations need gives the
#: same numbers.
FOR_REFERENCE: dict[str, Callable] = {
    "remat": lambda f, *xs: by_grad(f)(*xs)[1],
    "remat names": lambda f, *xs: by_grad(f)(*xs)[1],
    "remat policies": lambda f, *xs: [by_grad(f)(*xs)[1]] * 3,
    "export": lambda f, *xs: by_grad(f)(*xs),
    "debug_nans": lambda f, *xs: by_grad(f)(*xs),
    "checkify": lambda f, *xs: by_grad(f)(*xs),
    "cond": lambda f, *xs: by_grad(f)(*xs)[1],
    "export, symbolic": lambda f, *xs: all_of(f)(*xs)[:2],
    "shard_map": lambda f, *xs: all_of(f)(*xs)[1],
    "shard_map over a part, Auto": lambda f, *xs: all_of(f)(*xs)[1],
    "shard_map over a part, Explicit": lambda f, *xs: all_of(f)(*xs)[1],
    "jit": lambda f, *xs: by_call(f)(*xs),
    "AOT": lambda f, *xs: by_call(f)(*xs),
    "eval_shape": lambda f, *xs: 0 * by_call(f)(*xs),
    "donation": lambda f, *xs: xs[0] + jnp.sum(by_call(f)(*xs)),
    "jax.debug": lambda f, *xs: [by_call(f)(*xs)] * 2,
}


FOR_REFERENCE["vmap, spmd_axis_name"] = lambda f, *xs: [
    np.stack([gradient] * make_mesh().shape["data"]) for gradient in jax.tree.leaves(by_grad(f)(*xs)[1])
]


@functools.cache
def by_call(f):
    """The function, compiled once."""
    return jax.jit(f)


def double(apply):
    """In float64, where derivatives can be compared closely."""

    @functools.wraps(apply)
    def run(f, *xs):
        with jax.enable_x64(True):
            return apply(f, *(np.asarray(x, np.float64) for x in xs))

    return run


# --- derivatives ---


@transformation("grad")
@double
def _grad(f, *xs):
    return jax.jit(jax.value_and_grad(scalar(f), every(xs)))(*xs)


@transformation("jvp")
@double
def _jvp(f, *xs):
    return jax.jit(lambda *xs: jax.jvp(f, xs, tuple(map(waves, xs))))(*xs)


def _linearized(f, *xs):
    y, linear = jax.linearize(f, *xs)
    tangents = tuple(waves(jnp.asarray(x)) for x in xs)
    return y, linear(*tangents), jax.linear_transpose(linear, *tangents)(waves(y))


TRANSFORMATIONS["linearize"] = double(lambda f, *xs: jax.jit(functools.partial(_linearized, f))(*xs))


@transformation("jacfwd")
@double
def _jacfwd(f, *xs):
    return jax.jit(jax.jacfwd(f, every(xs)))(*xs)[-1]


@transformation("grad of grad")
@double
def _grad_of_grad(f, *xs):
    def penalty(*xs):
        return sum(jnp.sum(jnp.square(g) * waves(g)) for g in jax.grad(scalar(f), every(xs))(*xs))

    return jax.jit(jax.grad(penalty, every(xs)))(*xs)


@transformation("hvp")
@double
def _hvp(f, *xs):
    """Forward over reverse."""
    return jax.jit(lambda *xs: jax.jvp(jax.grad(scalar(f), every(xs)), xs, tuple(map(waves, xs))))(*xs)


@transformation("hessian")
@double
def _hessian(f, *xs):
    """For one row of x, and for the last operand."""

    def of_row(row, *rest):
        return scalar(f)(jnp.asarray(xs[0]).at[0, -1].set(row), *rest)

    return jax.jit(jax.hessian(of_row, sorted({0, len(xs) - 1})))(xs[0][0, -1], *xs[1:])


@transformation("check_grads")
@double
def _check_grads(f, *xs):
    """First and second derivatives against differences."""
    check_grads(jax.jit(f), xs, order=2, modes=["fwd", "rev"], atol=1e-4, rtol=1e-4)


@transformation("x64")
@double
def _x64(f, *xs):
    y = f(*xs)
    assert y.dtype == np.float64
    return y


# --- vmap ---


@transformation("vmap")
def _vmap(f, *xs):
    """Over a new last axis in all operands, and over one in the first."""
    stacked = [jnp.stack([x, x + waves(x)], -1) for x in xs]
    all_mapped = jax.jit(jax.vmap(jax.grad(scalar(f), every(xs)), -1))(*stacked)
    return all_mapped, jax.vmap(f, (-1, *[None] * (len(xs) - 1)))(stacked[0], *xs[1:])


@transformation("nested vmap")
def _nested_vmap(f, *xs):
    x, *rest = xs
    x = jnp.stack([jnp.stack([x, 2 * x], 1), jnp.stack([waves(x), -x], 1)], 2)
    inner = jax.vmap(lambda x, *rest: jax.grad(scalar(f))(x, *rest), (1, *[None] * len(rest)))
    return jax.jit(jax.vmap(inner, (2, *[None] * len(rest)), 1))(x, *rest)


# --- control flow and memory ---


@transformation("scan")
def _scan(f, *xs):
    def total(*xs):
        step = lambda c, s: (c + scalar(f)(s * xs[0], *xs[1:]), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, jnp.array([1.0, 2.0]))[0]

    return jax.jit(jax.value_and_grad(total, every(xs)))(*xs)


@transformation("while")
def _while(f, *xs):
    def step(carry):
        i, total = carry
        return i + 1, total + scalar(f)(xs[0] * i, *xs[1:])

    return jax.jit(lambda: jax.lax.while_loop(lambda carry: carry[0] < 3, step, (1.0, 0.0)))()


@transformation("cond")
def _cond(f, *xs):
    def total(*xs):
        return jax.lax.cond(xs[0][0, 0, 0] < 1e9, scalar(f), lambda *xs: 0.0, *xs)

    return jax.jit(jax.grad(total, every(xs)))(*xs)


@transformation("remat")
def _remat(f, *xs):
    return jax.jit(jax.grad(jax.checkpoint(scalar(f)), every(xs)))(*xs)


@transformation("remat policies")
def _remat_policies(f, *xs):
    policies = (
        jaxops.checkpoint_policies.dots_saveable,
        jaxops.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jaxops.checkpoint_policies.save_only_these_ops("softmax", "matmul"),
    )
    return [jax.jit(jax.grad(jax.checkpoint(scalar(f), policy=policy), every(xs)))(*xs) for policy in policies]


@transformation("remat names")
def _remat_names(f, *xs):
    def total(*xs):
        y = jax.ad_checkpoint.checkpoint_name(f(*xs), "y")
        return jnp.sum(bend(y) * waves(y))

    policy = jax.checkpoint_policies.save_only_these_names("y")
    return jax.jit(jax.grad(jax.checkpoint(total, policy=policy), every(xs)))(*xs)


# --- compilation ---


@transformation("jit")
def _jit(f, *xs):
    return jax.jit(f)(*xs)


@transformation("eval_shape")
def _eval_shape(f, *xs):
    out = jax.eval_shape(f, *xs)
    return jnp.zeros(out.shape, out.dtype)


@transformation("AOT")
def _aot(f, *xs):
    return jax.jit(f).lower(*xs).compile()(*xs)


@transformation("donation")
def _donation(f, *xs):
    copy = xs[0] + 0
    y = jax.jit(lambda x, *rest: x + jnp.sum(f(x, *rest)), donate_argnums=0)(copy, *xs[1:])
    assert copy.is_deleted()
    return y


@transformation("export")
def _export(f, *xs):
    """Of the gradient too."""
    checks = jaxops.disabled_checks()
    exported = jax.export.export(jax.jit(jax.value_and_grad(scalar(f), every(xs))), disabled_checks=checks)(*xs)
    return jax.jit(exported.call)(*xs)


@transformation("export, symbolic")
def _export_symbolic(f, *xs):
    """The batch has any size."""
    (size,) = jax.export.symbolic_shape("size")
    types = [jax.ShapeDtypeStruct((size, *x.shape[1:]) if x.ndim == 3 else x.shape, x.dtype) for x in xs]
    total = jax.jit(jax.value_and_grad(lambda *xs: jnp.sum(bend(f(*xs))), every(xs)))
    exported = jax.export.export(total, disabled_checks=jaxops.disabled_checks())(*types)
    return jax.jit(exported.call)(*xs)


@transformation("debug_nans")
def _debug_nans(f, *xs):
    with jax.debug_nans(True):
        result = jax.jit(jax.value_and_grad(scalar(f), every(xs)))(*xs)
        try:
            scalar(f)(xs[0].at[0, 0, 0].set(jnp.nan), *xs[1:])
        except FloatingPointError:
            return result
    raise AssertionError("a NaN went unnoticed")


@transformation("checkify")
def _checkify(f, *xs):
    """float_checks find a NaN where jax.nn's do, forward and in gradients, and none elsewhere."""

    @jax.jit
    def every_error(*xs):
        checked = functools.partial(checkify.checkify, errors=checkify.float_checks)
        error, result = checked(jax.value_and_grad(scalar(f), every(xs)))(*xs)
        wrong = xs[0].at[0, 0, 0].set(jnp.nan), *xs[1:]
        return error, result, [checked(function)(*wrong)[0] for function in (f, jax.grad(scalar(f)))]

    error, result, errors = every_error(*xs)
    assert error.get() is None
    for error in errors:
        assert "nan generated by primitive" in error.get()
    return result


@transformation("jax.debug")
def _debug(f, *xs):
    """In order: without it XLA for GPUs fails to compile jax.nn.softmax followed by a callback (jaxlib 0.11.2)."""
    seen = []

    def step(*xs):
        y = f(*xs)
        jax.debug.callback(lambda v: seen.append(np.asarray(v)), y, ordered=True)
        return y

    y = jax.jit(step)(*xs)
    jax.effects_barrier()
    return y, seen[0]


# --- many devices ---


def make_mesh(kind=AxisType.Auto, first="model"):
    """All devices, an even number up to 8, as data and model; `first`: which axis is 2 if there are only 2."""
    count = 2 ** min(3, int(np.log2(len(jax.devices()))))
    shape = (max(1, count // 2), min(2, count))
    shape = shape[::-1] if count == 2 and first == "data" else shape
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices()[:count])


def place(xs, axes, mesh, splits):
    """The operands on a mesh; splits: the mesh axis over which each named axis is split."""
    specs = [PartitionSpec(*(splits.get(a) for a in names)) for names in axes]
    return [jax.device_put(np.asarray(x), NamedSharding(mesh, s)) for x, s in zip(xs, specs, strict=True)]


def on_mesh(apply):
    """apply(f, mesh, axes, *xs) on a mesh for the op, on one device for the reference."""

    def run(f, *xs):
        case = next((op for op in OPS.values() if op.ours is f), None)
        if case is None:
            return apply(f, None, None, *xs)
        mesh = getattr(apply, "make", make_mesh)(apply.kind)
        with jax.set_mesh(mesh):
            return apply(f, mesh, case.axes, *xs)

    return run


@functools.cache
def all_of(f):
    """Value, gradients and tangents; compiled once for all meshes where it is not split."""

    @jax.jit
    def all_of_it(*xs):
        moved = jax.jvp(f, xs, tuple(map(bend, xs)))[1]
        return *jax.value_and_grad(lambda *xs: jnp.sum(bend(f(*xs))), every(xs))(*xs), moved

    return all_of_it


def sharded(kind, splits):
    def apply(f, mesh, axes, *xs):
        return all_of(f)(*(place(xs, axes, mesh, splits) if mesh else xs))

    apply.kind = kind
    return on_mesh(apply)


for _kind in (AxisType.Auto, AxisType.Explicit):
    TRANSFORMATIONS[f"{_kind.name} mesh, rows split"] = sharded(_kind, {"b": "data", "t": "model"})
    TRANSFORMATIONS[f"{_kind.name} mesh, columns split"] = sharded(_kind, {"b": "data", "c": "model"})


def shard_mapped(kind, splits, manual, make=make_mesh):
    """Over the manual axes of a mesh; gradients of operands that are not split over them are summed over devices."""

    def apply(f, mesh, axes, *xs):
        def gradients(*xs):
            return jax.grad(lambda *xs: jnp.sum(bend(f(*xs))), every(xs))(*xs)

        if mesh is None:
            return jax.jit(gradients)(*xs)
        mapped_axes = {a: name for a, name in splits.items() if name in manual}
        specs = tuple(PartitionSpec(*(mapped_axes.get(a) for a in names)) for names in axes)
        mapped = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=set(manual))
        return jax.jit(mapped)(*place(xs, axes, mesh, splits))

    apply.kind, apply.make = kind, make
    return on_mesh(apply)


def make_stages(kind=AxisType.Auto):
    """Up to eight devices as stages, each with data and model."""
    sizes = {8: (2, 2, 2), 4: (2, 2, 1)}
    count = next((count for count in sizes if count <= len(jax.devices())), 1)
    return jax.make_mesh(
        sizes.get(count, (1, 1, 1)),
        ("stage", "data", "model"),
        axis_types=(kind,) * 3,
        devices=jax.devices()[:count],
    )


TRANSFORMATIONS["shard_map"] = shard_mapped(AxisType.Auto, {"b": "data"}, ("data", "model"))
for _kind in (AxisType.Auto, AxisType.Explicit):  # the other axes are not split in the mesh's order
    TRANSFORMATIONS[f"shard_map over a part, {_kind.name}"] = shard_mapped(
        _kind, {"b": "stage", "t": "model", "c": "data"}, ("stage",), make_stages
    )


@transformation("vmap, spmd_axis_name")
def _spmd_vmap(f, *xs):
    mesh = make_mesh()
    stacked = [np.stack([x] * mesh.shape["data"]) for x in xs]
    with jax.set_mesh(mesh):
        stacked = place(stacked, ["s" + "-" * x.ndim for x in xs], mesh, {"s": "data"})
        return jax.jit(jax.vmap(jax.grad(scalar(f), every(xs)), spmd_axis_name="data"))(*stacked)


def check(op: str, name: str) -> None:
    """Runs one cell; raises if it fails."""
    case, apply = OPS[op], TRANSFORMATIONS[name]
    xs = case.operands()
    if name == "check_grads":
        apply(case.ours, *xs)
        return
    got = jax.tree.leaves(apply(case.ours, *xs))
    wanted = jax.tree.leaves(FOR_REFERENCE.get(name, apply)(case.reference, *xs))
    assert len(got) == len(wanted)
    for ours, reference in zip(got, wanted, strict=True):
        assert ours.shape == reference.shape and ours.dtype == reference.dtype
        ours, reference = np.asarray(ours), np.asarray(reference)
        tolerance = 1e-9 if ours.dtype == np.float64 else 1e-4
        size = max(1e-3, float(np.max(np.abs(reference), initial=0)))
        np.testing.assert_allclose(ours, reference, rtol=tolerance, atol=tolerance * size)


def run_row(name: str) -> tuple[str, float, list[tuple[str, str, str]]]:
    """Checks a transformation for all ops: a mark for each, the seconds it took, and the failures."""
    marks, failures, start = [], [], time.perf_counter()
    for op in OPS:
        try:
            check(op, name)
            marks.append("+")
        except Exception:
            marks.append("-")
            failures.append((op, name, traceback.format_exc()))
    return " ".join(marks), time.perf_counter() - start, failures


def main() -> int:
    """Prints the matrix, or some of its rows; returns how many cells fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only transformations whose names contain one")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the rows (default: %(default)s)")
    options = parser.parse_args()
    width = max(map(len, TRANSFORMATIONS))
    names = list(OPS)
    rows = [name for name in TRANSFORMATIONS if not options.words or any(word in name for word in options.words)]
    failures = []
    with contextlib.ExitStack() as stack:
        if options.jobs > 1:
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share the devices' memory
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(concurrent.futures.ProcessPoolExecutor(options.jobs, context))
            results = pool.map(run_row, rows)
        else:
            results = map(run_row, rows)
        devices = jax.devices()
        print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}\n")
        for i, op in enumerate(names):
            print(" " * width, "| " * i + op)
        for name, (marks, seconds, failed) in zip(rows, results, strict=True):
            print(f"{name:{width}}", marks, f" {seconds:5.1f} s", flush=True)
            failures += failed
    count = len(names) * len(rows)
    print(f"\n{count - len(failures)} of {count} cells hold.")
    for op, name, text in failures:
        print(f"\n--- {op} under {name}\n{text}", file=sys.stderr)
    return len(failures)


if __name__ == "__main__":
    sys.exit(min(main(), 1))

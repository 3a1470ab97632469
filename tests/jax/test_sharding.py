"""Communication of kernels on many devices. transformations.py compares the results."""

import itertools
import math
import os
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import manual_axes
import numpy as np
import pytest
import transformations
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import transformer
from support.collectives import by_kind, collectives
from support.ops import SIZES

import jaxops

pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")

BOTH = (AxisType.Auto, AxisType.Explicit)

ROWS = {"b": "data", "t": "model"}
COLUMNS = {"b": "data", "c": "model"}
#: What is reduced over devices, forward and besides with the gradients: words of axes, whose sizes on one device are
#: multiplied, and after a slash the axes over which it is reduced. Nothing is ever gathered.
EXPECTED = {
    ("softmax", "rows"): ([], []),
    ("softmax", "columns"): (["bt/c", "bt/c"], ["bt/c"]),
    ("softmax, all options", "rows"): ([], ["tc/b"]),
    ("softmax, all options", "columns"): (["bt/c", "bt/c"], ["bt/c", "tc/b"]),
    ("log_softmax", "rows"): ([], []),
    ("log_softmax", "columns"): (["bt/c", "bt/c"], ["bt/c"]),
    ("log_softmax, all options", "rows"): ([], ["tc/b"]),
    ("log_softmax, all options", "columns"): (["bt/c", "bt/c"], ["bt/c", "tc/b"]),
    ("cross_entropy", "rows"): ([], []),
    ("cross_entropy", "columns"): (["bt/c", "2bt/c"], []),
    ("cross_entropy, all options", "rows"): ([], []),
    ("cross_entropy, all options", "columns"): (["bt/c", "3bt/c"], []),
    ("layer_norm", "rows"): ([], ["c/bt", "c/bt"]),
    ("layer_norm", "columns"): (["bt/c", "bt/c"], ["2bt/c", "c/b", "c/b"]),
    ("layer_norm, all options", "rows"): ([], ["c/bt", "c/bt"]),
    ("layer_norm, all options", "columns"): (["2bt/c", "2bt/c"], ["3bt/c", "c/b", "c/b"]),
    ("rms_norm", "rows"): ([], ["c/bt"]),
    ("rms_norm", "columns"): (["bt/c"], ["bt/c", "c/b"]),
    ("matmul", "rows"): ([], ["cn/bt"]),
    ("matmul", "columns"): (["btn/c"], ["cn/b"]),
    ("matmul, bias and gelu", "rows"): ([], ["cn/bt", "n/bt"]),
    ("matmul, bias and gelu", "columns"): (["btn/c"], ["cn/b", "n/b"]),
}


@pytest.mark.parametrize(
    "op, split, kind",
    [(*case, AxisType.Auto) for case in EXPECTED]
    + [(*case, AxisType.Explicit) for case in EXPECTED if "options" not in case[0]],
    ids=str,
)
def test_collectives(op, split, kind, on_gpu):
    """The reductions of a few values a row and of parameter gradients, each once, and nothing else."""
    case, splits = transformations.OPS[op], {"rows": ROWS, "columns": COLUMNS}[split]
    mesh = transformations.make_mesh(kind)
    local = {a: d // mesh.shape.get(splits.get(a), 1) for a, d in SIZES.items()}

    def sizes(words):
        for axes, over in (word.split("/") for word in words):
            if math.prod(mesh.shape[splits[a]] for a in over if a in splits) > 1:
                times, axes = (int(axes[0]), axes[1:]) if axes[0].isdigit() else (1, axes)
                yield times * math.prod(local[a] for a in axes)

    def gradients(*xs):
        total = lambda *xs: jnp.sum(transformations.bend(case.ours(*xs)))  # noqa: E731
        return jax.value_and_grad(total, transformations.every(xs))(*xs)

    # The programs do not run.
    options = {} if on_gpu else {"xla_backend_optimization_level": 0}
    with jax.set_mesh(mesh):
        xs = transformations.place(case.operands(), case.axes, mesh, splits)
        forward, backward = (collectives(jax.jit(f).lower(*xs).compile(options)) for f in (case.ours, gradients))
    before, besides = EXPECTED[op, split]
    for found, words in ((forward, before), (backward, before + besides)):
        wanted = Counter(("all-reduce", d) for d in sizes(words))
        if on_gpu:  # which XLA joins, and the scalars with them: the sum itself, and the gradient of a scale
            assert set(by_kind(found)) <= {"all-reduce"}
            assert 0 <= by_kind(found).get("all-reduce", 0) - by_kind(wanted).get("all-reduce", 0) <= 8
        else:
            found.pop(("all-reduce", 1), None)
            assert found == wanted


@pytest.mark.parametrize("kind", BOTH, ids=str)
def test_split_results_of_matmul(kind, rng):
    """Split n stays local. A sum over split k whose result is wanted split is scattered at once."""
    mesh = transformations.make_mesh(kind)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 4, 16), (16, 8)))
    wanted = np.maximum(a @ b + 1, 0)

    def dense(a, b):
        return jaxops.matmul(a, b, precision="highest", bias=jnp.ones(8), activation="relu")

    def run(f, a_spec, b_spec):
        compiled = (
            jax.jit(f)
            .lower(jax.device_put(a, NamedSharding(mesh, a_spec)), jax.device_put(b, NamedSharding(mesh, b_spec)))
            .compile()
        )
        out = compiled(jax.device_put(a, NamedSharding(mesh, a_spec)), jax.device_put(b, NamedSharding(mesh, b_spec)))
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
        return out.sharding.spec, collectives(compiled)

    def equivalent(spec, wanted):
        return NamedSharding(mesh, spec).is_equivalent_to(NamedSharding(mesh, wanted), 3)

    with jax.set_mesh(mesh):
        spec, found = run(dense, P("data"), P(None, "model"))
        assert equivalent(spec, P("data", None, "model")) and not found
        spec, found = run(dense, P("data", None, "model"), P("model"))
        rows = 8 // mesh.shape["data"] * 4
        assert by_kind(found) == {"all-reduce": rows * 8}
        if kind == AxisType.Auto:
            for split in (P("data", "model"), P("data", None, "model")):
                scattered = lambda a, b, split=split: jax.lax.with_sharding_constraint(dense(a, b), split)  # noqa: E731
                spec, found = run(scattered, P("data", None, "model"), P("model"))
                assert equivalent(spec, split) and by_kind(found) == {"reduce-scatter": rows * 8 // mesh.shape["model"]}


def test_causal_over_split_queries(rng):
    """Every device masks by the positions of its own queries."""
    mesh = transformations.make_mesh()
    x = rng.standard_normal((2, 8, 8)).astype(np.float32)
    for op in (jaxops.softmax, jaxops.log_softmax):
        for spec in (P(None, "data"), P(None, "data", "model"), P(None, "model", "data")):
            f = jax.jit(lambda x, op=op: jax.vjp(lambda x: op(x, causal=True), x)[1](jnp.tril(jnp.cos(x)))[0])
            with jax.set_mesh(mesh):
                got = f(jax.device_put(x, NamedSharding(mesh, spec)))
            np.testing.assert_allclose(got, f(x), rtol=1e-5, atol=1e-6)


def test_axes_that_do_not_divide(rng):
    """An axis whose size is no multiple of the devices is not split: slower, and right."""
    mesh = transformations.make_mesh()
    x, scale = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((7, 9), (9,)))
    gradients = jax.grad(lambda x, s: jnp.sum(jnp.sin(jaxops.layer_norm(x, s))), (0, 1))
    for spec in (P("data"), P(None, "data")):
        constrained = lambda x, s, spec=spec: gradients(  # noqa: E731
            jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), s
        )
        for got, wanted in zip(jax.jit(constrained)(x, scale), gradients(x, scale), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_float64(rng, x64):
    """The mode is the caller's, wherever XLA partitions the program."""
    mesh = transformations.make_mesh()
    x = jnp.asarray(rng.standard_normal((8, 16)))
    split = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
    np.testing.assert_allclose(jax.jit(jaxops.softmax)(split), jax.nn.softmax(x), rtol=1e-14)


@pytest.mark.parametrize("manual, free", [("data", "model"), ("model", "data")])
def test_shard_map_over_a_part_of_the_mesh(manual, free, rng):
    """Over the other axes the compiler splits as it does outside: rows stay split, columns cost a few sums."""
    mesh = transformations.make_mesh(first=free)
    x, scale = rng.standard_normal((8, 8, 16)).astype(np.float32), rng.standard_normal(16).astype(np.float32)

    def function(x, scale):
        return jax.vjp(lambda x: jaxops.softmax(jaxops.layer_norm(x, scale)), x)[1](jnp.cos(x))[0]

    rows = P(manual)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(rows, P()), out_specs=rows, axis_names={manual})
    row_values = 8 // mesh.shape[manual] * 8
    # Forward the statistics, mean and variance, maximum and sum; backward a sum, and two for the norm.
    for spec, sums in ((P(manual, free), []), (P(manual, None, free), [row_values] * 5 + [2 * row_values])):
        with jax.set_mesh(mesh):
            split = jax.device_put(x, NamedSharding(mesh, spec))
            compiled = jax.jit(mapped).lower(split, scale).compile()
            np.testing.assert_allclose(compiled(split, scale), function(x, scale), rtol=1e-4, atol=1e-5)
        found = by_kind(collectives(compiled))
        wanted = sum(sums) if mesh.shape[free] > 1 else 0
        assert found.get("all-reduce", 0) == wanted and set(found) <= {"all-reduce"}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("Auto", "with"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(("Auto", "Explicit"), manual_axes.WAYS)
            if case != ("Auto", "with") and not (case[0] == "Explicit" and case[1] in ("nothing", "with"))
        ),
    ],
)
def test_every_shard_map_with_every_mesh(kind, way):
    """Each in a separate process, because a fault may end it."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    script = [sys.executable, manual_axes.__file__, kind, way]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "20 cases\n", done.stderr


def test_parts_of_mesh_axes(rng):
    """A reshape leaves a part of a mesh axis to each of two axes."""
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x = rng.standard_normal((32, 16)).astype(np.float32)

    def function(op, x):
        y = op(jnp.moveaxis(jnp.reshape(x, (2, 16, 16)), 0, 1), axis=(1, 2))
        return jnp.reshape(jnp.moveaxis(y, 0, 1), x.shape)

    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P("data")))
        compiled = jax.jit(lambda x: function(jaxops.softmax, x)).lower(split).compile()
        np.testing.assert_allclose(compiled(split), function(jax.nn.softmax, x), rtol=1e-5, atol=1e-6)
    assert set(by_kind(collectives(compiled))) == {"all-reduce"}


def test_reduced_operands(rng, fallback):
    """A weight whose gradient is not to be summed yet: as in jax.numpy, on XLA."""
    mesh = transformations.make_mesh(AxisType.Explicit)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 16), (16, 4)))
    with jax.set_mesh(mesh):
        x, weight = jax.reshard(x, P("data")), jax.reshard(weight, P(reduced={"data"}))
        ours, wanted = (
            jax.grad(lambda w, product=product: jnp.sin(product(x, w)).sum())(weight)
            for product in (jaxops.matmul, jnp.matmul)
        )
        assert jax.typeof(ours) == jax.typeof(wanted) and jax.typeof(ours).sharding.spec.unreduced == {"data"}
        np.testing.assert_allclose(*(jax.reshard(g, P()) for g in (ours, wanted)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["softmax", "layer_norm"])
@pytest.mark.filterwarnings("ignore::jaxops.FallbackWarning")
def test_unreduced_operands(op):
    """JAX refuses what is not linear in them."""
    mesh = transformations.make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):

        @jax.shard_map(in_specs=P("data"), out_specs=P(None, unreduced={"data"}))
        def function(x):
            return getattr(jaxops, op)(jax.lax.pcast(x, "data", to="unreduced"))

        with pytest.raises((ValueError, NotImplementedError)):
            function(jax.reshard(jnp.ones((8, 16)), P("data")))


@pytest.mark.parametrize("op, shape", [("matmul", (16, 4)), ("rms_norm", (16,))])
def test_parameters_that_are_not_on_the_mesh(op, shape):
    """Beside operands that are: their gradients are whole, also twice."""
    mesh, parameter = transformations.make_mesh(AxisType.Explicit), jnp.ones(shape)
    with jax.set_mesh(mesh):
        x = jax.reshard(jnp.ones((8, 16)), P(None, "data"))
        gradient = jax.grad(lambda p: jnp.sum(getattr(jaxops, op)(x, p) ** 2))
        assert not any(jax.typeof(jax.jit(gradient)(parameter)).sharding.spec)
        twice = jax.jit(jax.grad(lambda p: jnp.sum(gradient(p) ** 2)))(parameter)
        step, _ = jax.jit(lambda p: jax.lax.scan(lambda p, _: (p - gradient(p), None), p, None, length=2))(parameter)
    assert twice.shape == step.shape == shape


def test_operands_split_differently():
    mesh = transformations.make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, residual = (
            jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, spec)) for spec in (P("data"), P("model"))
        )
        with pytest.raises(TypeError, match=r"layer_norm_fwd: one axis of its operands is sharded over .* and"):
            jaxops.layer_norm(x, residual=residual)


def plain_matmul(a, b, bias, activation):
    z = jnp.matmul(a, b, precision="highest")
    z = z if bias is None else z + bias
    return z if activation is None else jax.nn.silu(z)


def our_matmul(a, b, bias, activation):
    return jaxops.matmul(a, b, precision="highest", bias=bias, activation=activation)


def plain_layer_norm(x, scale, bias):
    deviations = x - jnp.mean(x, -1, keepdims=True)
    return deviations * jax.lax.rsqrt(jnp.mean(jnp.square(deviations), -1, keepdims=True) + 1e-6) * scale + bias


def our_layer_norm(x, scale, bias):
    return jaxops.layer_norm(x, scale, bias, epsilon=1e-6)


def same_on_explicit_mesh(function, implementations, shapes, specs, rng):
    """function(f, *operands) has the same types and values with either implementation as f: ours, the reference."""
    mesh = transformations.make_mesh(AxisType.Explicit)
    xs = [np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]
    with jax.set_mesh(mesh):
        xs = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs, strict=True)]
        both = jax.jit(lambda *xs: [jax.tree.leaves(function(f, *xs)) for f in implementations])
        got, wanted = both(*xs)
        for ours, reference in zip(got, wanted, strict=True):
            assert jax.typeof(ours) == jax.typeof(reference)
            if reference.size:  # jax 0.10.0 cannot fetch a split array without elements
                np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)


def total(g):
    return lambda x: jnp.sum(transformations.bend(g(x)))


DERIVATIVES = {
    "jvp": lambda g, x: jax.jvp(g, (x,), (x,)),
    "linearize": lambda g, x: jax.linearize(g, x)[1](x),
    "vjp": lambda g, x: jax.vjp(g, x)[1](jnp.cos(g(x))),
    "jacfwd": lambda g, x: jax.jacfwd(g)(x),
    "jacrev": lambda g, x: jax.jacrev(g)(x),
    "jvp of grad": lambda g, x: jax.jvp(jax.grad(total(g)), (x,), (x,)),
    "grad of grad": lambda g, x: jax.grad(total(jax.grad(total(g))))(x),
}


@pytest.mark.parametrize("how", DERIVATIVES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_types_of_derivatives_in_the_bias(activation, how, rng):
    """Also where the bias alone varies, which is not split."""

    def derivative(f, a, b, bias):
        return DERIVATIVES[how](lambda bias: f(a, b, bias, activation), bias)

    shapes, specs = ((8, 16), (16, 8), (8,)), (P("data", None), P(None, "model"), P())
    same_on_explicit_mesh(derivative, (our_matmul, plain_matmul), shapes, specs, rng)


@pytest.mark.parametrize("how", ["jvp", "vjp"])
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_types_of_derivatives_where_a_bias_splits_the_result(argument, how, rng):
    """The tangents are split like the result, even if the bias has no part in them."""

    def derivative(f, *xs):
        g = lambda x: f(*xs[:argument], x, *xs[argument + 1 :])  # noqa: E731
        return DERIVATIVES[how](g, xs[argument])

    specs = (P("data", None), P(), P("model"))
    same_on_explicit_mesh(derivative, (our_layer_norm, plain_layer_norm), ((8, 16), (16,), (16,)), specs, rng)
    dense = [lambda a, b, bias, f=f: f(a, b, bias, None) for f in (our_matmul, plain_matmul)]
    same_on_explicit_mesh(derivative, dense, ((8, 16), (16, 8), (8,)), specs, rng)


@pytest.mark.parametrize(
    "shape, a_spec, b_spec",
    [
        ((8, 16), P("data", None), P("data", None)),
        ((8, 16), P("data", None), P("data", "model")),
        ((8, 16), P(None, "data"), P(None, "data")),
        ((8, 16), P("data", "model"), P(None, "model")),
        ((8, 4, 16), P("data"), P("data", None)),
    ],
    ids=str,
)
def test_contracted_axes_that_clash(shape, a_spec, b_spec, rng):
    """An axis that is contracted is gathered where the result is split over its mesh axis: as jax.numpy, FSDP's."""

    def results(f, a, b):
        return f(a, b, None, None), jax.grad(lambda a, b: jnp.sum(transformations.bend(f(a, b, None, None))), (0, 1))(
            a, b
        )

    same_on_explicit_mesh(results, (our_matmul, plain_matmul), (shape, (16, 8)), (a_spec, b_spec), rng)


def test_results_that_clash():
    mesh = transformations.make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        a, b = (
            jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, s)) for s in (P("data"), P(None, "data"))
        )
        for function in (lambda: jaxops.matmul(a, b), lambda: jaxops.rms_norm(a, b[0])):
            with pytest.raises(TypeError, match="sharded over one mesh axis twice"):
                function()


@pytest.mark.parametrize(
    "shape, spec",
    [((0, 8, 16), P(None, "data", None)), ((8, 0, 8, 16), P("data")), ((8, 8, 0), P("data", "model", None))],
    ids=str,
)
def test_types_without_elements(shape, spec, rng):
    def results(f, a, b):
        g = lambda a, b: f(a, b, None, None)  # noqa: E731
        return g(a, b), jax.jit(g)(a, b), jax.grad(lambda a, b: jnp.sum(g(a, b)), (0, 1))(a, b)

    same_on_explicit_mesh(results, (our_matmul, plain_matmul), (shape, (shape[-1], 4)), (spec, P()), rng)


@pytest.mark.parametrize("axes", [("data", "model"), ("data",), ("model",)], ids=["FSDP and TP", "FSDP", "TP"])
def test_transformer_layer(axes, rng):
    """The same loss and parameters as with plain jax.nn after a step of training, and no more communication."""
    if len(axes) == 2 and len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    mesh = transformations.make_mesh(first="data" if "data" in axes else "model")
    params = transformer.parameters(64, 8, 128)
    x, targets = rng.standard_normal((8, 16, 64)).astype(np.float32), rng.integers(0, 128, (8, 16))
    shardings = {
        name: NamedSharding(mesh, P(*(a if a in axes else None for a in spec)))
        for name, spec in transformer.SPECS.items()
    }
    rows = NamedSharding(mesh, P("data"))

    def train(ops):
        def step(params, x, targets):
            value, gradients = jax.value_and_grad(lambda p: transformer.loss(ops, p, x, targets))(params)
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

        with jax.set_mesh(mesh):
            operands = jax.device_put(params, shardings), jax.device_put(x, rows), jax.device_put(targets, rows)
            compiled = jax.jit(step, out_shardings=(None, shardings)).lower(*operands).compile()
            return compiled(*operands), collectives(compiled)

    with jax.default_matmul_precision("highest"):
        (ours, found), (plain, found_plain) = train(transformer.OURS), train(transformer.PLAIN)
    for got, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    # If each device uses only its part of an all-reduce, XLA turns it into a reduce-scatter on some platforms.
    got, wanted = by_kind(found), by_kind(found_plain)
    assert set(got) <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert got.get("all-gather", 0) <= wanted.get("all-gather", 0)
    reduced = lambda kinds: kinds.get("all-reduce", 0) + kinds.get("reduce-scatter", 0)  # noqa: E731
    assert reduced(got) <= reduced(wanted)
    assert ("reduce-scatter" in got) == ("data" in axes)

"""fuse: what it finds, that it changes neither values nor derivatives, and that JAX's transformations still work."""

import functools
import re

import fuse_mutations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import fuse_cases

import jaxops
from jaxops._fuse import _cone
from jaxops._fuse._arithmetic import Dual
from jaxops._fuse._graph import Graph

QUICK = fuse_mutations.QUICK

pytestmark = pytest.mark.usefixtures("full_precision")


def operands(rng, shapes, dtype="float32"):
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def everything(f, args, tangents, cotangent):
    """Value, gradients and tangent."""
    y, vjp = jax.vjp(f, *args)
    return y, vjp(cotangent.astype(y.dtype)), jax.jvp(f, args, tangents)[1]


def assert_alike(f, fused, args, rng, tolerance=2e-5):
    """Values and both derivatives of two functions, compiled."""
    out = jax.eval_shape(f, *args)
    tangents = operands(rng, [x.shape for x in args], args[0].dtype)
    (cotangent,) = operands(rng, [out.shape])
    given = (args, tangents, cotangent)
    got, wanted = (jax.jit(functools.partial(everything, g), compiler_options=QUICK)(*given) for g in (fused, f))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max(initial=0)))


@pytest.mark.parametrize("name", fuse_cases.SPELLINGS)
def test_finds_spellings(name, rng):
    """Each is found; value and gradients are those of the original in float64, along random directions."""
    function, shapes, counts = fuse_cases.SPELLINGS[name]
    args, tangents, reports = operands(rng, shapes), operands(rng, shapes), []
    fused = jaxops.fuse(function, report=reports.append)
    jaxpr = jax.make_jaxpr(function)(*args)
    graph = Graph(jaxpr.jaxpr, jaxpr.consts)
    wide = [Dual(*(np.asarray(x, np.float64) for x in pair)) for pair in zip(args, tangents, strict=True)]
    wanted = fuse_mutations.run(graph, wide, {})
    (cotangent,) = operands(rng, [wanted.shape])

    @functools.partial(jax.jit, compiler_options=QUICK)
    def value_and_slope(args, tangents, cotangent):
        y, vjp = jax.vjp(fused, *args)
        return y, sum(jnp.sum(g * t) for g, t in zip(vjp(cotangent), tangents, strict=True))

    value, slope = value_and_slope(args, tangents, cotangent)
    np.testing.assert_allclose(value, wanted.value, rtol=0, atol=2e-5 * max(1, np.abs(wanted.value).max()))
    along = np.asarray(cotangent, np.float64) * wanted.tangent
    np.testing.assert_allclose(slope, along.sum(), rtol=0, atol=4e-5 * max(1, np.abs(along).sum()))
    assert value.dtype == jaxpr.out_avals[0].dtype
    assert reports[0].counts == counts, str(reports[0])


@pytest.mark.parametrize("name", fuse_cases.DECEPTIONS)
def test_is_not_deceived(name, rng):
    function, shapes, counts = fuse_cases.DECEPTIONS[name]
    reports = []
    jaxpr = jax.make_jaxpr(jaxops.fuse(function, only=counts, report=reports.append))(*operands(rng, shapes))
    assert not reports[0].replaced and "jaxops" not in str(jaxpr), str(reports[0])


@pytest.mark.parametrize(
    "name",
    [
        "rms_divided_by_sqrt",
        "rms_wide_inside",
        "layer_fast",
        "softmax_wide_inside",
        "attention_of_scaled_queries",
        "epilogue_wide_inside",
        "gated_silu",
        "gated_whole",
        "linear_loss_weighted",
    ],
)
def test_sixteen_bits(name, rng):
    function, shapes, counts = fuse_cases.SPELLINGS[name]
    args, reports = operands(rng, shapes, jnp.bfloat16), []
    fused = jaxops.fuse(function, report=reports.append)
    assert_alike(function, fused, args, rng, tolerance=4e-2)
    assert reports[0].counts == counts
    assert all("f32" not in operand for found in reports[0].replaced for operand in found.operands)


def test_sums_that_norms_take():
    """One kernel adds and normalises, if both terms are in memory anyway."""

    def rms(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def notes(f):
        reports = []
        text = str(jax.make_jaxpr(jaxops.fuse(f, report=reports.append))(*[jnp.ones((8, 8))] * 3))
        assert text.count("jaxops_rms_norm_fwd[") == reports[0].counts["rms_norm"]
        return [found.note for found in reports[0].replaced if found.op == "rms_norm"]

    assert notes(lambda x, y, w: rms(x + y @ w, 1)) == ["with residual"]
    assert notes(lambda x, y, w: (x + y) * rms(x + y, w[0])) == ["with scale and residual"]
    assert notes(lambda x, y, w: rms(x + 2 * y, 1)) == [""]  # XLA multiplies and adds in one pass
    assert notes(lambda x, y, w: rms(x + w[0], 1)) == [""]
    assert notes(lambda x, y, w: rms(x + x, 1)) == [""]

    def each_needs_the_others_sum(x, y, w):
        a, b = x + y, x + w
        return rms(a, b.sum(0)) + rms(b, a.sum(0))

    assert notes(each_needs_the_others_sum) == ["with scale"] * 2

    def after_a_callback(x, y, w):
        total = x + y
        jax.debug.callback(lambda _: None, total, ordered=True)
        scale = jax.pure_callback(lambda a: np.asarray(a), jax.ShapeDtypeStruct((8,), x.dtype), w[0])
        return total + rms(total, scale)

    assert notes(after_a_callback) == ["with scale and residual"]


SCALE, W = np.linspace(0.5, 1.5, 8, dtype=np.float32), np.eye(8, dtype=np.float32) + 0.1


def layer(x, w=W, scale=SCALE):
    """A norm, a product, a softmax."""
    normed = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    return x + jax.nn.softmax(normed @ w)


FOUND = {"rms_norm": 1, "softmax": 1, "dot_general": 1}


def stacked(body, x):
    return lax.scan(lambda x, w: (body(x, w), None), x, jnp.stack([W, 2 * W, 3 * W]))[0]


def looped(x):
    return lax.while_loop(lambda state: state[0] < 3, lambda state: (state[0] + 1, layer(state[1])), (0, x))[1]


def conditional(x):
    return lax.cond(x[0, 0] > 0, layer, lambda x: x, x)


INNER = {
    "jit": jax.jit(lambda x: layer(layer(x))),
    "scan": functools.partial(stacked, layer),
    "cond": conditional,
    "remat": jax.checkpoint(layer),
    "scan of remat": functools.partial(stacked, jax.checkpoint(layer)),
    "vmap": lambda x: jax.vmap(layer, 1, 1)(jnp.stack([x, 2 * x], 1)),
    "named_call": jax.named_call(layer, name="block"),
}


@pytest.mark.parametrize("name", INNER)
def test_inner_programs(name, rng):
    reports = []
    fused = jaxops.fuse(INNER[name], report=reports.append)
    assert_alike(INNER[name], fused, operands(rng, [(4, 8)]), rng)
    times = 2 if name == "jit" else 1
    assert reports[0].counts == {op: times * n for op, n in FOUND.items()}
    assert {found.times for found in reports[0].replaced} == {3 if "scan" in name else 1}


def test_while_loop(rng):
    reports, (x,) = [], operands(rng, [(4, 8)])
    fused = jaxops.fuse(looped, report=reports.append)
    np.testing.assert_allclose(fused(x), looped(x), rtol=1e-4, atol=1e-5)
    assert reports[0].counts == FOUND and {found.times for found in reports[0].replaced} == {None}


def test_around_transformations(rng):
    """grad, vmap, jvp of grad and jit around a fused function."""
    (x,) = operands(rng, [(2, 4, 8)])
    fused = jaxops.fuse(layer)

    def loss(f, x):
        return jnp.sum(jnp.sin(f(x)))

    for around in (
        lambda f: jax.jit(jax.vmap(jax.grad(functools.partial(loss, f)))),
        lambda f: jax.jit(lambda x: jax.jvp(jax.grad(functools.partial(loss, f)), (x,), (jnp.cos(x),))[1]),
    ):
        np.testing.assert_allclose(around(fused)(x), around(layer)(x), rtol=1e-3, atol=1e-4)
    again = jaxops.fuse(fused)
    np.testing.assert_allclose(again(x), fused(x), rtol=1e-6)


def test_structures_and_options(rng):
    """Arguments and results of any structure; what is no array stays what it is, in and out."""
    (x,) = operands(rng, [(4, 8)])

    def f(state, *, axis, name, scale=2.0, function=jnp.sin):
        assert isinstance(axis, int) and isinstance(scale, float) and name == "a"
        return {"y": jax.nn.softmax(function(state["x"]) * scale, axis), "name": name, "n": 3, "none": None}

    reports = []
    got = jaxops.fuse(f, report=reports.append)({"x": x}, axis=0, name="a")
    wanted = f({"x": x}, axis=0, name="a")
    assert got["name"] == "a" and got["n"] == 3 and got["none"] is None
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-5)
    assert reports[0].counts == {"softmax": 1}


def test_closed_over_arrays_are_differentiated(rng):
    (x, w) = operands(rng, [(4, 8), (8, 8)])

    def loss(transform, w):
        return jnp.sum(jnp.square(transform(lambda x: layer(x, w))(x)))

    got, wanted = (jax.grad(functools.partial(loss, t))(w) for t in (jaxops.fuse, lambda f: f))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_effects_stay_in_order():
    """Callbacks run, as often and in the order in which they are written."""
    seen = []

    def f(x):
        jax.debug.callback(lambda y: seen.append(("in", float(y))), x.sum(), ordered=True)
        y = jax.nn.softmax(x)
        jax.debug.callback(lambda y: seen.append(("out", float(y))), y.sum(), ordered=True)
        jax.nn.softmax(2 * x)  # dead
        return lax.scan(lambda c, _: (c + _told(c), None), y, None, length=2)[0]

    def _told(c):
        jax.debug.callback(lambda: seen.append(("scan", 0.0)), ordered=True)
        return jax.nn.softmax(c)

    reports = []
    fused = jaxops.fuse(f, report=reports.append)
    jax.block_until_ready(jax.jit(fused)(jnp.ones((1, 4))))
    jax.effects_barrier()
    assert [name for name, _ in seen] == ["in", "out", "scan", "scan"]
    assert reports[0].counts == {"softmax": 2}


def test_scopes_and_source_lines():
    def f(x):
        with jax.named_scope("head"):
            return jax.nn.softmax(x)

    reports = []
    text = jax.jit(jaxops.fuse(f, report=reports.append)).lower(jnp.ones((2, 4))).as_text(debug_info=True)
    assert re.search(r"head/jaxops_softmax_fwd|head.*softmax", text)
    (found,) = reports[0].replaced
    assert found.scope == "head" and "test_fuse.py" in found.line


def test_jit_boundaries_are_kept():
    """A layer that is jitted and called three times stays one function, of the same name."""
    block = jax.jit(layer)
    block.__name__ = "block"

    def f(x):
        return block(block(block(x)))

    def functions(f):
        return len(re.findall(r"func\.func private @layer", jax.jit(f).lower(jnp.ones((4, 8))).as_text()))

    reports = []
    assert functions(f) == functions(jaxops.fuse(f, report=reports.append)) == 1
    assert reports[0].counts == {op: 3 * n for op, n in FOUND.items()}


def test_compiles_once_outside_of_jit(rng):
    """A jitted function inside is traced and compiled once, however often the fused one is called."""
    traced = []

    @jax.jit
    def block(x):
        traced.append(1)
        return layer(x)

    (x,) = operands(rng, [(4, 8)])
    fused = jaxops.fuse(lambda x: block(x))
    fused(x)
    with jax.log_compiles(), _no_compilation():
        fused(x)
    assert len(traced) == 1


class _no_compilation:  # noqa: N801 (a context manager)
    def __enter__(self):
        import logging

        self.records = []
        self.handler = logging.Handler()
        self.handler.emit = self.records.append
        self.loggers = [logging.getLogger(n) for n in ("jax._src.interpreters.pxla", "jax._src.dispatch")]
        for logger in self.loggers:
            logger.addHandler(self.handler)

    def __exit__(self, *_):
        for logger in self.loggers:
            logger.removeHandler(self.handler)
        assert not [r for r in self.records if "Compiling" in r.getMessage() and "layer" in r.getMessage()]


def test_donation_inside(rng):
    """An argument that a jitted function inside donates is donated still."""
    inner = jax.jit(lambda x: layer(x), donate_argnums=0)
    text = jax.jit(jaxops.fuse(lambda x: inner(x))).lower(jnp.ones((4, 8))).as_text()
    assert "jaxops.rms_norm_fwd" in text
    fused = jaxops.fuse(inner)
    (x,) = operands(rng, [(4, 8)])
    fused(x)
    assert x.is_deleted()


def test_policies_keep_their_meaning():
    """A policy that saves products saves those of jaxops; one that saves names saves the named alone."""

    def block(x, w):
        return jnp.sin(checkpoint_name(jnp.sin(x @ w), "hidden") @ w)

    def saved(transform, policy):
        f = transform(jax.checkpoint(block, policy=policy))
        text = str(jax.make_jaxpr(lambda x, w: jax.vjp(f, x, w)[1](x))(jnp.ones((8, 8)), jnp.ones((8, 8))))
        return len(re.findall(r"= (?:jaxops_matmul|dot_general)\[", text))

    policies = jax.checkpoint_policies
    for policy in (
        None,
        policies.dots_saveable,
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names("hidden"),
        policies.everything_saveable,
    ):
        plain, fused = (saved(t, policy) for t in (lambda f: f, jaxops.fuse))
        assert plain == fused, policy
    assert saved(jaxops.fuse, policies.dots_saveable) < saved(jaxops.fuse, None)


def test_policy_of_products_with_batches():
    """dots_with_no_batch_dims_saveable sees which products have batches."""
    seen = []

    def policy(primitive, *operands, **params):
        if primitive is lax.dot_general_p:
            seen.append((params["dimension_numbers"], [x.shape for x in operands]))
        return False

    def f(x, y, w):
        return jnp.einsum("bij,bkj->bik", x, y) + jnp.einsum("bij,jk->bik", x, w)

    shapes = [(2, 3, 4), (2, 5, 4), (4, 5)]
    args = [jnp.ones(shape) for shape in shapes]
    jax.linearize(jaxops.fuse(jax.checkpoint(f, policy=policy)), *args)
    batches = sorted({numbers[1] for numbers, _ in seen})
    assert batches == [((), ()), ((0,), (0,))]


@jax.custom_jvp
def with_rule(x):
    return jax.nn.softmax(x)


with_rule.defjvp(lambda primals, tangents: (with_rule(primals[0]), 7.0 * tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return jax.nn.softmax(x)


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, g: (5.0 * g,))


@pytest.mark.parametrize(("function", "factor"), [(with_rule, 7.0), (with_vjp, 5.0)])
def test_own_derivatives_stay(function, factor, rng):
    """A user's derivative is the user's; what runs without differentiation is fused."""
    (x,) = operands(rng, [(2, 4)])
    reports = []
    fused = jaxops.fuse(lambda x: function(x), report=reports.append)
    np.testing.assert_allclose(fused(x), jax.nn.softmax(x), rtol=1e-5)
    assert reports[0].counts == {"softmax": 1}
    _, vjp = jax.vjp(fused, x)
    np.testing.assert_allclose(vjp(jnp.ones_like(x))[0], factor, rtol=1e-6)


def test_own_derivative_around_a_part(rng):
    """A rule of the user's in the middle of what would be a norm."""

    @jax.custom_jvp
    def root(x):
        return lax.rsqrt(x)

    root.defjvp(lambda primals, tangents: (root(primals[0]), 3.0 * tangents[0]))

    def f(x):
        return x * root(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    reports = []
    assert_alike(f, jaxops.fuse(f, report=reports.append), operands(rng, [(3, 8)]), rng)
    assert not reports[0].replaced


@pytest.mark.skipif(len(jax.devices()) < 8, reason="eight devices")
class TestSharding:
    """Operands split over devices stay where they are."""

    def mesh(self, kind="Auto"):
        return jax.make_mesh((4, 2), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)

    def test_auto(self, rng):
        mesh, (x,) = self.mesh(), operands(rng, [(8, 8)])
        split = NamedSharding(mesh, P("data", None))

        def f(x):
            return layer(lax.with_sharding_constraint(layer(x), split))

        fused = jax.jit(jaxops.fuse(f), in_shardings=split, out_shardings=split)
        np.testing.assert_allclose(fused(x), f(x), rtol=1e-4, atol=1e-5)
        assert "all-gather" not in fused.lower(x).compile().as_text()

    def test_explicit(self, rng):
        mesh, (x,) = self.mesh("Explicit"), operands(rng, [(8, 8)])
        with jax.set_mesh(mesh):
            split = jax.device_put(x, NamedSharding(mesh, P("data", None)))

            def f(x):
                return lax.scan(lambda x, _: (layer(x), None), jax.jit(layer)(x), None, length=2)[0]

            got = jax.jit(jaxops.fuse(f))(split)
            assert jax.typeof(got).sharding.spec == P("data", None)
            np.testing.assert_allclose(got, f(x), rtol=1e-4, atol=1e-5)

    def test_shard_map(self, rng):
        mesh, (x,) = self.mesh(), operands(rng, [(8, 8)])

        def f(x):
            body = jax.shard_map(
                lambda x: lax.psum(layer(x).sum(0), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
            )
            return body(x)

        reports = []
        fused = jaxops.fuse(f, report=reports.append)
        got, wanted = (jax.jit(jax.value_and_grad(lambda x, f=f: f(x).sum()))(x) for f in (fused, f))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), got, wanted)
        assert reports[0].counts == FOUND


def test_only_and_report(rng):
    (x,) = operands(rng, [(4, 8)])
    for only, counts in (("softmax", {"softmax": 1}), (["rms_norm", "dot_general"], {"rms_norm": 1, "dot_general": 1})):
        reports = []
        np.testing.assert_allclose(jaxops.fuse(layer, only=only, report=reports.append)(x), layer(x), rtol=1e-4)
        assert reports[0].counts == counts
    reports = []
    jaxops.fuse(functools.partial(stacked, layer), report=reports.append)(x)
    (report,) = reports
    assert report.flops == (3 * 2 * 4 * 8 * 8,) * 2
    assert 0.6 * report.bytes[1] < report.bytes[0] < report.bytes[1]
    assert "3" in str(report) and "rms_norm" in str(report)


def test_halves_of_gated_mlps():
    """Without gated_mlp among the ops, the first half and the product with w_down are found one by one."""
    function, shapes, _ = fuse_cases.SPELLINGS["gated_whole"]
    reports = []
    for only in (["gated_matmul", "dot_general"], ["gated_mlp"], ["gated_matmul"]):
        jax.make_jaxpr(jaxops.fuse(function, only=only, report=reports.append))(*[jnp.ones(s) for s in shapes])
    counts = [report.counts for report in reports]
    assert counts == [{"gated_matmul": 1, "dot_general": 1}, {"gated_mlp": 1}, {"gated_matmul": 1}]
    assert reports[1].flops == (reports[0].flops[1],) * 2


def test_layers_that_round_one_input(rng):
    """Each layer rounds the norm's f32 result itself. That is done once; a parameter's casts stay."""

    def mlp(x, scale, gate, up, down):
        h = fuse_cases.rms_divided_by_sqrt(x.astype(jnp.bfloat16), scale)
        gate, up = (h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16) for w in (gate, up))
        return (up * jax.nn.silu(gate)) @ down.astype(jnp.bfloat16)

    args, reports = operands(rng, [(6, 8), (8,), (8, 4), (8, 4), (4, 8)]), []
    fused = jaxops.fuse(mlp, report=reports.append)
    assert_alike(mlp, fused, args, rng, 0.03)
    assert reports[0].counts == {"rms_norm": 1, "gated_mlp": 1}

    def twice(h, dtype):
        return (h.astype(dtype) * 3).sum() + (h.astype(dtype) ** 2).sum()

    for of, dtype, saved in (
        (lambda w: w, "bfloat16", 0),
        (lambda w: w[0], "bfloat16", 0),
        (lambda w: w.T, "bfloat16", 0),
        (jnp.sin, "bfloat16", 1),
        (jnp.sin, "float16", 0),  # added in float16, gradients might overflow
    ):

        def plain(w, of=of, dtype=dtype):
            return twice(of(w), dtype)

        casts = [str(jax.make_jaxpr(f)(args[2])).count(f"new_dtype={dtype}") for f in (plain, jaxops.fuse(plain))]
        assert casts[0] - casts[1] == saved


def test_near_misses_say_why():
    def f(x):
        e = jnp.exp(x - x.max(-1, keepdims=True))
        y = e / e.sum(-1, keepdims=True) + e
        return y * lax.stop_gradient(lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6))

    reports = []
    jaxops.fuse(f, report=reports.append)(jnp.ones((2, 4)))
    misses = {miss.what: miss for miss in reports[0].near_misses}
    assert misses["a softmax"].why == "the result of its exp is used elsewhere too"
    assert "derivative" in misses["a norm"].why
    assert all("test_fuse.py" in miss.line for miss in misses.values())
    assert "near misses" in str(reports[0])


def test_bad_arguments():
    with pytest.raises(TypeError, match="fuse: f must be callable, got int"):
        jaxops.fuse(3)
    with pytest.raises(ValueError, match=r"only must name ops among .*, got 'gelu'"):
        jaxops.fuse(layer, only="gelu")
    with pytest.raises(TypeError, match="report must be callable or None, got list"):
        jaxops.fuse(layer, report=[])


@pytest.mark.parametrize("rule", fuse_mutations.RULES)
def test_mutations(rule):
    """A few of the mutations that `python tests/fuse_mutations.py` makes by the thousand."""
    assert fuse_mutations.main(["--cases", "25", "--rule", rule, "--seed", "1"]) == 0


def test_repeated_keys_are_not_copied():
    """Attention reads two heads of keys and values for six of queries; not so if the copies lie in another order."""
    for name, heads in (("repeated", 2), ("tiled", 6)):
        function, shapes, _ = fuse_cases.SPELLINGS[f"attention_of_{name}_keys"]
        reports = []
        jaxops.fuse(function, report=reports.append)(*map(jnp.ones, shapes))
        assert reports[0].replaced[0].operands == ("f32[2,6,6,8]", *[f"f32[2,5,{heads},8]"] * 2)


def _attention(mask, copies=None):
    """With a known mask [6, 6], or with two key heads that `copies` spreads for four query heads."""

    def f(q, k, v):
        k, v = (copies(x) if copies else x for x in (k, v))
        scores = fuse_cases.scores_of(q, k)
        return fuse_cases.mixed(scores if mask is None else jnp.where(mask(), scores, -1e10), v)

    return f


def _positions(move):
    """Whether a query's position, moved, is not before a key's."""
    i, j = (move(lax.broadcasted_iota(jnp.int32, (6, 6), d)) for d in (0, 1))
    return i >= j


@pytest.mark.parametrize(
    "function, heads",
    [
        (_attention(lambda: lax.reshape(fuse_cases.tril(6), (6, 6), dimensions=(1, 0))), 4),
        (_attention(lambda: _positions(lambda i: lax.div(i, 2))), 4),
        (_attention(lambda: _positions(lambda i: (i + 256).astype(jnp.bfloat16))), 4),
        (_attention(lambda: _positions(lambda i: i + jnp.int32(2**31 - 3))), 4),
        (
            _attention(
                None,
                lambda x: lax.reshape(
                    lax.broadcast_in_dim(x, (2, 6, 2, 2, 8), (0, 1, 2, 4)), (2, 6, 4, 8), dimensions=(0, 1, 3, 2, 4)
                ),
            ),
            2,
        ),
    ],
    ids=["transposed", "divided", "rounded", "overflowing", "copies in another order"],
)
def test_what_looks_like_causality_or_repeated_heads(function, heads, rng):
    args, reports = operands(rng, [(2, 6, 4, 8), (2, 6, heads, 8), (2, 6, heads, 8)]), []
    fused = jaxops.fuse(function, report=reports.append)
    np.testing.assert_allclose(fused(*args), function(*args), rtol=1e-4, atol=1e-5)
    assert all(found.note != "causal" for found in reports[0].replaced)


@pytest.mark.parametrize(
    "mask",
    [
        lambda q, k: q & k & fuse_cases.tril(6),
        lambda q, k: jnp.swapaxes(q & k & fuse_cases.tril(6), 1, 2),
        lambda q, k: k & q,
        lambda q, k: jnp.broadcast_to(q, (2, 6, 6)) & q,
        lambda q, k: k & k[:, :, ::-1],
        lambda q, k: k & jnp.roll(q, 1, 1),
        lambda q, k: q | k,
        lambda q, k: q != k,
        lambda q, k: 1 - (q & k).astype(jnp.float32),
        lambda q, k: q.astype(jnp.float32) - k.astype(jnp.float32),
        lambda q, k: q.astype(jnp.float32) * k.astype(jnp.float32) * 0.5,
    ],
)
def test_masks_of_queries_and_keys_from_one_array(mask, rng):
    """Found or not, results and derivatives stay."""

    def function(q, k, v, lengths):
        seen = lengths > -0.3
        return fuse_cases.masked_by_numbers(q, k, v, mask(seen[:, :, None], seen[:, None, :]))

    assert_alike(function, jaxops.fuse(function), operands(rng, [*fuse_cases.HEADS, (2, 6)]), rng)


@pytest.mark.parametrize("largest, note", [(36, "causal"), (35, "with mask")])
def test_largest_known_masks(largest, note, monkeypatch, rng):
    """Repetitions along the batch do not count. A larger mask is an operand."""
    monkeypatch.setattr(_cone, "_LARGEST", largest)
    function, shapes, _ = fuse_cases.SPELLINGS["attention_causal_by_numbers"]
    reports = []
    fused = jaxops.fuse(function, report=reports.append)
    assert_alike(function, fused, operands(rng, shapes), rng)
    assert [found.note for found in reports[0].replaced] == [note]


def _flax_masks(tokens):
    """As people make them for Flax's attention, with the note of a match."""
    seen = jnp.arange(tokens.shape[1]) < jnp.array([16, 9])[:, None]
    causal, padded = linen.make_causal_mask(tokens), linen.make_attention_mask(seen, seen)
    same = linen.make_attention_mask(tokens, tokens, jnp.equal)
    return {
        "causal": (causal, "causal"),
        "causal, boolean": (linen.make_causal_mask(tokens, dtype=bool), "causal"),
        "padded": (padded, "with mask"),
        "keys padded": (linen.make_attention_mask(jnp.ones(tokens.shape), seen), "with mask"),
        "tokens": (linen.make_attention_mask(tokens > 0, tokens > 0), "with mask"),
        "segments": (same, "with mask"),
        "causal and padded": (linen.combine_masks(causal, padded), "causal, with mask"),
        "segments and causal": (linen.combine_masks(same, causal), "causal, with mask"),
    }


@pytest.mark.parametrize("name", _flax_masks(np.zeros((2, 16), np.int32)))
def test_masks_of_flax(name, rng):
    """In linen's and nnx's attention, with the masks made in the function."""
    (x,) = operands(rng, [(2, 16, 32)])
    tokens = rng.integers(0, 4, (2, 16))
    layer = linen.MultiHeadDotProductAttention(2)
    variables = layer.init(jax.random.key(0), x)
    graph, state = nnx.split(nnx.MultiHeadAttention(2, 32, decode=False, rngs=nnx.Rngs(0)))

    def in_linen(x, tokens):
        return layer.apply(variables, x, mask=_flax_masks(tokens)[name][0])

    def in_nnx(x, tokens):
        return nnx.merge(graph, state)(x, mask=_flax_masks(tokens)[name][0])

    for function in (in_linen, in_nnx):
        reports = []
        fused = jaxops.fuse(lambda x, f=function: f(x, tokens), report=reports.append)
        assert_alike(lambda x, f=function: f(x, tokens), fused, (x,), rng)
        (note,) = [found.note for found in reports[0].replaced if found.op == "dot_product_attention"]
        assert note == _flax_masks(tokens)[name][1]


@pytest.mark.parametrize(
    "name, note",
    [
        ("attention_causal_by_addition", "causal"),
        ("attention_causal_by_numbers", "causal"),
        ("attention_causal_without_padding", "causal"),
        ("attention_hiding_nothing", ""),
        ("attention_without_padding", ""),
    ],
)
def test_known_masks_are_not_read(name, note):
    function, shapes, _ = fuse_cases.SPELLINGS[name]
    reports = []
    jaxops.fuse(function, report=reports.append)(*map(jnp.ones, shapes))
    (found,) = reports[0].replaced
    assert (found.op, found.note, len(found.operands)) == ("dot_product_attention", note, 3)


def _picked(x, labels, **options):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1, **options)[:, 0]


def _by_deviation(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(jnp.maximum(x.var(-1, keepdims=True), 1e-6) + 1e-6)


def _finite_rms(x):
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return jnp.where(jnp.isfinite(y), y, 0)


@pytest.mark.parametrize(
    "function, scale",
    [
        (lambda x, w: jax.nn.relu6(x @ w), 20),
        (lambda x, w: jax.nn.relu(jnp.clip(x @ w, -6, 6)), 20),
        (lambda x, w: jax.nn.relu(lax.clamp(-0.1, x @ w, 100.0)), 200),  # relu hides the lower bound
        (lambda x, w: jax.nn.gelu(jnp.clip(x @ w, -6, 6)), 20),
        (lambda x, w: jax.nn.relu(jnp.where(x @ w > 50, 50, x @ w)), 200),
        (lambda x, w: jnp.minimum(_picked(x @ w, jnp.arange(4)), 20).mean(), 60),
        (lambda x, w: jnp.maximum(jax.nn.log_softmax(x @ w), -20), 60),
        (lambda x, w: x * lax.rsqrt(jnp.minimum(jnp.mean(x * x, -1, keepdims=True), 100) + 1e-6) @ w, 60),
        (lambda x, w: _by_deviation(x) @ w, 1e-4),
        (lambda x, w: jax.nn.relu(jnp.nan_to_num(x @ w)), np.nan),
        (lambda x, w: _finite_rms(x) @ w, np.nan),
    ],
    ids=[
        "relu6",
        "clip_relu",
        "clamp_relu",
        "clip_gelu",
        "where",
        "loss",
        "log_softmax",
        "rms",
        "deviation",
        "nan",
        "finite",
    ],
)
def test_bounds_that_no_trial_reaches(function, scale, rng):
    """They stay, however far the trials' numbers are from them."""
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 8), (8, 8)))
    x = x.at[0].set(np.nan) if np.isnan(scale) else x * scale
    fused = jaxops.fuse(function)
    np.testing.assert_allclose(fused(x, w), function(x, w), rtol=1e-4, atol=1e-5)
    if np.isnan(scale):
        return
    gradients = [jax.grad(lambda x, w, f=f: jnp.sum(f(x, w) ** 2), (0, 1))(x, w) for f in (fused, function)]
    for got, wanted in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3 * float(jnp.max(jnp.abs(wanted))))


def _shifted(x):
    """x less its rows' maxima, 0 for rows of -inf; the exponentials' sums."""
    maximum = jnp.max(x, -1, keepdims=True)
    shifted = x - jnp.where(jnp.isfinite(maximum), maximum, 0)
    return shifted, jnp.sum(jnp.exp(shifted), -1, keepdims=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.exp(_shifted(x)[0]) / (_shifted(x)[1] + 1e-9),
        lambda x: jnp.exp(_shifted(x)[0]) / jnp.maximum(_shifted(x)[1], 1e-30),
        lambda x: jnp.exp(_shifted(x)[0]) / jnp.where(_shifted(x)[1] == 0, 1, _shifted(x)[1]),
        lambda x: jnp.exp(_shifted(x)[0]) * jnp.where(_shifted(x)[1] > 0, 1 / _shifted(x)[1], 0),
        lambda x: _shifted(x)[0] - jnp.log(_shifted(x)[1] + 1e-9),
    ],
    ids=["added", "limited", "equal", "greater", "logarithm"],
)
def test_softmaxes_whose_empty_rows_are_numbers(function, rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32).at[1].set(-jnp.inf)
    np.testing.assert_allclose(jaxops.fuse(function)(x), function(x), rtol=1e-5, atol=1e-6)


def _unless_constant(x):
    variance = jnp.var(x, -1, keepdims=True)
    inverse = jnp.where(variance == 0, 0, lax.rsqrt(variance + 1e-5))
    return (x - jnp.mean(x, -1, keepdims=True)) * inverse


def _unless_zero(x):
    square = jnp.mean(x * x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.where(square > 0, square, 1) + 1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: jnp.where(x @ w == 0, -1e9, x @ w) + 1,
        lambda x, w: jax.nn.gelu(jnp.where(x @ w != 0, x @ w, 1)),
        lambda x, w: jnp.where(jnp.isinf(x @ w), 0, x @ w) + w[0],
        lambda x, w: jnp.where(jnp.isposinf(x @ w), 0, x @ w) + w[0],
        lambda x, w: _unless_constant(x) @ w,
        lambda x, w: _unless_zero(x) @ w,
    ],
    ids=["equal", "unequal", "inf", "posinf", "variance", "rms"],
)
@pytest.mark.parametrize("number", [0, np.inf])
def test_comparisons_that_no_trial_reaches(function, number, rng):
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 8), (8, 8)))
    x, w = x.at[0].set(number), jnp.abs(w)
    for transform in (lambda f: f, lambda f: jax.grad(lambda x, w: jnp.sum(jnp.tanh(f(x, w))), (0, 1))):
        got, wanted = (transform(f)(x, w) for f in (jaxops.fuse(function), function))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, wanted)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
@pytest.mark.parametrize("picked", ["one_hot", "gather"])
@pytest.mark.parametrize("columns", [256, 128])
def test_labels_of_every_dtype(picked, dtype, columns, rng):
    """A vocabulary of bytes has more columns than its labels' dtype can count."""
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((6, 8), (8, columns)))
    labels = jnp.asarray(rng.integers(0, 127, 6), dtype)

    def loss(x, w):
        logits = jax.nn.log_softmax(x @ w)
        if picked == "one_hot":
            return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, columns) * logits, -1))
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], -1))

    for transform in (lambda f: f, lambda f: jax.grad(f, (0, 1))):
        got, wanted = (transform(f)(x, w) for f in (jaxops.fuse(loss), loss))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, wanted)


@pytest.mark.parametrize("fill", [0.0, -5.0])
def test_gathers_that_fill_in_a_number(fill, rng):
    x, labels = jnp.asarray(rng.standard_normal((4, 10)), jnp.float32), jnp.array([1, 5, 100, -100])

    def loss(x):
        return jnp.sum(_picked(x, labels, mode="fill", fill_value=fill))

    for transform in (lambda f: f, jax.grad):
        np.testing.assert_allclose(transform(jaxops.fuse(loss))(x), transform(loss)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "logits, result, dropped",
    [
        ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqd", ""),
        ("bqd,bkd->bqk", "bqk,bkd->qd", "qkv"),
        ("bqhd,khd->bhqk", "bhqk,bkhd->bqhd", "k"),
        ("bqhd,bkd->bhqk", "bhqk,bkhd->bqhd", "K"),
        ("bhqd,bhkd->bhqk", "bhqk,hkd->bhqd", "v"),
    ],
)
def test_products_like_attention(logits, result, dropped, rng):
    """An axis that attention shares is summed, or an operand lacks it."""
    operands = [jnp.asarray(rng.standard_normal((2, 5, 3, 4)), jnp.float32) for _ in range(3)]
    # "K" and "qkv": without heads; "k", "v": without a batch.
    for i, name in enumerate("qkv"):
        if dropped == "qkv" or (dropped == "K" and name == "k"):
            operands[i] = operands[i][:, :, 0]
        elif dropped == name:
            operands[i] = operands[i][0]

    def attention(q, k, v):
        return jnp.einsum(result, jax.nn.softmax(jnp.einsum(logits, q, k)), v)

    np.testing.assert_allclose(jaxops.fuse(attention)(*operands), attention(*operands), rtol=1e-4, atol=1e-5)


def test_no_tracer_outlives_its_trace():
    fused = jaxops.fuse(lambda x: (jax.nn.softmax(x).sum(), None, 3))
    with jax.checking_leaks():
        out, nothing, three = jax.jit(fused)(jnp.ones((2, 3)))
    assert (float(out), nothing, int(three)) == (2.0, None, 3)

"""jaxops.patch_jax_nn."""

import inspect
import re
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from support import contract

import jaxops
from jaxops import _patch, _warnings
from jaxops.flax import linen
from jaxops.flax import nnx as fast

X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.float32)
ORIGINALS = {name: getattr(jax.nn, name) for name in ("softmax", "log_softmax", "logsumexp", "standardize")}
ORIGINAL_DOT = jax.lax.dot_general
MASK = jnp.asarray(np.random.default_rng(1).random((3, 8)) < 0.7).at[:, 0].set(True)


def launches(function, *arguments):
    return contract.count_launches(lambda *xs: function(*xs), *arguments)  # a new function: traced anew


@pytest.mark.parametrize("name", ORIGINALS)
@pytest.mark.parametrize("options", [{}, {"axis": 0}, {"axis": (0, 1)}, {"where": MASK}], ids=str)
def test_functions_run_on_jaxops(name, options):
    wanted = getattr(jax.nn, name)(X, **options)
    with jaxops.patch_jax_nn():
        assert launches(lambda x: getattr(jax.nn, name)(x, **options), X) == 1
        got = getattr(jax.nn, name)(X, **options)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert launches(lambda x: getattr(jax.nn, name)(x, **options), X) == 0
    assert getattr(jax.nn, name) is ORIGINALS[name]


def test_flax_functions_too():
    calls = []
    with jaxops.patch_jax_nn(calls.append):
        for library in (nn, nnx):
            assert launches(lambda x, library=library: library.softmax(x) + library.log_softmax(x), X) == 2
    assert calls == ["softmax", "log_softmax"] * 2
    assert nn.softmax is nnx.softmax is ORIGINALS["softmax"]


def test_logsumexp_by_its_other_name():
    """jax.scipy.special's is the same function; results and gradients are jax's where all or one are infinite too."""
    x = jnp.array([[1.0, 2.0, -jnp.inf], [-jnp.inf] * 3, [0.0, jnp.inf, 1.0], [3.0, 3.0, 3.0]])
    options = ({}, {"axis": 1}, {"axis": 0, "keepdims": True}, {"axis": 1, "return_sign": True})
    wanted = [jax.scipy.special.logsumexp(x, **o) for o in options]
    slopes = jax.grad(lambda x: jax.nn.logsumexp(x[::3], axis=1).sum())(x)
    with jaxops.patch_jax_nn():
        assert launches(lambda x: jax.scipy.special.logsumexp(x, axis=-1), X) == 1
        got = [jax.scipy.special.logsumexp(x, **o) for o in options]
        np.testing.assert_allclose(jax.grad(lambda x: jax.nn.logsumexp(x[::3], axis=1).sum())(x), slopes, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.dtype == b.dtype


def test_scopes_nest_and_end_after_errors():
    with pytest.raises(KeyError), jaxops.patch_jax_nn():
        with jaxops.patch_jax_nn():
            assert launches(jax.nn.softmax, X) == 1
        assert launches(jax.nn.softmax, X) == 1
        raise KeyError
    assert {name: getattr(jax.nn, name) for name in ORIGINALS} == ORIGINALS


def test_inner_listener():
    outer, inner = [], []
    with jaxops.patch_jax_nn(outer.append):
        with jaxops.patch_jax_nn(inner.append):
            jax.nn.softmax(X)
        jax.nn.log_softmax(X)
    assert (outer, inner) == (["log_softmax"], ["softmax"])


def test_replacements_of_others_stay(monkeypatch):
    """What others put into jax.nn, before or during the scope, is neither replaced nor removed."""
    monkeypatch.setattr(jax.nn, "softmax", lambda x: "before")
    with jaxops.patch_jax_nn():
        assert jax.nn.softmax(X) == "before"
        monkeypatch.setattr(jax.nn, "log_softmax", lambda x: "during")
    assert jax.nn.log_softmax(X) == "during"


def test_other_threads_keep_jax_nn():
    found = []
    entered, looked = threading.Event(), threading.Event()

    def other():
        entered.wait(10)
        found.append(launches(jax.nn.softmax, X))
        looked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with jaxops.patch_jax_nn():
        entered.set()
        assert looked.wait(60)
    thread.join()
    assert found == [0]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("softmax", (X + 1j,)),
        ("logsumexp", (X, -1, jnp.abs(X))),
        ("standardize", (X, -1, X.mean(-1, keepdims=True))),
        ("standardize", (X, -1, None, X.var(-1, keepdims=True))),
        ("standardize", (X, -1, None, None, np.full((3, 1), 0.5))),
        ("standardize", (X, -1, None, None, -1e-3)),
    ],
    ids=["complex", "factors", "given mean", "given variance", "epsilons", "negative epsilon"],
)
def test_what_stays_with_jax_nn(name, arguments):
    wanted = ORIGINALS[name](*arguments)
    with jaxops.patch_jax_nn():
        assert launches(lambda: getattr(jax.nn, name)(*arguments)) == 0
        np.testing.assert_array_equal(getattr(jax.nn, name)(*arguments), wanted)


@pytest.mark.parametrize("name", ORIGINALS)
def test_every_parameter_is_taken(name):
    """Of the jax that is installed: `standardize` has an `algorithm` since 0.11."""
    parameters = inspect.signature(ORIGINALS[name]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    with jaxops.patch_jax_nn():
        assert launches(lambda x: getattr(jax.nn, name)(x, **defaults), X) == 1
        if "algorithm" in defaults:
            got = [jax.nn.standardize(X, algorithm=algorithm) for algorithm in ("fast", "stable")]
            np.testing.assert_array_equal(*got)
            with pytest.raises(ValueError, match="algorithm"):
                jax.nn.standardize(X, algorithm="other")


@pytest.mark.parametrize("axis", ["i", ("i",), ("i", 0)], ids=str)
def test_names_of_mapped_axes_stay_with_jax_nn(axis):
    def mapped(softmax):
        return jax.vmap(lambda x: softmax(x, axis=axis), axis_name="i")(X)

    wanted = mapped(ORIGINALS["softmax"])
    with jaxops.patch_jax_nn():
        np.testing.assert_array_equal(mapped(jax.nn.softmax), wanted)


@pytest.mark.parametrize("epsilon", [1e-5, 0, np.float32(1e-5), np.float64(1e-5), np.array(1e-5, np.float32)], ids=repr)
def test_dtypes_are_those_of_jax_nn(epsilon):
    """NumPy's numbers, unlike Python's, promote."""
    x = X.astype(jnp.bfloat16)
    wanted = jax.nn.standardize(x, epsilon=epsilon)
    with jaxops.patch_jax_nn():
        assert jax.nn.standardize(x, epsilon=epsilon).dtype == wanted.dtype


def test_errors_are_those_of_jax_nn():
    with jaxops.patch_jax_nn(), pytest.raises(TypeError, match="requires ndarray or scalar arguments, got"):
        jax.nn.softmax([1.0, 2.0])
    with jaxops.patch_jax_nn(), pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        jax.nn.standardize(X, foo=1)
    with pytest.raises(Exception) as wanted:
        jax.nn.standardize(X, axis=5)
    with jaxops.patch_jax_nn(), pytest.raises(wanted.type, match=re.escape(str(wanted.value))):
        jax.nn.standardize(X, axis=5)


def test_plain_forms_do_not_come_back(monkeypatch):
    """A kernel's plain form uses jax.nn itself, also when it is traced within a scope."""
    monkeypatch.setattr(_warnings, "_said", set())
    with jaxops.patch_jax_nn(), pytest.warns(jaxops.FallbackWarning, match=" on tpu"):
        assert jax.nn.softmax(jnp.zeros((0, 3))).shape == (0, 3)
        text = jax.jit(jax.nn.softmax).trace(X).lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.exponential" in text


def test_nothing_is_left_behind():
    assert not _patch._PATCH._replaced
    assert not _patch._PATCH._open


def in_kernel(function):
    """function, computed by a Pallas kernel; a new kernel, which no cache has."""

    def kernel(x, out):
        out[...] = jnp.broadcast_to(function(x[...]), out.shape)

    def call(x, **options):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), **options)(x)

    return call


@pytest.mark.parametrize("name", ORIGINALS)
@pytest.mark.parametrize("how", ["alone", "in jit", "in a loop", "in jvp"])
def test_pallas_kernels_keep_the_originals(name, how):
    """Their compilers do not know the primitives; so does what is cached, after the scope too."""
    wrap = {
        "alone": lambda f: f,
        "in jit": lambda f: jax.jit(lambda x: f(x)),
        "in a loop": lambda f: lambda x: jax.lax.fori_loop(0, 1, lambda i, y: jnp.broadcast_to(f(y), y.shape), x),
        "in jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[0],
    }[how]
    run = in_kernel(wrap(lambda x: getattr(jax.nn, name)(x)))
    wanted, calls = ORIGINALS[name](X), []
    with jaxops.patch_jax_nn(calls.append):
        inside = str(jax.make_jaxpr(run)(X))
        np.testing.assert_allclose(run(X, interpret=True), jnp.broadcast_to(wanted, X.shape), rtol=1e-6)
    assert "jaxops" not in inside and "jaxops" not in str(jax.make_jaxpr(run)(X)) and not calls


def test_swapped_models_keep_pallas_kernels():
    """Of a linen model that calls a kernel."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm()(in_kernel(lambda x: jax.nn.softmax(x))(x))

    model, report = linen.swap(Model())
    variables = nn.LayerNorm().init(jax.random.key(0), X)
    text = str(jax.make_jaxpr(lambda x: model.apply({"params": {"LayerNorm_0": variables["params"]}}, x))(X))
    assert text.count("jaxops_layer_norm_fwd[") == 1 and "jaxops_softmax" not in text
    assert set(report.swapped.values()) == {"LayerNorm"}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_pallas_kernels_on_a_gpu():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)  # of Triton's sizes, powers of two
    for name in ("softmax", "log_softmax"):
        run = in_kernel(lambda x, name=name: getattr(jax.nn, name)(x))
        with jaxops.patch_jax_nn():
            got = jax.jit(run)(x)
        for y in (got, run(x)):
            np.testing.assert_allclose(y, ORIGINALS[name](x), rtol=1e-5, atol=1e-6)


def replaced_by_hand(monkeypatch):
    """Every name of JAX's and Flax's for which jaxops has something of the same name, replaced by that."""
    for name in ("softmax", "log_softmax"):
        monkeypatch.setattr(nn, name, getattr(jaxops, name))
    for name in jaxops.__all__:
        if hasattr(jax.nn, name):
            monkeypatch.setattr(jax.nn, name, getattr(jaxops, name))
    monkeypatch.setattr(jax.lax, "dot_general", jaxops.dot_general)
    monkeypatch.setattr(jnp, "matmul", jaxops.matmul)
    for name in ("dots_saveable", "dots_with_no_batch_dims_saveable"):
        monkeypatch.setattr(jax.checkpoint_policies, name, getattr(jaxops.checkpoint_policies, name))
    for flax, ours in ((nn, linen), (nnx, fast)):
        for name in ours.__all__:
            if hasattr(flax, name):
                monkeypatch.setattr(flax, name, getattr(ours, name))


@pytest.mark.filterwarnings("ignore::jaxops.FallbackWarning")
def test_names_replaced_by_hand(monkeypatch, rng):
    """jaxops calls JAX's and Flax's own, whatever their names stand for meanwhile."""
    a, b, x = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 5, 11), (3, 11, 7), (2, 5, 8)))
    mask = x > -0.5

    def twice(*xs, **options):
        return 2 * ORIGINAL_DOT(*xs, **options)

    def results():
        key, attention = jax.random.key(0), nn.MultiHeadDotProductAttention(2)
        rngs = nnx.Rngs(0)
        yield jax.nn.logsumexp(x, b=x), jax.nn.softmax(x + 1j), jax.nn.log_softmax(x + 1j)  # without a kernel
        yield jnp.matmul(a.astype(int), b.astype(int)), jnp.matmul(a, b), jnp.matmul(a[:1, None], b)
        yield jax.lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))), precision="highest")
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        yield jax.jit(jax.grad(jax.checkpoint(lambda a: jnp.sum(jnp.matmul(a, b) ** 2), policy=policy)))(a)
        for layer, options in (
            (nn.RMSNorm(), {"mask": mask}),
            (nn.LayerNorm(), {"mask": mask}),
            (nn.LayerNorm(epsilon=-1e-9), {}),
            (nn.Dense(3, dot_general=twice), {}),
            (nn.DenseGeneral((2, 3), axis=(-1, -2)), {}),
            (attention, {}),
        ):
            yield layer.init_with_output(key, x, **options)
        for layer, options in (
            (nnx.RMSNorm(8, rngs=rngs), {"mask": mask}),
            (nnx.LayerNorm(8, rngs=rngs), {"mask": mask}),
            (nnx.Linear(8, 3, dot_general=twice, rngs=rngs), {}),
            (nnx.LinearGeneral((5, 8), (2, 3), axis=(-2, -1), rngs=rngs), {}),
            (nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs), {}),
        ):
            yield layer(x, **options), nnx.state(layer, nnx.Param)

    with jax.default_matmul_precision("highest"):
        wanted = jax.tree.leaves(list(results()))
        replaced_by_hand(monkeypatch)
        got = jax.tree.leaves(list(results()))
        fast.swap(nnx.Linear(8, 3, rngs=nnx.Rngs(0)))
    for ours, reference in zip(got, wanted, strict=True):
        assert ours.dtype == reference.dtype
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)


def test_optax():
    """Inside the scope optax's loss runs on jaxops, with its dtype; outside and in other threads it is optax's."""
    optax = pytest.importorskip("optax")
    original = optax.softmax_cross_entropy_with_integer_labels
    logits, labels = jnp.asarray(np.linspace(-2, 2, 12).reshape(3, 4), jnp.bfloat16), np.array([0, 3, 1])
    calls = []
    with jaxops.patch_optax(calls.append):
        assert optax.softmax_cross_entropy_with_integer_labels is not original
        assert optax.losses.softmax_cross_entropy_with_integer_labels is not original
        inside = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels, axis=(1,))
        with pytest.raises(ValueError, match="axis"):
            optax.softmax_cross_entropy_with_integer_labels(logits, labels, axis=[1])
    assert calls == ["softmax_cross_entropy_with_integer_labels"]
    assert (
        optax.softmax_cross_entropy_with_integer_labels
        is original
        is optax.losses.softmax_cross_entropy_with_integer_labels
    )
    with jaxops.patch_optax():
        of_numpy = optax.softmax_cross_entropy_with_integer_labels(np.ones((3, 4)), labels)
    assert inside.dtype == jnp.bfloat16 and of_numpy.dtype == np.float32
    np.testing.assert_allclose(inside.astype(np.float32), original(logits.astype(np.float32), labels), rtol=1e-2)

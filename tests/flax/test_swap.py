"""Whole models of Flax's layers, and models of others, swapped onto jaxops."""

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from support import contract
from support import flax_cases as cases

import jaxops
from jaxops.flax import linen
from jaxops.flax import nnx as fast

pytestmark = pytest.mark.usefixtures("full_precision")

KEY = jax.random.key(0)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(24)(nn.RMSNorm()(x))))


class Model(nn.Module):
    """Blocks under remat and scan, a shared layer, a layer that jaxops does not have, and its own parameters."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 12)(tokens)
        mask = nn.make_causal_mask(tokens)
        x = Block(name="block")(x, mask)
        x = nn.remat(Block)(name="remat")(x, mask)
        scanned = nn.scan(
            lambda block, x, _: (block(x, mask), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = scanned(Block(name="scan"), x, None)
        own = self.param("own", nn.initializers.ones, (12,))
        other = nn.Dense(12, dot_general=lambda *args, **options: jax.lax.dot_general(*args, **options), name="other")
        return nn.softmax(other(x) * own)


TOKENS = jnp.arange(10).reshape(2, 5)


def test_linen_model(rng):
    model = Model()
    swapped, report = linen.swap(model)
    assert "nothing was called yet" in str(report)
    variables = jax.jit(swapped.init)(KEY, TOKENS)
    jax.tree.map(np.testing.assert_array_equal, variables, jax.jit(model.init)(KEY, TOKENS))
    layers = {"LayerNorm_0", "RMSNorm_0", "Dense_0", "Dense_1", "MultiHeadDotProductAttention_0"}
    layers |= {f"MultiHeadDotProductAttention_0/{name}" for name in ("query", "key", "value", "out")}
    expected = {f"{block}/{layer}" for block in ("block", "remat", "scan") for layer in layers}
    assert set(report.swapped) == {*expected, "Model: softmax"}
    assert set(report.kept) == {"Embed_0", "other", "Model"}
    assert report.kept["other"] == "dot_general= is given"
    assert report.kept["Model"] == "not a layer of Flax's (parameters own)"
    assert str(report).startswith("28 on jaxops, 3 kept\n")

    values = cases.disturb(rng, variables)
    got, wanted = (cases.value_and_gradients(m.apply, values, TOKENS) for m in (swapped, model))
    cases.assert_same(got, wanted, ulp=256)


def test_an_inner_swap_has_its_own_report():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.inner(x)

    inner, of_inner = linen.swap(nn.Dense(8), products=False)
    outer, _ = linen.swap(Outer(inner))
    jax.jit(outer.init)(KEY, jnp.ones((2, 4)))
    assert set(of_inner.kept.values()) == {"products=False"}


class LinenMLP(nn.Module):
    names: tuple[str, ...]
    use_bias: bool = False

    @nn.compact
    def __call__(self, x):
        gate, up, down = (
            nn.Dense(width, use_bias=self.use_bias, name=name)
            for width, name in zip((12, 12, x.shape[-1]), self.names, strict=True)
        )
        return down(nn.silu(gate(x)) * up(x))


class NnxMLP(nnx.Module):
    def __init__(self, names, use_bias=False):
        self.names = names
        for shape, name in zip(((8, 12), (8, 12), (12, 8)), names, strict=True):
            setattr(self, name, nnx.Linear(*shape, use_bias=use_bias, rngs=nnx.Rngs(0)))

    def __call__(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(nnx.silu(gate(x)) * up(x))


@pytest.mark.parametrize("names", ["gate up down", "gate_proj up_proj down_proj", "wi_0 wi_1 wo"])
def test_gated_mlps_are_told(names):
    """Three layers without bias, of known names: the report says that they run one by one."""
    names, x = tuple(names.split()), jnp.ones((3, 8))
    line = f"layers_0: {', '.join(names)} run one by one; if they are a gated MLP, see GatedMLP or jaxops.fuse"
    model = nn.Sequential([LinenMLP(names), LinenMLP(names, use_bias=True), LinenMLP((*names[:2], "x"))])
    for products in (True, False):
        swapped, report = linen.swap(model, products=products)
        jax.eval_shape(swapped.init, KEY, x)
        assert report.gated_mlps == ({"layers_0": names} if products else {})
        assert (line in str(report).splitlines()) == products
    model = nnx.Sequential(NnxMLP(names), NnxMLP(names, use_bias=True))
    swapped, report = fast.swap(model)
    assert report.gated_mlps == {"layers/0": names}
    assert line.replace("layers_0", "layers/0") in str(report).splitlines()
    assert fast.swap(NnxMLP(names))[1].gated_mlps == {"": names}


def test_fuse_joins_what_a_swap_leaves():
    """As the report says: gated MLPs of a model that is swapped without its products."""
    model, _ = linen.swap(nn.Sequential([nn.RMSNorm(), LinenMLP(("gate", "up", "down"))]), products=False)
    reports, x = [], jnp.ones((3, 8))
    variables = jax.eval_shape(model.init, KEY, x)
    text = str(jax.make_jaxpr(jaxops.fuse(model.apply, report=reports.append))(variables, x))
    assert reports[0].counts == {"gated_mlp": 1} and "jaxops_rms_norm" in text


def test_linen_models_are_pickled():
    model, report = linen.swap(nn.Sequential([nn.LayerNorm(), nn.softmax]))
    x = jnp.arange(8.0).reshape(2, 4)
    variables = model.init(KEY, x)
    copy = pickle.loads(pickle.dumps(model))
    assert type(copy) is type(model) and copy == model and str(copy.swap_report) == str(report)
    np.testing.assert_array_equal(copy.apply(variables, x), model.apply(variables, x))


def test_causal_masks_are_not_read():
    swapped, _ = linen.swap(Model())
    variables = jax.eval_shape(swapped.init, KEY, TOKENS)
    text = str(jax.make_jaxpr(swapped.apply)(variables, TOKENS))
    kernels = re.findall(r"jaxops_softmax_fwd\[(.*?)\]", text, re.DOTALL)
    causal = [kernel for kernel in kernels if "query_axis=2" in kernel and "'where'" not in kernel]
    assert len(causal) == 2  # block and remat; the scan's mask is another array


def test_only_a_mask_of_its_own_size_is_causal():
    class Offset(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = nn.make_causal_mask(x[..., 0])
            layer = nn.MultiHeadDotProductAttention(num_heads=2)
            return layer(x[:, -1:], x, mask=mask[..., -1:, :]) + layer(x, mask=nn.combine_masks(mask, mask))

    x = jax.random.normal(KEY, (2, 5, 8))
    variables = jax.jit(Offset().init)(KEY, x)
    got, wanted = (jax.jit(model.apply)(variables, x) for model in (linen.swap(Offset())[0], Offset()))
    cases.assert_same(got, wanted, ulp=32)


def test_linen_models_trace_once():
    model = Model()
    swapped, _ = linen.swap(model)
    again, _ = linen.swap(model)
    assert swapped == again and hash(swapped) == hash(again) and swapped != model
    traced = []

    def run(model, variables, tokens):
        traced.append(model)
        return model.apply(variables, tokens)

    jitted = jax.jit(run, static_argnums=0)
    variables = jax.eval_shape(model.init, KEY, TOKENS)
    for which in (swapped, again, swapped):
        jitted.lower(which, variables, TOKENS)
    assert len(traced) == 1


def test_linen_methods_and_parts():
    """Setup, other methods than __call__, bound models, and a swapped model as part of a plain one."""

    class Parts(nn.Module):
        def setup(self):
            self.first, self.second = nn.Dense(3), nn.Dense(4)

        def __call__(self, x):
            return self.half(x) + self.second(x).sum()

        def half(self, x):
            return self.first(x)

    class Whole(nn.Module):
        part: nn.Module

        def __call__(self, x):
            return self.part(x)

    x = jnp.ones((2, 3))
    swapped, report = linen.swap(Parts())
    variables = swapped.init(KEY, x)
    assert report.swapped == {"first": "Dense", "second": "Dense"}

    def count(run):
        return contract.count_launches(lambda variables, x: run(variables, x), variables, x)

    assert count(swapped.apply) == 2
    assert count(lambda variables, x: swapped.apply(variables, x, method="half")) == 1
    assert count(lambda variables, x: swapped.bind(variables)(x)) == 2
    inner = {"params": {"part": variables["params"]}}
    assert contract.count_launches(lambda v, x: Whole(swapped).apply(v, x), inner, x) == 2
    assert count(Parts().apply) == 0


def test_linen_scope():
    model = nn.Sequential([nn.Dense(3), nn.softmax])
    variables = model.init(KEY, jnp.ones((2, 4)))
    apply = lambda x: model.apply(variables, x)  # noqa: E731
    with pytest.raises(KeyError), linen.swapped(functions=False) as report:
        assert contract.count_launches(lambda x: apply(x), jnp.ones((2, 4))) == 1
        raise KeyError
    assert report.swapped == {"layers_0": "Dense"}
    assert contract.count_launches(lambda x: apply(x), jnp.ones((2, 4))) == 0
    assert nn.make_causal_mask.__module__ == "flax.linen.attention" and not hasattr(nn.make_causal_mask, "__wrapped__")


@pytest.mark.parametrize(
    ("dtype", "axes", "axis", "stays"),
    [
        ("float32", 4, -1, True),
        ("float32", 4, 3, True),
        ("float32", 4, 1, False),
        ("float32", 3, -1, False),
        ("bfloat16", 4, -1, False),
        ("int32", 4, -1, False),
    ],
)
def test_attention_weights_in_f32_stay(dtype, axes, axis, stays):
    """XLA fuses what surrounds them; the report says so."""
    model, report = linen.swap(nn.Sequential([lambda x: nn.softmax(x, axis)]))
    x = jnp.arange(2**axes).astype(dtype).reshape([2] * axes)
    np.testing.assert_allclose(*(np.float32(y) for y in (model.apply({}, x), jax.nn.softmax(x, axis))), rtol=1e-2)
    assert ("softmax" in str(report.kept), "softmax" in report.swapped.values()) == (stays, not stays)


def test_products_of_xla(rng):
    """products=False: norms and softmaxes alone."""
    plain, (swapped, report) = Model(), linen.swap(Model(), products=False)
    assert swapped != linen.swap(plain)[0]
    variables = jax.jit(plain.init)(KEY, TOKENS)
    got, wanted = (jax.jit(model.apply)(variables, TOKENS) for model in (swapped, plain))
    cases.assert_same(got, wanted, ulp=64)
    assert report.kept["block/Dense_0"] == report.kept["block/MultiHeadDotProductAttention_0/key"] == "products=False"
    assert {"block/RMSNorm_0", "block/MultiHeadDotProductAttention_0"} < set(report.swapped)
    kernels = {call.kernel for call in jaxops.explain(swapped.apply, variables, TOKENS).calls}
    assert kernels == {"layer_norm_fwd", "rms_norm_fwd", "softmax_fwd"}

    plain, x = nnx_model(), cases.draw(rng, (2, 5, 8))
    swapped, report = fast.swap(plain, products=False)
    assert report.kept["layers/3"] == "products=False" and "layers/1" in report.swapped
    got, wanted = (nnx.jit(lambda m, x: m(x))(m, x) for m in (swapped, plain))
    cases.assert_same(got, wanted, ulp=64)
    kernels = {call.kernel for call in jaxops.explain(swapped, x).calls}
    assert kernels == {"layer_norm_fwd", "rms_norm_fwd", "softmax_fwd"}


def test_einsums_of_ones_own_without_products():
    """An attention's own einsums are its products, with products=False too."""
    einsum = {name: lambda: jnp.einsum for name in ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")}
    plain = nn.MultiHeadDotProductAttention(2, **einsum)
    swapped, _ = linen.swap(plain, products=False)
    x = jnp.linspace(-1, 1, 24).reshape(1, 3, 8)
    variables = plain.init(KEY, x)
    cases.assert_same(swapped.apply(variables, x), plain.apply(variables, x), ulp=64)


def test_what_cannot_be_swapped():
    with pytest.raises(TypeError, match=r"must be a flax\.linen module, got Linear"):
        linen.swap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"must be a flax\.nnx module, got Dense"):
        fast.swap(nn.Dense(2))
    with pytest.raises(TypeError, match="bound to variables"):
        linen.swap(nn.Dense(2).bind({}))
    for library, layer in ((linen, nn.Dense), (fast, nnx.Linear)):
        with pytest.raises(TypeError, match=f"model must be an instance, got the class {layer.__name__}"):
            library.swap(layer)


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


LIFTED = {
    "remat": lambda: nn.remat(Wide)(),
    "jit": lambda: nn.jit(type("Jitted", (Wide,), {}))(),
    "vmap": lambda: nn.vmap(Wide, variable_axes={"params": None}, split_rngs={"params": False})(),
    "map_variables": lambda: nn.map_variables(Wide, "params", init=True)(),
    "a layer": lambda: nn.remat(nn.Dense)(8),
}


@pytest.mark.parametrize("make", LIFTED.values(), ids=LIFTED)
def test_lifted_classes(make):
    x = jnp.ones((2, 8))
    swapped, report = linen.swap(make())
    got, wanted = (model.init_with_output(KEY, x) for model in (swapped, make()))
    cases.assert_same(got, wanted)
    assert "Dense" in report.swapped.values()


def test_calls_of_parts():
    """By functions that are no methods of the model's class."""

    class Whole(nn.Module):
        def setup(self):
            self.part = nn.Dense(3)

        def __call__(self, x):
            return self.part(x)

    x = jnp.ones((2, 4))
    variables = Whole().init(KEY, x)
    for call in (lambda model: model.apply(variables, x, method=lambda m, x: m.part(x)), lambda m: m.init(KEY, x)):
        swapped, report = linen.swap(Whole())
        call(swapped)
        assert report.swapped == {"part": "Dense"}


def test_interceptors_of_others():
    """Run as they do without the swap; a layer inside one stays Flax's."""

    def double(method, args, kwargs, context):
        return method(*args, **kwargs) * (1 + isinstance(context.module, nn.Dense))

    class Doubled(nn.Module):
        @nn.compact
        def __call__(self, x):
            with nn.intercept_methods(double):
                return nn.Dense(3)(x)

    x = jnp.ones((2, 4))
    variables = Doubled().init(KEY, x)
    swapped, report = linen.swap(Doubled())
    cases.assert_same(swapped.apply(variables, x), Doubled().apply(variables, x))
    assert report.kept == {"Dense_0": "another interceptor runs inside the swap"}
    plain, (swapped, report) = Wide(), linen.swap(Wide())
    variables = plain.init(KEY, x)
    with nn.intercept_methods(double):
        cases.assert_same(swapped.apply(variables, x), plain.apply(variables, x))
    assert report.swapped == {"Dense_0": "Dense"}
    with linen.swapped() as outer:  # of scopes inside each other the inner one swaps
        assert contract.count_launches(swapped.apply, variables, x) == 1
    assert outer.swapped == {"Dense_0": "Dense"}


@pytest.mark.parametrize("batches", [1, 3])
def test_causal_masks_of_more_batches(batches):
    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(2)(x, mask=nn.make_causal_mask(jnp.ones((batches, 5))))

    x = jax.random.normal(KEY, (5, 8))
    variables = Masked().init(KEY, x)
    got, wanted = (jax.jit(model.apply)(variables, x) for model in (linen.swap(Masked())[0], Masked()))
    assert wanted.shape == (batches, 5, 8)
    cases.assert_same(got, wanted, ulp=32)


def test_linen_swaps_again():
    model = nn.MultiHeadDotProductAttention(num_heads=2)
    first, _ = linen.swap(model)
    again, report = linen.swap(first, products=False)
    assert type(again).__bases__ == type(first).__bases__ and again != first
    x = jax.ShapeDtypeStruct((1, 5, 8), jnp.float32)
    jax.eval_shape(again.init, KEY, x)
    assert report.kept["query"] == "products=False"
    assert linen.swap(again)[0] == first


def nnx_model():
    class Own(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x) + 1

    rngs = nnx.Rngs(0)
    shared = nnx.Linear(8, 8, rngs=rngs)
    attention = nnx.MultiHeadAttention(2, 8, decode=False, normalize_qk=True, rngs=rngs)
    other = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=lambda q, k, v, **_: v, rngs=rngs)
    layers = [nnx.LayerNorm(8, rngs=rngs), attention, other, shared, nnx.RMSNorm(8, rngs=rngs), shared]
    return nnx.Sequential(*layers, Own(8, 8, rngs=rngs), nnx.BatchNorm(8, use_running_average=True, rngs=rngs))


def test_nnx_model(rng):
    model, x = nnx_model(), cases.draw(rng, (2, 5, 8))
    swapped, report = fast.swap(model)
    assert report.kept == {
        "layers/2": "attention_fn= is <lambda>",
        "layers/6": "a subclass of Linear (parameters bias, kernel)",
        "layers/7": "jaxops has no BatchNorm (parameters bias, scale)",
    }
    parts = {"query", "key", "value", "out"}
    expected = {f"layers/{i}" for i in (0, 1, 3, 4)} | {f"layers/{i}/{part}" for i in (1, 2) for part in parts}
    assert set(report.swapped) == expected | {"layers/1/query_ln", "layers/1/key_ln"}
    assert swapped.layers[3] is swapped.layers[5]
    states = [nnx.state(m) for m in (model, swapped)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert type(model.layers[3]) is nnx.Linear
    derivative = nnx.jit(nnx.value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x)))))
    got, wanted = (derivative(m, x) for m in (swapped, model))
    cases.assert_same(got[0], wanted[0], ulp=32)
    cases.assert_same(nnx.to_pure_dict(got[1]), nnx.to_pure_dict(wanted[1]), ulp=256)


def test_nnx_in_place():
    """Optimisers and others that hold the model see the swap; states fit both ways."""
    model = nnx_model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    swapped, _ = fast.swap(model, copy=False)
    assert swapped is model and type(model.layers[3]) is fast.Linear
    x = jax.random.normal(KEY, (2, 5, 8))
    traced = []

    @nnx.jit
    def step(model, optimizer, x):
        traced.append(1)
        optimizer.update(model, nnx.grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x))

    before = model(x)
    for _ in range(3):
        step(model, optimizer, x)
    assert len(traced) == 1
    assert float(jnp.abs(model(x) - before).max()) > 0
    plain = nnx_model()
    nnx.update(plain, nnx.state(model))
    cases.assert_same(plain(x), model(x), ulp=64)


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("rope", [False, True])
def test_equal_layers_stay_equal(products, rope):
    """They can be stacked and scanned, and a second swap of a model is traced no second time."""
    if rope and not hasattr(nnx, "dot_product_attention_with_rope"):
        pytest.skip("this Flax has no rotary attention")
    options = {}
    if rope:
        rope = lambda x, positions: 0.5 * x  # noqa: E731
        options["attention_fn"] = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)

    def make(seed):
        rngs = nnx.Rngs(seed)
        attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs, **options)
        return nnx.Sequential(nnx.LayerNorm(16, rngs=rngs), attention, nnx.Linear(16, 16, rngs=rngs))

    plain, x, traced = [make(0), make(1)], jnp.ones((1, 6, 16)), []

    def run(model):
        (graphdef, state), (other, state_of_other) = map(nnx.split, model)
        assert graphdef == other and hash(graphdef) == hash(other)
        states = jax.tree.map(lambda *leaves: jnp.stack(leaves), state, state_of_other)
        return jax.lax.scan(lambda x, state: (nnx.merge(graphdef, state)(x), None), x, states)[0]

    @nnx.jit
    def call(layer):
        traced.append(layer)
        return layer(x)

    swapped = [fast.swap(layer, products=products)[0] for layer in plain]
    np.testing.assert_allclose(run(swapped), run(plain), rtol=1e-4, atol=1e-4)
    call(swapped[0]), call(swapped[1]), call(fast.swap(plain[0], products=products)[0])
    assert len(traced) == 1


def test_nnx_swaps_again():
    swapped, first = fast.swap(nnx_model())
    _, second = fast.swap(swapped)
    assert not second.swapped and second.kept == first.kept


# --- models of others ---

IDS = jax.random.randint(jax.random.key(1), (2, 12), 0, 99)


def bert():
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    module = pytest.importorskip("transformers.models.bert.modeling_flax_bert", exc_type=ImportError)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=99, max_position_embeddings=16, hidden_dropout_prob=0.0, **sizes)
    mask = jnp.ones_like(IDS).at[0, 8:].set(0)
    arguments = (IDS, mask, jnp.zeros_like(IDS), jnp.broadcast_to(jnp.arange(12), IDS.shape), None)
    return module.FlaxBertForMaskedLMModule(config), arguments, 20


def gpt2():
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    module = pytest.importorskip("transformers.models.gpt2.modeling_flax_gpt2", exc_type=ImportError)
    config = transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    arguments = (IDS, jnp.ones_like(IDS), jnp.broadcast_to(jnp.arange(12), IDS.shape))
    return module.FlaxGPT2LMHeadModule(config), arguments, 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make", [bert, pytest.param(gpt2, marks=pytest.mark.slow)])
def test_transformers(make):
    """Hugging Face's linen models: all layers are swapped, attention weights in f32 stay, and training gives the same
    losses."""
    model, arguments, count = make()
    swapped, report = linen.swap(model)
    variables = jax.jit(functools.partial(model.init, return_dict=False))(KEY, *arguments)
    optimizer = optax.adamw(3e-3)
    losses = {}
    for name, which in (("plain", model), ("jaxops", swapped)):
        traced = []

        @jax.jit
        def step(variables, state, which=which, traced=traced):
            traced.append(1)

            def loss(variables):
                logits = which.apply(variables, *arguments).logits
                return optax.softmax_cross_entropy_with_integer_labels(logits, IDS).mean()

            value, gradients = jax.value_and_grad(loss)(variables)
            updates, state = optimizer.update(gradients, state, variables)
            return optax.apply_updates(variables, updates), state, value

        now, state, losses[name] = variables, optimizer.init(variables), []
        for _ in range(4):
            now, state, value = step(now, state)
            losses[name].append(float(value))
        assert len(traced) == 1
    assert len(report.swapped) == count
    assert sum("attention weights" in why for why in report.kept.values()) == 2
    assert losses["plain"][-1] < losses["plain"][0] - 0.1
    np.testing.assert_allclose(losses["jaxops"], losses["plain"], rtol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_vision_transformer():
    """vitax's nnx model."""
    vitax = pytest.importorskip("vitax")
    sizes = {"img_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 4, "mlp_dim": 64, "hidden_size": 32}
    model = vitax.VisionTransformer(num_classes=5, dropout_rate=0.1, fsdp=False, rngs=nnx.Rngs(0), **sizes)
    swapped, report = fast.swap(model)
    assert len(report.swapped) == 20
    assert set(report.kept) == {"VisionTransformer", "patch_embeddings"}
    x, labels = jax.random.normal(KEY, (2, 16, 16, 3)), jnp.array([1, 3])
    losses = []
    for which in (model, swapped):
        optimizer = nnx.Optimizer(which, optax.adamw(3e-3), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            def loss(model):
                return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

            value, gradients = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        losses.append([float(step(which, optimizer)) for _ in range(4)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_methods_of_unbound_models():
    """A loss that is a method of the model, and calls `apply` itself."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm()(x)

        def loss(self, variables, x):
            return jnp.sum(jax.nn.softmax(self.apply(variables, x)) ** 2)

    x = jax.random.normal(jax.random.key(0), (3, 8))
    plain = Model()
    variables = plain.init(jax.random.key(1), x)
    model, report = linen.swap(plain)
    assert jnp.allclose(model.loss(variables, x), plain.loss(variables, x), rtol=1e-5)
    assert report.swapped == {"LayerNorm_0": "LayerNorm", "Model: softmax": "softmax"}


class _OwnNorm(nnx.Module):
    """A norm of its own, a table whose weights it multiplies, attention, and a layer that does not run."""

    def __init__(self, rngs):
        self.table, self.unused = nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)

    def __call__(self, x):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return self.attention(x @ self.table.kernel[...])


def test_report_traces_a_call():
    """It counts what stays with XLA, and says which swapped layers do not run."""
    model, report = fast.swap(_OwnNorm(nnx.Rngs(0)))
    assert {"table", "unused", "attention", "attention/query"} <= set(report.swapped)
    assert report.trace(lambda x: model(x), jnp.ones((2, 3, 8))) is report
    assert report.left == {"rms_norm": 1, "dot_general": 1}
    assert set(report.idle) == {"table", "unused"} and set(report.swapped) == {
        "attention",
        *(f"attention/{name}" for name in ("query", "key", "value", "out")),
    }
    assert "swapped, but does not run" in str(report) and "XLA's: 1 rms_norm, 1 dot_general" in str(report)


def test_report_traces_copies_of_layers():
    """Which of them run is not known; the list stays."""
    model, report = fast.swap(_OwnNorm(nnx.Rngs(0)))
    graph, state = nnx.split(model)
    report.trace(lambda state, x: nnx.merge(graph, state)(x), state, jnp.ones((2, 3, 8)))
    assert "table" in report.swapped and not report.idle and report.left["rms_norm"] == 1

"""jaxops.flax.nnx beside flax.nnx: variables, results and gradients of every layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import contract
from support import flax_cases as cases
from support.meshes import mesh_of

from jaxops.flax import nnx as fast

pytestmark = pytest.mark.usefixtures("full_precision")


def compare(rng, name, *arguments, launches=1, rounding=None, ulp=8, call=None, **options):
    """Equal variables from the same seed, and equal results and gradients with the same variables."""
    layers = [getattr(library, name)(**options, rngs=nnx.Rngs(0)) for library in (fast, nnx)]
    for layer in layers:
        if name == "MultiHeadAttention":
            layer.decode = False
    states = [nnx.state(layer, nnx.Param) for layer in layers]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    jax.tree.map(np.testing.assert_array_equal, *states)
    values = cases.disturb(rng, states[1])

    def run(layer):
        graph, _, rest = nnx.split(layer, nnx.Param, ...)
        return lambda values, *arguments: nnx.merge(graph, values, rest, copy=True)(*arguments, **(call or {}))

    if launches is not None:
        assert contract.count_launches(run(layers[0]), values, *arguments) == launches
    got, wanted = (cases.value_and_gradients(run(layer), values, *arguments) for layer in layers)
    cases.assert_same(got, wanted, rounding=rounding, ulp=ulp)


@pytest.mark.parametrize(("case", "dtype"), cases.norms("bfloat16"))
@pytest.mark.parametrize("layer", ["LayerNorm", "RMSNorm"])
def test_norm(rng, layer, case, dtype):
    options, shape = cases.NORMS[case]
    options = {k: v for k, v in options.items() if k != "use_bias" or layer == "LayerNorm"}
    coarse = "bfloat16" if dtype == "bfloat16" or "dtype" in options else None
    rounding = coarse or options.get("param_dtype")
    ulp = 16 if coarse is None else 4
    compare(rng, layer, cases.draw(rng, shape, dtype), num_features=16, rounding=rounding, ulp=ulp, **options)


def test_norm_promotes_as_told(rng):
    def narrow(arrays, *, dtype):
        return tuple(None if x is None else x.astype(jnp.bfloat16) for x in arrays)

    compare(rng, "LayerNorm", cases.draw(rng, (3, 16)), num_features=16, promote_dtype=narrow, rounding="bfloat16")


def test_layer_norm_mask(rng):
    x, mask = cases.draw(rng, (3, 8)), jnp.asarray(rng.random((3, 8)) < 0.7).at[..., 0].set(True)
    compare(rng, "LayerNorm", x, num_features=8, call={"mask": mask}, ulp=32)


def test_residual(rng):
    x, residual = (cases.draw(rng, (5, 16)) for _ in range(2))
    for name in ("LayerNorm", "RMSNorm"):
        ours, theirs = (getattr(library, name)(16, rngs=nnx.Rngs(0)) for library in (fast, nnx))
        cases.assert_same(ours(x, residual=residual), (theirs(x + residual), x + residual))


def test_what_norms_leave_to_flax(rng, fallback):
    x, mask = cases.draw(rng, (3, 8)), jnp.asarray(rng.random((3, 8)) < 0.7)
    compare(rng, "RMSNorm", x, num_features=8, call={"mask": mask}, launches=0)

    def over_devices(library):
        return jax.vmap(library.LayerNorm(8, axis_name="i", rngs=nnx.Rngs(0)), axis_name="i")(x)

    cases.assert_same(over_devices(fast), over_devices(nnx))
    assert {str(w.message).split(":")[0].split()[0] for w in fallback.list} == {"LayerNorm", "RMSNorm"}


LINEARS = {
    "defaults": {},
    "no bias": {"use_bias": False},
    "bf16": {"dtype": jnp.bfloat16},
    "bf16 in, f32 out": {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
    "bf16 parameters": {"param_dtype": jnp.bfloat16},
    "precision": {"precision": jax.lax.Precision.HIGHEST},
    "metadata": {"kernel_metadata": {"note": "a"}, "bias_metadata": {"note": "b"}},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", LINEARS)
def test_linear(rng, case, dtype):
    options = {"bias_init": nnx.initializers.normal(), **LINEARS[case]}
    rounding = jnp.bfloat16 if dtype == "bfloat16" or "dtype" in options else None
    x = cases.draw(rng, (3, 5, 16), dtype)
    compare(rng, "Linear", x, in_features=16, out_features=12, rounding=rounding, **options)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_exact", "silu"])
def test_linear_activation(rng, activation):
    functions = {"gelu_exact": functools.partial(jax.nn.gelu, approximate=False)}
    function = functions.get(activation) or getattr(jax.nn, activation)
    x = cases.draw(rng, (3, 5, 16))
    ours, theirs = fast.Linear(16, 12, activation=activation, rngs=nnx.Rngs(0)), nnx.Linear(16, 12, rngs=nnx.Rngs(0))
    got, wanted = (cases.value_and_gradients(f, x) for f in (ours, lambda x: function(theirs(x))))
    cases.assert_same(got, wanted, ulp=16)
    assert contract.count_launches(ours, x) == 1


class GatedMLP(nnx.Module):
    """fast.GatedMLP of Flax's layers."""

    def __init__(
        self,
        in_features,
        hidden_features,
        out_features=None,
        *,
        activation="silu",
        kernel_init=nnx.initializers.lecun_normal(),  # noqa: B008
        down_kernel_init=None,
        rngs,
        **options,
    ):
        inits = (kernel_init, kernel_init, down_kernel_init or kernel_init)
        shapes = [(in_features, hidden_features)] * 2 + [(hidden_features, out_features or in_features)]
        self.gate, self.up, self.down = (
            nnx.Linear(*shape, use_bias=False, kernel_init=init, rngs=rngs, **options)
            for shape, init in zip(shapes, inits, strict=True)
        )
        self.activation = activation

    def __call__(self, x):
        return self.down(cases.ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


def states_and_results(layers, x):
    """The variables with their metadata, the values and the gradients of layers."""
    for layer in layers:
        graph, state = nnx.split(layer)
        metadata = [(path, str(sorted(v.get_metadata().items(), key=str))) for path, v in nnx.to_flat_state(state)]

        def run(state, x, graph=graph):
            return nnx.merge(graph, state, copy=True)(x)

        yield metadata, state, cases.value_and_gradients(run, state, x)


@pytest.mark.parametrize("case", cases.GATED_MLPS)
def test_gated_mlp(rng, case):
    """Variables, also from the same seed, results and gradients are those of three linear layers."""
    options, dtype = cases.GATED_MLPS[case]
    flax = {name: value for name, value in options.items() if name != "recompute"}
    layers = [cls(8, 16, **given, rngs=nnx.Rngs(0)) for cls, given in ((fast.GatedMLP, options), (GatedMLP, flax))]
    ours, theirs = states_and_results(layers, cases.draw(rng, (3, 5, 8), dtype))
    assert ours[0] == theirs[0]
    jax.tree.map(np.testing.assert_array_equal, ours[1], theirs[1])
    cases.assert_same(ours[2], theirs[2], rounding=jnp.bfloat16 if "bf16" in case else None, ulp=16)


def test_partitioned_gated_mlp():
    def make(cls):
        init = nnx.initializers.lecun_normal()
        split = nnx.with_partitioning(init, (None, "model")), nnx.with_partitioning(init, ("model", None))
        return cls(8, 16, kernel_init=split[0], down_kernel_init=split[1], rngs=nnx.Rngs(0))

    mesh = mesh_of((2, 4), ("data", "model"))
    with jax.set_mesh(mesh):
        ours, theirs = (make(cls) for cls in (fast.GatedMLP, GatedMLP))
        specs = [jax.tree.leaves(nnx.get_partition_spec(nnx.state(layer))) for layer in (ours, theirs)]
        assert specs[0] == specs[1] and jax.P(None, "model") in specs[0] and jax.P("model", None) in specs[0]
        run = jax.jit(lambda layer, x: layer(x))
        assert "all-gather" not in run.lower(ours, jnp.ones((4, 8))).compile().as_text()


def test_metadata_of_a_gated_mlp():
    given = {"kernel_metadata": {"note": "a"}, "down_kernel_metadata": {"note": "b"}}
    layer = fast.GatedMLP(4, 8, **given, rngs=nnx.Rngs(0))
    assert [each.kernel.get_metadata()["note"] for each in (layer.gate, layer.up, layer.down)] == ["a", "a", "b"]


class Doubled(nnx.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("gate", Doubled, "gate is a Doubled"),
        ("up", {"use_bias": True}, "up has a bias"),
        ("down", {"dot_general": lambda *xs, **options: 2 * jax.lax.dot_general(*xs, **options)}, "dot_general= is"),
        ("down", {"dtype": jnp.bfloat16}, "down has another dtype than gate"),
        ("gate", {"preferred_element_type": jnp.float16}, "gate has a preferred_element_type"),
    ],
)
def test_layers_put_into_a_gated_mlp(rng, name, change, why, fallback):
    """What replaces a layer afterwards runs as it is."""
    ours, theirs = (cls(8, 8, rngs=nnx.Rngs(0)) for cls in (fast.GatedMLP, GatedMLP))
    bias_init = nnx.initializers.normal()
    for layer in (ours, theirs):
        options = change if isinstance(change, dict) else {}
        new = (change if not options else nnx.Linear)(
            8, 8, rngs=nnx.Rngs(1), bias_init=bias_init, **{"use_bias": False, **options}
        )
        setattr(layer, name, new)
    x = cases.draw(rng, (3, 8))
    cases.assert_same(ours(x), theirs(x), rounding=jnp.bfloat16 if "dtype" in why or "preferred" in why else None)
    assert [why in str(warning.message) for warning in fallback.list] == [True]


def test_layers_of_flax_in_a_gated_mlp(rng):
    """Linear layers of Flax's, such as those of a checkpoint's model, are as good as ours."""
    layer, x = fast.GatedMLP(8, 16, rngs=nnx.Rngs(0)), cases.draw(rng, (3, 8))
    before = layer(x)
    for name in ("gate", "up", "down"):
        shape = getattr(layer, name).kernel.shape
        linear = nnx.Linear(*shape, use_bias=False, rngs=nnx.Rngs(1))
        linear.kernel = getattr(layer, name).kernel
        setattr(layer, name, linear)
    np.testing.assert_array_equal(layer(x), before)
    assert "dot_general" not in str(jax.make_jaxpr(layer)(x))


def test_metadata():
    ours, theirs = (library.Linear(2, 3, kernel_metadata={"note": "a"}, rngs=nnx.Rngs(0)) for library in (fast, nnx))
    assert ours.kernel.get_metadata() == theirs.kernel.get_metadata()


def test_own_dot_general(rng):
    def product(*args, **options):
        return jax.lax.dot_general(*args, **options)

    x = cases.draw(rng, (3, 16))
    compare(rng, "Linear", x, in_features=16, out_features=4, dot_general=product, launches=0)
    compare(rng, "LinearGeneral", x, in_features=16, out_features=4, dot_general_cls=lambda: product, launches=0)
    with pytest.raises(ValueError, match=r"activation='relu'.*dot_general= is given"):
        fast.Linear(4, 4, dot_general=product, activation="relu", rngs=nnx.Rngs(0))


LINEAR_GENERALS = {
    "heads": ({"in_features": 6, "out_features": (4, 5)}, (2, 3, 6)),
    "out of heads": ({"in_features": (4, 6), "out_features": 5, "axis": (-2, -1)}, (2, 3, 4, 6)),
    "inner axes": ({"in_features": (3, 7), "out_features": (4, 5), "axis": (1, -1)}, (2, 3, 6, 7)),
    "batch": ({"in_features": 6, "out_features": (4, 5), "batch_axis": {0: 2, 1: 3}}, (2, 3, 7, 6)),
    "bf16": ({"in_features": 6, "out_features": (4, 5), "dtype": jnp.bfloat16}, (2, 3, 6)),
}


@pytest.mark.parametrize("case", LINEAR_GENERALS)
def test_linear_general(rng, case):
    options, shape = LINEAR_GENERALS[case]
    x = cases.draw(rng, shape)
    compare(rng, "LinearGeneral", x, rounding=options.get("dtype"), ulp=16, **options)


#: These cases test code that linen's layer shares with nnx's; other cases cover it.
ALIKE = ("one mask for all heads", "a number a mask", "deterministic", "dropout by head")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in ALIKE)) for c in cases.ATTENTIONS])
def test_attention(rng, case):
    options, call = cases.ATTENTIONS[case]
    x, mask = cases.draw(rng, (2, 6, 16)), cases.draw_mask(rng, 2, 4, 6, 6)
    given = call(mask)
    if "mask" in given:  # nnx broadcasts a causal mask to it
        given["mask"] = jnp.broadcast_to(given["mask"], (2, 4, 6, 6))
    compare(
        rng,
        "MultiHeadAttention",
        x,
        num_heads=4,
        in_features=16,
        launches=5 + 2 * ("normalize_qk" in options),
        rounding=options.get("dtype"),
        ulp=64,
        call=given,
        **options,
    )


def test_projections_that_differ(rng):
    """Of fewer key and value heads; of a key without a bias, as in Whisper."""
    x = cases.draw(rng, (2, 6, 16))
    compare(rng, "MultiHeadAttention", x, num_heads=4, in_features=16, num_kv_heads=2, ulp=64, launches=None)
    results = []
    for library in (fast, nnx):
        layer = library.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0))
        layer.key.bias = nnx.data(None)
        results.append(layer(x))
    cases.assert_same(*results, ulp=64)


#: Attributes of projections that layers may be given after they were made, and the dtype of the inputs.
PROJECTIONS = {
    "preferred_element_type": (jnp.float32, "bfloat16"),
    "dtype": (jnp.bfloat16, "float32"),
    "precision": ("highest", "float32"),
    "promote_dtype": (lambda arrays, dtype=None: tuple(2 * x for x in arrays), "float32"),
    "axis": ((-2,), "float32"),
    "dot_general": (lambda *xs, **options: 2 * jax.lax.dot_general(*xs, **options), "float32"),
    "dot_general_cls": (lambda: lambda *xs, **options: 3 * jax.lax.dot_general(*xs, **options), "float32"),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("attribute", PROJECTIONS)
def test_attributes_of_projections(rng, attribute, swapped):
    """All that Flax's layer takes from a projection of self-attention, which are one product here."""
    value, dtype = PROJECTIONS[attribute]
    x, results = cases.draw(rng, (2, 16, 16), dtype), []
    for library in (nnx if swapped else fast, nnx):
        layer = library.MultiHeadAttention(
            num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(dtype)
        )
        for projection in (layer.query, layer.key, layer.value):
            setattr(projection, attribute, value)
        layer = layer if results or not swapped else fast.swap(layer)[0]
        results.append(layer(x))
    cases.assert_same(*results, ulp=64, rounding="bfloat16" if attribute == "dtype" else dtype)


def test_decoding_with_a_cache_of_another_dtype(rng):
    """The projections give the cache's dtype."""
    x, results = cases.draw(rng, (2, 1, 16), "bfloat16"), []
    for library in (fast, nnx):
        layer = library.MultiHeadAttention(
            num_heads=4, in_features=16, decode=True, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16
        )
        for projection in (layer.query, layer.key, layer.value):
            projection.preferred_element_type = jnp.float32
        layer.init_cache((2, 4, 16), dtype=jnp.float32)
        results.append([layer(x), layer(x)])
    cases.assert_same(*results, ulp=64, rounding="bfloat16")


@pytest.mark.parametrize("dtypes", [("float32", "float32", "bfloat16"), ("float16", "bfloat16", "float16")], ids=str)
@pytest.mark.parametrize("layer", ["Linear", "LinearGeneral"])
def test_preferred_element_type(rng, layer, dtypes):
    """Of the product: the bias widens the result."""
    x_dtype, param_dtype, preferred = dtypes
    x = cases.draw(rng, (3, 8), x_dtype)
    got, wanted = (
        getattr(library, layer)(8, 4, preferred_element_type=preferred, param_dtype=param_dtype, rngs=nnx.Rngs(0))(x)
        for library in (fast, nnx)
    )
    cases.assert_same(got, wanted, rounding="bfloat16")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [4, 2, 1])
def test_causal_and_grouped_attention(rng, heads, masked):
    q, k, v = (cases.draw(rng, (2, 6, n, 8)) for n in (4, heads, heads))
    mask = cases.draw_mask(rng, 2, 4, 6, 6) if masked else None
    got, wanted = (
        cases.value_and_gradients(functools.partial(f, mask=mask, is_causal=True), q, k, v)
        for f in (fast.dot_product_attention, nnx.dot_product_attention)
    )
    cases.assert_same(got, wanted, ulp=32)


def test_attention_with_bias(rng):
    q, k, v = (cases.draw(rng, (2, 6, 4, 8), "bfloat16") for _ in range(3))
    bias = cases.draw(rng, (2, 4, 6, 6))
    got, wanted = (
        cases.value_and_gradients(f, q, k, v, bias) for f in (fast.dot_product_attention, nnx.dot_product_attention)
    )
    cases.assert_same(got, wanted, rounding="bfloat16")


class _Stored(nnx.Module):
    """Where attention weights are stored."""


def _options(kept):
    """Options of attention that keeps its logits in the dtype of the computation, and others."""
    by = {"dropout": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(1)}, "undropped": {"dropout_rate": 0.5}}
    return {"": {}, "dropout": by["dropout"], "undropped": by["undropped"] | {"deterministic": True}}[kept]


@pytest.mark.parametrize("case", cases.HIDING_BIASES)
@pytest.mark.parametrize("kept", ["", "dropout"])
def test_biases_of_minus_infinity(rng, case, kept):
    q, k, v = (cases.draw(rng, (2, 4, 2, 8)) for _ in range(3))
    bias, mask = cases.HIDING_BIASES[case]
    bias = jnp.broadcast_to(bias, (2, 2, 4, 4))
    mask = None if mask is None else jnp.broadcast_to(mask, (2, 2, 4, 4))
    for causal in (False, True):
        options = _options(kept) | {"mask": mask, "is_causal": causal}
        got, wanted = (
            cases.value_and_gradients(functools.partial(f, **options), q, k, v, bias)
            for f in (fast.dot_product_attention, nnx.dot_product_attention)
        )
        cases.assert_same(got, wanted, ulp=32)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("kept", ["", "dropout", "undropped", "stored"])
def test_large_products_of_float16(kept, heads):
    """Are scaled before they are rounded: they reach as far as Flax's."""
    q, k = (jnp.full((1, 4, n, 64), 80, jnp.float16) for n in (2, heads))
    results = []
    for attend in (fast.dot_product_attention, nnx.dot_product_attention):
        options = {"module": _Stored()} if kept == "stored" else _options(kept)
        if heads == 1 and kept:
            attend = functools.partial(fast.dot_product_attention) if attend is fast.dot_product_attention else None
        if attend is not None:
            results.append(attend(q, k, k, **options))
    assert np.isfinite(results[0]).all()
    if len(results) == 2:
        cases.assert_same(*results, ulp=4)


def test_rope(rng):
    if not hasattr(nnx, "RoPE"):
        pytest.skip("this Flax has no RoPE")
    q, k, v = (cases.draw(rng, (2, 6, 4, 8)) for _ in range(3))
    rope, positions = nnx.RoPE(), jnp.arange(3.0, 9.0)
    got = fast.dot_product_attention_with_rope(q, k, v, rope=rope)
    cases.assert_same(got, nnx.dot_product_attention_with_rope(q, k, v, rope=rope), ulp=32)

    def rotate(x):
        return jnp.stack([rope(x[:, :, head], positions) for head in range(4)], axis=2)

    got = fast.dot_product_attention_with_rope(q, k, v, rope=rope, input_positions=positions)
    cases.assert_same(got, nnx.dot_product_attention(rotate(q), rotate(k), v), ulp=32)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_weights(rng):
    x, mask = cases.draw(rng, (2, 6, 16)), cases.draw_mask(rng, 2, 4, 6, 6)
    found = []
    for library in (fast, nnx):
        layer = library.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
        out = layer(x, mask=mask, sow_weights=True)
        found.append((out, nnx.state(layer, nnx.Intermediate)["attention_weights"].get_value()[0]))
    cases.assert_same(*found, ulp=32)


def test_decoding(rng):
    x = cases.draw(rng, (2, 5, 16))
    runs = []
    for library in (fast, nnx):
        layer = library.MultiHeadAttention(4, 16, decode=True, rngs=nnx.Rngs(0))
        layer.init_cache(x.shape)
        runs.append([layer(x[:, token : token + 1]) for token in range(5)])
    cases.assert_same(*runs, ulp=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\), got 1.0"),
        ({"dropout_rate": 0.1}, "dropout_rate=0.1 needs a dropout_rng"),
        ({"key": jnp.ones((2, 6, 3, 8)), "value": jnp.ones((2, 6, 3, 8))}, "heads must divide"),
        ({"value": jnp.ones((2, 5, 4, 8))}, "must agree except for their last axes"),
    ],
)
def test_attention_errors(change, message):
    arrays = dict.fromkeys(("query", "key", "value"), jnp.ones((2, 6, 4, 8)))
    with pytest.raises(ValueError, match=message):
        fast.dot_product_attention(**{**arrays, **change})

"""jaxops.flax.linen beside flax.linen: parameters, results and gradients of every layer."""

import functools
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from support import contract
from support import flax_cases as cases
from support.meshes import mesh_of

from jaxops.flax import linen

pytestmark = pytest.mark.usefixtures("full_precision")

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def compare(rng, ours, theirs, *arguments, launches=1, rounding=None, ulp=8, rngs=KEYS, **options):
    """Equal variables from the same key, and equal results and gradients with the same variables."""
    variables = [layer.init(rngs, *arguments, **options) for layer in (ours, theirs)]
    jax.tree.map(np.testing.assert_array_equal, *variables)
    assert [x.dtype for x in jax.tree.leaves(variables[0])] == [x.dtype for x in jax.tree.leaves(variables[1])]
    values = cases.disturb(rng, nn.unbox(variables[1]))

    def run(layer):
        return lambda values, *arguments: layer.apply(values, *arguments, rngs=rngs, **options)

    if launches is not None:
        assert contract.count_launches(run(ours), values, *arguments) == launches
    got, wanted = (cases.value_and_gradients(run(layer), values, *arguments) for layer in (ours, theirs))
    cases.assert_same(got, wanted, rounding=rounding, ulp=ulp)
    return got


@pytest.mark.parametrize(("case", "dtype"), cases.norms("bfloat16", "int32"))
@pytest.mark.parametrize("layer", ["LayerNorm", "RMSNorm"])
def test_norm(rng, layer, case, dtype):
    options, shape = cases.NORMS[case]
    options = {k: v for k, v in options.items() if k != "use_bias" or layer == "LayerNorm"}
    x = cases.draw(rng, shape, dtype)
    ours, theirs = (getattr(library, layer)(**options) for library in (linen, nn))
    coarse = "bfloat16" if dtype == "bfloat16" or "dtype" in options else None
    compare(rng, ours, theirs, x, rounding=coarse or options.get("param_dtype"), ulp=16 if coarse is None else 4)


@pytest.mark.parametrize("shape", [(3, 1), (1, 8), (3, 8), (8,)], ids=str)
def test_layer_norm_mask(rng, shape):
    x, mask = cases.draw(rng, (3, 8)), jnp.asarray(rng.random(shape) < 0.7).at[..., 0].set(True)
    compare(rng, linen.LayerNorm(reduction_axes=(0, 1)), nn.LayerNorm(reduction_axes=(0, 1)), x, mask=mask, ulp=32)


def test_what_norms_leave_to_flax(rng, fallback):
    x, mask = cases.draw(rng, (3, 8)), jnp.asarray(rng.random((3, 8)) < 0.7)
    compare(rng, linen.RMSNorm(), nn.RMSNorm(), x, mask=mask, launches=0)

    def over_devices(library):
        layer = library.LayerNorm(axis_name="i", use_scale=False, use_bias=False)
        return jax.vmap(functools.partial(layer.apply, {}), axis_name="i")(x)

    cases.assert_same(over_devices(linen), over_devices(nn))
    cases.assert_same(*(lib.LayerNorm(use_bias=False).init_with_output(KEYS, x + 1j)[0].real for lib in (linen, nn)))
    messages = sorted(str(w.message) for w in fallback.list)
    assert ["axis 'i'" in messages[0], "complex64" in messages[1], "mask" in messages[2]] == [True] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": jnp.complex64},
        {"param_dtype": jnp.complex64},
        {"epsilon": np.array([1e-5], np.float32)},
        {"epsilon": -1e-3},
    ],
    ids=str,
)
@pytest.mark.parametrize("layer", ["LayerNorm", "RMSNorm"])
def test_attributes_without_a_kernel(rng, layer, options, fallback):
    x = cases.draw(rng, (3, 8))
    got, wanted = (getattr(library, layer)(**options).init_with_output(KEYS, x)[0] for library in (linen, nn))
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(got, np.complex64), np.asarray(wanted, np.complex64))
    model, report = linen.swap(getattr(nn, layer)(**options))
    jax.eval_shape(model.init, KEYS, x)
    assert "kernel" in report.kept[layer]


@pytest.mark.parametrize("layer", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("axes", [{}, {"reduction_axes": 0}], ids=str)
def test_residual(rng, layer, axes):
    x, residual = (cases.draw(rng, (5, 16)) for _ in range(2))
    ours, theirs = (getattr(library, layer)(**axes) for library in (linen, nn))
    values = cases.disturb(rng, theirs.init(KEYS, x))
    got = ours.apply(values, x, residual=residual)
    cases.assert_same(got, (theirs.apply(values, x + residual), x + residual))
    assert contract.count_launches(lambda x, r: ours.apply(values, x, residual=r), x, residual) == 1


def test_variance_is_stable():
    x = jnp.array([[1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3]])
    y = linen.LayerNorm(use_fast_variance=True).init_with_output(KEYS, x)[0]
    np.testing.assert_allclose(y, [[-1.3416, -0.4472, 0.4472, 1.3416]], atol=1e-3)


def mixed(inputs, kernel, bias, *, dtype):
    return inputs.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), bias


DENSES = {
    "defaults": {},
    "no bias": {"use_bias": False},
    "bf16": {"dtype": jnp.bfloat16},
    "bf16 parameters": {"param_dtype": jnp.bfloat16},
    "f16": {"dtype": jnp.float16, "param_dtype": jnp.float16},
    "precision": {"precision": jax.lax.Precision.HIGHEST},
    "mixed": {"promote_dtype": mixed, "bias_init": nn.initializers.normal()},
    "partitioned": {"kernel_init": nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", DENSES)
def test_dense(rng, case, dtype):
    options = DENSES[case]
    x = cases.draw(rng, (3, 5, 16), dtype)
    rounding = options.get("dtype", jnp.bfloat16 if dtype == "bfloat16" or case == "mixed" else None)
    rounding = jnp.bfloat16 if dtype == "bfloat16" else rounding
    compare(rng, linen.Dense(12, **options), nn.Dense(12, **options), x, rounding=rounding)


@pytest.mark.parametrize("options", [{"dtype": jnp.complex64}, {"param_dtype": jnp.complex64}], ids=str)
@pytest.mark.parametrize("layer", ["Dense", "DenseGeneral"])
def test_complex_products(rng, layer, options, fallback):
    x, options = cases.draw(rng, (3, 5, 16)), {"bias_init": nn.initializers.normal(), **options}
    got, wanted = (getattr(library, layer)(12, **options).init_with_output(KEYS, x)[0] for library in (linen, nn))
    assert got.dtype == wanted.dtype == np.complex64
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_complex_attention(rng, fallback):
    """Left to Flax's formula, with and without a mask."""
    q, k, v = (cases.draw(rng, (2, 4, 2, 8)) + 1j * cases.draw(rng, (2, 4, 2, 8)) for _ in range(3))
    for mask in (None, np.tril(np.ones((4, 4), bool))):
        got, wanted = (library.dot_product_attention(q, k, v, mask=mask) for library in (linen, nn))
        assert got.dtype == wanted.dtype == np.complex64
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_exact", "silu"])
def test_dense_activation(rng, activation):
    functions = {"gelu_exact": functools.partial(jax.nn.gelu, approximate=False)}
    function = functions.get(activation) or getattr(jax.nn, activation)
    x = cases.draw(rng, (3, 5, 16))
    layer = linen.Dense(12, activation=activation)
    values = cases.disturb(rng, layer.init(KEYS, x))
    got, wanted = (
        cases.value_and_gradients(run, values, x)
        for run in (layer.apply, lambda values, x: function(nn.Dense(12).apply(values, x)))
    )
    cases.assert_same(got, wanted, ulp=16)
    assert contract.count_launches(layer.apply, values, x) == 1


class GatedMLP(nn.Module):
    """linen.GatedMLP of Flax's layers."""

    hidden_features: int
    out_features: int | None = None
    activation: str = "silu"
    kernel_init: Any = nn.initializers.lecun_normal()
    down_kernel_init: Any = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision
        )
        gate, up = (dense(self.hidden_features, kernel_init=self.kernel_init, name=name)(x) for name in ("gate", "up"))
        init = self.down_kernel_init or self.kernel_init
        down = dense(self.out_features or x.shape[-1], kernel_init=init, name="down")
        return down(cases.ACTIVATIONS[self.activation](gate) * up)


@pytest.mark.parametrize("case", cases.GATED_MLPS)
def test_gated_mlp(rng, case):
    """Parameters, also from the same key, results and gradients are those of three dense layers."""
    options, dtype = cases.GATED_MLPS[case]
    flax = {name: value for name, value in options.items() if name != "recompute"}
    coarse = jnp.bfloat16 if "bf16" in case else None
    ours, theirs = linen.GatedMLP(16, **options), GatedMLP(16, **flax)
    compare(rng, ours, theirs, cases.draw(rng, (3, 5, 8), dtype), launches=None, rounding=coarse, ulp=16)


def test_gated_mlp_is_one_op(rng):
    x = cases.draw(rng, (3, 8), "bfloat16")
    layer = linen.GatedMLP(16, dtype=jnp.bfloat16)
    variables = layer.init(KEYS, x)
    text = str(jax.make_jaxpr(layer.apply)(variables, x))
    assert text.count("jaxops_gated_mlp[") == 1 and "jaxops_matmul" not in text and "dot_general" not in text


def test_partitioned_gated_mlp():
    """The boxes of the kernels are the given ones, and the split kernels stay where they are."""
    mesh = mesh_of((2, 4), ("data", "model"))
    init, x = nn.initializers.lecun_normal(), jnp.ones((4, 8))
    layer = linen.GatedMLP(
        16,
        kernel_init=nn.with_partitioning(init, (None, "model")),
        down_kernel_init=nn.with_partitioning(init, ("model", None)),
    )
    specs = nn.get_partition_spec(jax.eval_shape(layer.init, KEYS, x))["params"]
    wanted = {"gate": (None, "model"), "up": (None, "model"), "down": ("model", None)}
    assert specs == {name: {"kernel": jax.P(*spec)} for name, spec in wanted.items()}
    values = nn.unbox(layer.init(KEYS, x))
    split = jax.device_put(values["params"], jax.tree.map(functools.partial(jax.NamedSharding, mesh), specs))
    run = jax.jit(lambda params: layer.apply({"params": params}, x))
    assert "all-gather" not in run.lower(split).compile().as_text()
    np.testing.assert_allclose(run(split), layer.apply(values, x), rtol=1e-5, atol=1e-6)


def test_own_dot_general(rng):
    calls = []

    def product(*args, **options):
        calls.append(options)
        return jax.lax.dot_general(*args, **options)

    x = cases.draw(rng, (3, 16))
    compare(rng, linen.Dense(4, dot_general=product), nn.Dense(4), x, launches=0)
    compare(rng, linen.DenseGeneral(4, dot_general_cls=lambda: product), nn.DenseGeneral(4), x, launches=0)
    assert calls
    with pytest.raises(ValueError, match=r"activation='relu'.*dot_general= is given"):
        linen.Dense(4, dot_general=product, activation="relu").init(KEYS, x)


DENSE_GENERALS = {
    "one axis": ({"features": 4}, (2, 3, 6)),
    "heads": ({"features": (4, 5)}, (2, 3, 6)),
    "out of heads": ({"features": 5, "axis": (-2, -1)}, (2, 3, 4, 6)),
    "inner axes": ({"features": (4, 5), "axis": (1, -1)}, (2, 3, 6, 7)),
    "first axis": ({"features": 4, "axis": 0}, (5, 3)),
    "batch": ({"features": (4, 5), "axis": (-1,), "batch_dims": (0, 1)}, (2, 3, 7, 6)),
    "batch, no bias": ({"features": 4, "axis": (2, 3), "batch_dims": (0,), "use_bias": False}, (2, 5, 3, 6)),
    "bf16": ({"features": (4, 5), "dtype": jnp.bfloat16}, (2, 3, 6)),
}


@pytest.mark.parametrize("case", DENSE_GENERALS)
def test_dense_general(rng, case):
    options, shape = DENSE_GENERALS[case]
    options = {"bias_init": nn.initializers.normal(), **options}
    compare(
        rng,
        linen.DenseGeneral(**options),
        nn.DenseGeneral(**options),
        cases.draw(rng, shape),
        rounding=options.get("dtype"),
        ulp=16,
    )


def test_dense_general_without_input_features():
    """A kernel of no rows is still a matrix to its initialiser."""
    inits = {"kernel_init": nn.initializers.zeros, "bias_init": nn.initializers.ones}
    got, wanted = (library.DenseGeneral(3, **inits).init_with_output(KEYS, jnp.ones((2, 0))) for library in (linen, nn))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_dense_general_batch_axes_must_lead():
    with pytest.raises(ValueError, match=r"batch_dims must be the leading axes 0, 1, ..., got \(1,\)"):
        linen.DenseGeneral(4, axis=-1, batch_dims=(1,)).init(KEYS, jnp.ones((2, 3, 4)))


@pytest.mark.parametrize("case", cases.ATTENTIONS)
def test_attention(rng, case):
    options, call = cases.ATTENTIONS[case]
    x, mask = cases.draw(rng, (2, 6, 16)), cases.draw_mask(rng, 2, 4, 6, 6)
    compare(
        rng,
        linen.MultiHeadDotProductAttention(num_heads=4, **options),
        nn.MultiHeadDotProductAttention(num_heads=4, **options),
        x,
        launches=5 + 2 * ("normalize_qk" in options),
        rounding=options.get("dtype"),
        ulp=64,
        **call(mask),
    )


def test_cross_attention_and_names(rng):
    q, k, v = (cases.draw(rng, (2, n, 16)) for n in (5, 7, 7))
    ours, theirs = linen.MultiHeadAttention(num_heads=2), nn.MultiHeadAttention(num_heads=2)
    compare(rng, ours, theirs, q, k, v, launches=7, ulp=64, mask=cases.draw_mask(rng, 2, 2, 5, 7))


def test_parameters_of_another_attention():
    """Are refused, or made, as by Flax's layer, also where the projections are one product."""
    x = jnp.ones((2, 5, 8))
    variables = nn.MultiHeadDotProductAttention(2).init(KEYS, x)
    without = jax.tree.map(lambda x: x, variables)
    del without["params"]["key"]["bias"]
    layer = linen.MultiHeadDotProductAttention(2)
    with pytest.raises(flax.errors.ScopeParamShapeError):
        linen.MultiHeadDotProductAttention(4).apply(variables, x)
    with pytest.raises(flax.errors.ScopeParamShapeError):
        layer.apply(variables, x[..., :6])
    with pytest.raises(flax.errors.ScopeParamNotFoundError):
        layer.apply(without, x)
    _, made = layer.apply({}, x, mutable=["params"], rngs=KEYS)
    jax.tree.map(np.testing.assert_array_equal, made, variables)


def test_weights_of_float64(x64):
    q = jnp.ones((2, 3, 2, 4), jnp.float64)
    for force in (False, True):
        got, wanted = (
            f(q, q, force_fp32_for_softmax=force)
            for f in (linen.dot_product_attention_weights, nn.dot_product_attention_weights)
        )
        assert got.dtype == wanted.dtype


@pytest.mark.parametrize("shape", [(5, 1, 3, 3), (5, 1, 2, 3, 3)], ids=str)
def test_masks_and_biases_of_more_batches(rng, shape):
    """Than query, key and value have: these broadcast."""
    q, k, v = (cases.draw(rng, (1, 3, 2, 4)) for _ in range(3))
    mask, bias = jnp.asarray(rng.random(shape) < 0.7), cases.draw(rng, shape)
    for options in ({"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias}):
        got, wanted = (
            cases.value_and_gradients(functools.partial(library.dot_product_attention, **options), q, k, v)
            for library in (linen, nn)
        )
        cases.assert_same(got, wanted, ulp=32)


def test_force_fp32_for_softmax_and_sown_weights(rng):
    x, mask = cases.draw(rng, (2, 6, 16)), cases.draw_mask(rng, 2, 4, 6, 6)
    results = []
    for library in (linen, nn):
        layer = library.MultiHeadDotProductAttention(num_heads=4, dtype=jnp.bfloat16, force_fp32_for_softmax=True)
        variables = layer.init(KEYS, x)
        out, stored = layer.apply(variables, x, mask=mask, sow_weights=True, mutable="intermediates")
        weights = stored["intermediates"]["attention_weights"]
        assert len(weights) == 1 and weights[0].dtype == jnp.float32
        results.append((out, weights[0]))
    cases.assert_same(*results, rounding="bfloat16")


def test_decoding(rng):
    x = cases.draw(rng, (2, 5, 16))
    runs = []
    for library in (linen, nn):
        layer = library.MultiHeadDotProductAttention(num_heads=4, decode=True)
        variables = layer.init(KEYS, x)
        outs = []
        for token in range(5):
            out, changed = layer.apply(variables, x[:, token : token + 1], mutable="cache")
            variables = {**variables, **changed}
            outs.append(out)
        runs.append((outs, variables))
    cases.assert_same(*runs, ulp=64)


def test_causal_attention(rng):
    """`causal=True`, alone and with a mask, is the mask of nn.make_causal_mask."""
    q, k, v = (cases.draw(rng, (2, 6, 4, 8)) for _ in range(3))
    causal, mask = nn.make_causal_mask(jnp.ones((2, 6))), cases.draw_mask(rng, 2, 1, 6, 6)
    for given in (None, mask):
        got = cases.value_and_gradients(
            lambda *qkv, given=given: linen.dot_product_attention(*qkv, mask=given, causal=True), q, k, v
        )
        combined = nn.combine_masks(causal, given)
        wanted = cases.value_and_gradients(
            lambda *qkv, combined=combined: nn.dot_product_attention(*qkv, mask=combined), q, k, v
        )
        cases.assert_same(got, wanted, ulp=32)


@pytest.mark.parametrize("queries, keys, features", [(640, 640, 64), (600, 1000, 128), (1000, 520, 72)], ids=str)
def test_long_causal_attention(queries, keys, features, rng):
    """16-bit floats and 512 tokens or more: keys that no query sees are not even multiplied."""
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, n, 2, d)), jnp.bfloat16)
        for n, d in ((queries, 64), (keys, 64), (keys, features))
    )
    mask = jnp.tril(jnp.ones((1, 1, queries, keys), bool))

    @functools.partial(jax.jit, static_argnums=0)
    def results(attend, *qkv):
        out, pullback = jax.vjp(attend, *qkv)
        return out, *pullback(jnp.cos(out)), jax.jvp(attend, qkv, tuple(jnp.sin(x) for x in qkv))[1]

    got = results(lambda *qkv: linen.dot_product_attention(*qkv, causal=True), q, k, v)
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    wanted = results(lambda *qkv: nn.dot_product_attention(*qkv, mask=mask), *exact)
    for ours, theirs in zip(got, wanted, strict=True):
        assert jnp.linalg.norm(ours.astype(jnp.float32) - theirs) <= 2e-2 * jnp.linalg.norm(theirs)


def test_attention_with_bias(rng):
    q, k, v = (cases.draw(rng, (2, 6, 4, 8), "bfloat16") for _ in range(3))
    bias, mask = cases.draw(rng, (4, 6, 6)), cases.draw_mask(rng, 2, 4, 6, 6)
    got, wanted = (
        cases.value_and_gradients(lambda q, k, v, bias, f=f: f(q, k, v, bias=bias, mask=mask), q, k, v, bias)
        for f in (linen.dot_product_attention, nn.dot_product_attention)
    )
    cases.assert_same(got, wanted, rounding="bfloat16")
    got, wanted = (f(q, k, bias, mask) for f in (linen.dot_product_attention_weights, nn.dot_product_attention_weights))
    cases.assert_same(got, wanted)


@pytest.mark.parametrize("case", cases.HIDING_BIASES)
@pytest.mark.parametrize("options", [{}, {"dropout_rate": 0.5, "dropout_rng": jax.random.key(1)}], ids=["", "dropout"])
def test_biases_of_minus_infinity(rng, case, options):
    """A key whose bias is -inf is not seen, whatever the mask says of it."""
    q, k, v = (cases.draw(rng, (2, 4, 2, 8)) for _ in range(3))
    bias, mask = cases.HIDING_BIASES[case]
    causal = nn.make_causal_mask(jnp.ones((1, 4)), dtype=bool)
    for is_causal in (False, True):
        combined = mask if not is_causal else causal if mask is None else causal & mask
        attend = functools.partial(linen.dot_product_attention, causal=is_causal, **options)
        flaxs = functools.partial(nn.dot_product_attention, **options)
        got = cases.value_and_gradients(lambda *x, f=attend: f(*x, mask=mask), q, k, v, bias)
        wanted = cases.value_and_gradients(lambda *x, f=flaxs, mask=combined: f(*x, mask=mask), q, k, v, bias)
        cases.assert_same(got, wanted, ulp=32)
        if not options:
            got = linen.dot_product_attention_weights(q, k, bias, mask, causal=is_causal)
            cases.assert_same(got, nn.dot_product_attention_weights(q, k, bias, combined), ulp=32)


def test_rows_that_nothing_hides_and_no_bias_lets_through():
    """Are NaN, in Flax too: large negative logits stand for masked keys, and no key is masked."""
    q, bias = jnp.ones((1, 4, 2, 8)), jnp.zeros((4, 4)).at[1].set(-jnp.inf)
    mask = jnp.ones((4, 4), bool).at[2, 1:3].set(False)
    got, wanted = (f(q, q, q, bias, mask) for f in (linen.dot_product_attention, nn.dot_product_attention))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    assert np.isnan(got[:, 1]).all()
    assert np.isfinite(got[:, 2:]).all()


@pytest.mark.parametrize("depth", [64, 48, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_large_products_of_float16(causal, depth):
    """Are scaled before they are rounded: they reach as far as Flax's."""
    q = jnp.full((1, 4, 2, depth), (8 * 5e4 / depth) ** 0.5 if depth > 1 else 200, jnp.float16)
    mask = nn.make_causal_mask(jnp.ones((1, 4))) if causal else None
    for change in ({}, {"dropout_rate": 0.5, "dropout_rng": jax.random.key(1)}):
        got, wanted = (
            cases.value_and_gradients(functools.partial(attend, **change), q, q, q)
            for attend in (
                functools.partial(linen.dot_product_attention, causal=causal),
                functools.partial(nn.dot_product_attention, mask=mask),
            )
        )
        cases.assert_same(got[0], wanted[0], ulp=4)
        assert all(np.isfinite(x).all() for x in (wanted[0], *got[1]))


def test_products_of_the_users_see_scaled_queries():
    """As in Flax: whatever they make of the logits is made of scaled ones."""

    def capped(subscripts, *operands):
        logits = jnp.einsum(subscripts, *operands)
        return 5 * jnp.tanh(logits / 5) if subscripts.endswith("qk") else logits

    q = 2 * jnp.ones((1, 3, 2, 8)).at[:, 1].set(-1)
    options = {"qk_attn_weights_einsum": capped, "attn_weights_value_einsum": jnp.einsum}
    got, wanted = (f(q, q, q, **options) for f in (linen.dot_product_attention, nn.dot_product_attention))
    cases.assert_same(got, wanted)


def test_attention_with_products_of_the_users(rng):
    q, k, v = (cases.draw(rng, (2, 6, 4, 8)) for _ in range(3))
    own = {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum}
    for options in (own, {"einsum_dot_general": jax.lax.dot_general}):
        got = linen.dot_product_attention(q, k, v, **options)
        cases.assert_same(got, nn.dot_product_attention(q, k, v, **options), ulp=32)
        attend = functools.partial(linen.dot_product_attention, **options)
        assert contract.count_launches(attend, q, k, v) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_attn_weights_einsum": jnp.einsum}, "must be given together"),
        (
            {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum, "precision": "highest"},
            "exclude each other",
        ),
        ({"key": jnp.ones((2, 6, 4, 7)), "value": jnp.ones((2, 6, 4, 7))}, r"query \(2, 6, 4, 8\) and key"),
        ({"value": jnp.ones((2, 5, 4, 8))}, "must agree except for their last axes"),
    ],
)
def test_attention_errors(change, message):
    arrays = dict.fromkeys(("query", "key", "value"), jnp.ones((2, 6, 4, 8)))
    with pytest.raises(ValueError, match=message):
        linen.dot_product_attention(**{**arrays, **change})


def test_intermediates_are_captured_once(rng):
    layer = linen.MultiHeadDotProductAttention(num_heads=2)
    x = cases.draw(rng, (1, 3, 8))
    _, stored = layer.apply(layer.init(KEYS, x), x, capture_intermediates=True, mutable="intermediates")
    assert all(len(calls) == 1 for calls in jax.tree.leaves(stored, is_leaf=lambda x: isinstance(x, tuple)))


def test_automatic_names():
    layers = (linen.LayerNorm(), linen.RMSNorm(), linen.Dense(3), linen.MultiHeadDotProductAttention(num_heads=3))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for layer in layers:
                x = layer.copy()(x)
            return x

    names = Model().init(KEYS, jnp.ones((2, 3)))["params"]
    assert sorted(names) == ["Dense_0", "LayerNorm_0", "MultiHeadDotProductAttention_0", "RMSNorm_0"]

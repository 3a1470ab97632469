"""Attention of Flax's layers without an array of weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.collectives import by_kind, collectives
from support.meshes import mesh_of

import jaxops
from jaxops.flax import linen
from jaxops.flax import nnx as fast
from jaxops.ops.attention import note_projections, projections_noted


def draw(rng, *shape, dtype="bfloat16"):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def kernels(function, *args):
    return {call.kernel for call in jaxops.explain(function, *args).calls}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("options", ["causal", "mask", "bias"])
def test_linen_function(dtype, batch, options, rng):
    q, k, v = (draw(rng, *batch, n, 2, 16, dtype=dtype) for n in (9, 12, 12))
    mask = jnp.asarray(rng.random((*batch[:1], *(1 for _ in batch[1:]), 1, 9, 12)) < 0.6)
    given = {
        "causal": {"mask": jnp.tril(jnp.ones((1, 9, 12), bool))},
        "mask": {"mask": mask.at[..., 3, :].set(False)},
        "bias": {"bias": draw(rng, 2, 9, 12, dtype=dtype)},
    }[options]
    ours = {"causal": True} if options == "causal" else given
    got = linen.dot_product_attention(q, k, v, **ours)
    assert kernels(functools.partial(linen.dot_product_attention, **ours), q, k, v) == {"attention_fwd"}
    exact = nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)), **given)
    theirs = nn.dot_product_attention(q, k, v, **given)
    assert got.dtype == theirs.dtype and got.shape == theirs.shape
    errors = [jnp.abs(x.astype(jnp.float32) - exact).max() for x in (got, theirs)]
    assert errors[0] <= 1.1 * errors[1] + 1e-3


@pytest.mark.parametrize("heads", [4, 2])
def test_nnx_function(heads, rng):
    q, k, v = draw(rng, 2, 9, 4, 16), *(draw(rng, 2, 12, heads, 16) for _ in range(2))
    mask = jnp.asarray(rng.random((2, 1, 9, 12)) < 0.6)
    for options in ({"is_causal": True}, {"mask": mask}):
        got = fast.dot_product_attention(q, k, v, **options)
        wanted = nnx.dot_product_attention(q, k, v, **options)
        assert kernels(functools.partial(fast.dot_product_attention, **options), q, k, v) == {"attention_fwd"}
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, wanted)), atol=0.03, rtol=0.03)


def test_large_logits_of_float16_do_not_overflow(rng):
    """q k^T reaches 1e6, which float16 does not hold."""
    q, k, v = (draw(rng, 1, 8, 1, 64, dtype="float16") * s for s in (100, 100, 1))
    for function in (linen.dot_product_attention, fast.dot_product_attention):
        assert np.isfinite(function(q, k, v)).all()


@pytest.mark.parametrize("why", ["stored", "dropped", "einsum", "float32", "depth"])
def test_what_has_its_weights_as_an_array(why, rng):
    depth = 12 if why == "depth" else 16
    q = draw(rng, 2, 9, 2, depth, dtype="float32" if why == "float32" else "bfloat16")
    options = {
        "dropped": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
        "einsum": {"einsum_dot_general": jax.lax.dot_general},
    }.get(why, {})
    if why == "stored":
        layer = linen.MultiHeadDotProductAttention(num_heads=2, dtype=jnp.bfloat16)
        variables = layer.init(jax.random.key(0), q[:, :, 0])
        run = lambda x: layer.apply(variables, x, sow_weights=True, mutable="intermediates")[1]  # noqa: E731
        (weights,) = jax.tree.leaves(run(q[:, :, 0]))
        assert weights.shape == (2, 2, 9, 9)
        assert "attention_fwd" not in kernels(run, q[:, :, 0])
        return
    found = kernels(functools.partial(linen.dot_product_attention, **options), q, q, q)
    assert "attention_fwd" not in found and "softmax_fwd" in found


class Decoder(nn.Module):
    """A decoder of two layers."""

    dtype: str = "bfloat16"

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        for _ in range(2):
            attention = nn.MultiHeadDotProductAttention(num_heads=2, dtype=self.dtype)
            x = x + attention(nn.LayerNorm(dtype=self.dtype)(x), mask=mask)
            x = x + nn.Dense(16, dtype=self.dtype)(nn.gelu(nn.Dense(32, dtype=self.dtype)(x)))
        return x


def test_a_swapped_decoder_has_no_array_of_weights(rng):
    """Nowhere in the step, forward or backward; Flax's has them. Memory grows with the tokens."""
    model, report = linen.swap(Decoder())

    def step(model, tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 16), jnp.bfloat16)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)

        def loss(variables, x):
            return jnp.sum(jnp.square(model.apply(variables, x).astype(jnp.float32)))

        return jax.jit(jax.grad(loss)).lower(variables, x)

    tokens = 3000
    assert f"{tokens}x{tokens}x" not in step(model, tokens).as_text()
    assert f"{tokens}x{tokens}x" in step(Decoder(), tokens).as_text()
    assert set(report.attention.values()) == {"fused"} and len(report.attention) == 2
    assert "jaxops MultiHeadDotProductAttention, fused" in str(report)
    memory = [step(model, n).compile().memory_analysis().temp_size_in_bytes for n in (2048, 4096)]
    assert memory[1] < 2.5 * memory[0]


def test_the_report_says_why_not(rng):
    class Dropping(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.5, deterministic=False)(x)

    model, report = linen.swap(Dropping())
    model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, draw(rng, 1, 5, 16))
    assert list(report.attention.values()) == ["with an array of weights: the weights are stored or dropped"]
    _, report = fast.swap(nnx.MultiHeadAttention(2, 16, decode=False, dropout_rate=0.1, rngs=nnx.Rngs(0)))
    assert report.attention["MultiHeadAttention"].startswith("fused in 16 bits") and "dropped" in str(report)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_decoding_with_a_cache(library, rng):
    """Token by token, a swapped layer gives what it gives for the sequence as a whole."""
    x = draw(rng, 2, 7, 32)
    if library == "linen":
        plain = nn.MultiHeadDotProductAttention(num_heads=2, dtype=jnp.bfloat16)
        variables = plain.init(jax.random.key(0), x)
        whole = plain.apply(variables, x, mask=nn.make_causal_mask(jnp.ones((2, 7))))
        layer, _ = linen.swap(nn.MultiHeadDotProductAttention(num_heads=2, dtype=jnp.bfloat16, decode=True))
        cache = layer.init(jax.random.key(0), x)["cache"]
        found = []
        for t in range(7):
            run = jax.jit(functools.partial(layer.apply, mutable="cache"))
            out, changed = run({**variables, "cache": cache}, x[:, t : t + 1])
            cache = changed["cache"]
            found.append(out)
        assert "attention_fwd" in kernels(run, {**variables, "cache": cache}, x[:, :1])
    else:
        plain = nnx.MultiHeadAttention(2, 32, dtype=jnp.bfloat16, decode=True, rngs=nnx.Rngs(0))
        whole = plain(x, mask=nnx.make_causal_mask(jnp.ones((2, 7))), decode=False)
        layer, _ = fast.swap(plain)
        layer.init_cache((2, 7, 32), dtype=jnp.bfloat16)
        found = [layer(x[:, t : t + 1]) for t in range(7)]
    got = np.asarray(jnp.concatenate(found, 1), np.float32)
    np.testing.assert_allclose(got, np.asarray(whole, np.float32), atol=0.03, rtol=0.03)


def test_patched_jax_nn(rng):
    q = draw(rng, 2, 9, 2, 16)
    calls = []
    with jaxops.patch_jax_nn(calls.append):
        got = jax.nn.dot_product_attention(q, q, q, is_causal=True)
        nnx.dot_product_attention(q, q, q)
        jax.nn.dot_product_attention(q, q, q, implementation="xla")
        jax.nn.dot_product_attention(q, q, q, return_residual=True)
    assert calls == ["dot_product_attention"] * 2
    wanted = jax.nn.dot_product_attention(q, q, q, is_causal=True)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, wanted)), atol=0.03, rtol=0.03)


# --- projections in one array ---


def joint_attention(joint, causal, noted=True, lengths=None, **given):
    """Attention of the parts of `[batch, tokens, heads, 3, depth]`, which the layers note.

    lengths: of the sequences' queries; their keys end 5 tokens later. given: other operands.
    """
    parts = [jnp.squeeze(part, -2) for part in jax.lax.split(joint, (1, 1, 1), axis=3)]
    with projections_noted():
        if noted:
            note_projections(joint, parts)
        if lengths is not None:
            given |= {
                "query_seq_lengths": jnp.asarray(lengths),
                "key_value_seq_lengths": jnp.minimum(jnp.asarray(lengths) + 5, joint.shape[1]),
            }
        return jaxops.dot_product_attention(*parts, is_causal=causal, **given)


def names(jaxpr):
    """The primitives in a jaxpr and the jaxprs in it; of attention also the operands' names."""
    found = []
    for equation in jaxpr.eqns:
        found.append((equation.primitive.name, equation.params.get("names")))
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            found += names(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("layers", ["linen", "nnx"])
def test_projections_are_not_copied(layers, rng):
    """The attention reads the product's result, and its gradient is the product's cotangent as it is."""
    x = draw(rng, 2, 24, 32)
    if layers == "linen":
        layer = linen.MultiHeadDotProductAttention(4, dtype=jnp.bfloat16)
        parameters = layer.init(jax.random.key(1), x)
        function = lambda x: layer.apply(parameters, x, mask=None).astype(jnp.float32).sum()  # noqa: E731
    else:
        layer = fast.MultiHeadAttention(4, 32, dtype=jnp.bfloat16, decode=False, rngs=nnx.Rngs(0))
        function = lambda x: layer(x, is_causal=True).astype(jnp.float32).sum()  # noqa: E731
    found = names(jax.make_jaxpr(jax.grad(function))(x).jaxpr)
    attention = {name: operands for name, operands in found if "attention" in name}
    assert attention["jaxops_attention_fwd"] == ("joint",)
    assert attention["jaxops_attention_bwd"][0] == "joint"
    assert "pad" not in dict(found)
    assert not any(
        name == "concatenate" for name, _ in found[[name for name, _ in found].index("jaxops_attention_fwd") :]
    )


@pytest.mark.parametrize(("causal", "lengths"), [(True, None), (False, [7, 19]), (True, [19, 0])])
def test_joint_projections(causal, lengths, rng):
    """Values and derivatives of every kind are those of separate arrays."""
    joint, tangent = (jnp.asarray(rng.standard_normal((2, 19, 2, 3, 8)), jnp.float32) for _ in range(2))

    def everything(noted):
        loss = lambda x: jnp.sum(jnp.sin(joint_attention(x, causal, noted, lengths)))  # noqa: E731
        gradient = jax.grad(loss)
        return (
            jax.value_and_grad(loss)(joint),
            jax.jvp(gradient, (joint,), (tangent,)),
            jax.vmap(gradient)(jnp.stack([joint, tangent])),
            jax.grad(jax.checkpoint(loss))(joint),
        )

    got, wanted = (jax.jit(everything, static_argnums=0)(noted) for noted in (True, False))
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_joint_projections_with_other_operands(rng):
    """Biases and sinks have gradients beside a joint operand, and masks may be mapped alone."""
    joint, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 19, 2, 3, 8), (1, 2, 19, 19)))
    sinks, masks = jnp.asarray([0.5, -1.0]), rng.random((3, 2, 1, 19, 19)) < 0.7
    masks[:, 0, 0, 3] = False  # a query that sees nothing

    def everything(noted):
        def loss(joint, bias, sinks, mask):
            return jnp.sum(jnp.sin(joint_attention(joint, True, noted, bias=bias, sinks=sinks, mask=mask)))

        of_masks = jax.vmap(lambda mask: joint_attention(joint, False, noted, mask=mask))
        return jax.grad(loss, (0, 1, 2))(joint, bias, sinks, masks[0]), of_masks(masks)

    got, wanted = (jax.jit(everything, static_argnums=0)(noted) for noted in (True, False))
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [P(None, "a"), P("a", None, "b"), P(None, "a", "b")], ids=str)
def test_joint_projections_on_devices(kind, spec, rng):
    """Split tokens need the keys and values of other devices, and nothing else; heads and batches need nothing."""
    joint = jnp.asarray(rng.standard_normal((2, 256, 4, 3, 8)), jnp.float32)
    pullback = lambda x, dy: jax.vjp(lambda x: joint_attention(x, True, lengths=[200, 256]), x)[1](dy)[0]  # noqa: E731
    dy = jnp.asarray(rng.standard_normal((2, 256, 4, 8)), jnp.float32)
    wanted = pullback(joint, dy)
    mesh = mesh_of((2, 2), ("a", "b"), kind)
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(joint, NamedSharding(mesh, spec)),
            jax.device_put(dy, NamedSharding(mesh, P(*spec))),
        )
        forward = jax.jit(lambda x: joint_attention(x, True)).lower(placed[0]).compile()
        got = jax.jit(pullback)(*placed)
    np.testing.assert_allclose(jax.device_get(got), wanted, rtol=1e-5, atol=1e-5)
    heads = 2 if "b" in spec else 4
    gathered = {"all-gather": 2 * 256 * heads * 2 * 8} if spec[1] == "a" else {}
    assert by_kind(collectives(forward)) == gathered


@pytest.mark.gpu("9.0")
@pytest.mark.parametrize("depth", [40, 64, 96, 128, 192, 256])
def test_joint_projections_give_the_same_bits(depth, rng):
    for tokens, causal, lengths in ((1, False, None), (65, True, None), (700, True, [650, 3]), (1000, False, [1, 999])):
        given = {"mask": jnp.asarray(rng.random((2, 1, tokens, tokens)) < 0.9)} if tokens == 65 else {}
        joint, dy = draw(rng, 2, tokens, 3, 3, depth), draw(rng, 2, tokens, 3, depth)

        def pullback(joint, dy, noted, causal=causal, lengths=lengths, given=given):
            out, vjp = jax.vjp(lambda joint: joint_attention(joint, causal, noted, lengths, **given), joint)
            return out, *vjp(dy)

        got, wanted = (jax.jit(pullback, static_argnums=2)(joint, dy, noted) for noted in (True, False))
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (a, b)))

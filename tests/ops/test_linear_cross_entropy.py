"""linear_cross_entropy."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.derivatives import check_second_order
from support.loss_cases import OPTIONS, exact_loss

import jaxops
from jaxops.ops._linear_cross_entropy import CHUNK_BYTES, CHUNK_TOKENS, TOKEN_STEP, _chunk_sizes

loss = jaxops.linear_cross_entropy
TOKENS, WIDTH, COLUMNS = 37, 8, 52

hopper = pytest.mark.gpu("9.0")


def draw(rng, dtype="float32", scale=1.0):
    """x, w, bias, weights, labels."""
    shapes = ((TOKENS, WIDTH), (WIDTH, COLUMNS), (COLUMNS,), (TOKENS,))
    arrays = [jnp.asarray((rng.standard_normal(shape) * scale).astype(dtype)) for shape in shapes]
    labels = rng.integers(0, COLUMNS, TOKENS).astype(np.int32)
    labels[:3] = 0, COLUMNS - 1, 2
    return *arrays, labels


def reference(x, w, bias, weights, labels, reduction=None, ignore_index=None, **options):
    """From the whole logits."""
    losses = exact_loss(x @ w + bias, labels, ignore_index=ignore_index, **options) * weights
    if reduction is None:
        return losses
    kept = weights if ignore_index is None else jnp.where(labels == ignore_index, 0, weights)
    return jnp.sum(losses) / (jnp.sum(kept) if reduction == "mean" else 1)


def value_and_gradients(function, operands, cotangent):
    value, pullback = jax.vjp(function, *operands)
    return value, *pullback(jnp.asarray(cotangent, value.dtype))


def pad(monkeypatch, padded):
    """Logits with more columns than the vocabulary, as on GPUs, or not."""
    monkeypatch.setattr("jaxops.ops._linear_cross_entropy.PADDED_ON", ("cpu", "cuda") if padded else ())


@pytest.mark.parametrize(("reduction", "padded"), [(None, False), ("sum", True), ("mean", False)])
def test_against_float64(reduction, padded, rng, full_precision, monkeypatch):
    """Every option; one chunk and several, the first with another size; random cotangents."""
    pad(monkeypatch, padded)
    x, w, bias, weights, labels = draw(rng)
    weights = jnp.abs(weights) + 0.1
    cotangent = rng.standard_normal(TOKENS if reduction is None else ())
    cases = [(options, tokens) for options in OPTIONS.values() for tokens in (None, 10)]

    @jax.jit
    def every(*operands):
        return [
            value_and_gradients(
                lambda x, w, b, s, o=options, n=tokens: loss(
                    x, w, labels, bias=b, weights=s, reduction=reduction, chunk_tokens=n, **o
                ),
                operands,
                cotangent,
            )
            for options, tokens in cases
        ]

    results = every(x, w, bias, weights)
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in (x, w, bias, weights)]
        for (options, _), got in zip(cases, results, strict=True):
            function = functools.partial(reference, labels=labels, reduction=reduction, **options)
            for value, wanted in zip(got, value_and_gradients(function, wide, cotangent), strict=True):
                np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-6 * float(jnp.max(jnp.abs(wanted)) + 1))


def test_tied_weights_and_leading_axes(rng, full_precision):
    x, w, _, _, labels = draw(rng)
    function = lambda x, w: loss(x, w, labels, reduction="mean", chunk_tokens=16)  # noqa: E731
    tied = lambda x, w: loss(x[None], w.T, labels[None], transposed=True, reduction="mean", chunk_tokens=16)  # noqa: E731
    got, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (tied, function))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    losses, lse = loss(x.reshape(1, TOKENS, WIDTH), w, labels[None], return_logsumexp=True)
    assert losses.shape == lse.shape == (1, TOKENS)
    np.testing.assert_allclose(lse[0], jax.nn.logsumexp(x @ w, -1), rtol=1e-5)


def test_f32_weights_with_bf16_products(rng):
    """f32 weights' gradients are summed over chunks in f32: they equal one product's, within f32's rounding."""
    x, w, _, _, labels = draw(rng)
    x = x.astype(jnp.bfloat16)
    for reduction in ("sum", None):
        gradient = jax.jit(
            jax.grad(lambda x, w, n, r=reduction: jnp.sum(loss(x, w, labels, reduction=r, chunk_tokens=n)), (0, 1)),
            static_argnums=2,
        )
        (dx, dw), (_, one) = gradient(x, w, 5), gradient(x, w, TOKENS)
        assert dx.dtype == jnp.bfloat16 and dw.dtype == np.float32
        np.testing.assert_allclose(dw, one, rtol=1e-5, atol=1e-5)
        for _ in range(2):
            np.testing.assert_array_equal(gradient(x, w, 5)[1], dw)


@pytest.mark.parametrize("padded", [False, True])
def test_labels_out_of_range_and_ignored_tokens(padded, rng, monkeypatch):
    pad(monkeypatch, padded)
    x, w, _, _, labels = draw(rng)
    labels[:4] = -1, -COLUMNS, -100, COLUMNS
    losses = loss(x, w, jnp.asarray(labels), chunk_tokens=10)
    np.testing.assert_array_equal(np.isnan(losses)[:5], [False, False, True, True, False])
    labels[3] = -100
    value, (dx, dw) = jax.value_and_grad(
        lambda x, w: loss(x, w, jnp.asarray(labels), ignore_index=-100, reduction="mean", chunk_tokens=10), (0, 1)
    )(x, w)
    np.testing.assert_allclose(value, np.mean(np.delete(np.asarray(losses), (2, 3))), rtol=1e-5)
    np.testing.assert_array_equal(dx[2:4], 0)
    assert np.isfinite(dw).all()
    everything = loss(x, w, jnp.full(TOKENS, -100), ignore_index=-100, reduction="mean")
    assert everything == 0
    with pytest.raises(ValueError, match=r"labels must be in \[-52, 52\), got -100"):
        loss(x, w, labels)


def test_derivatives_to_second_order(rng, x64):
    """Against differences: with and without a reduction, forward and reverse."""
    x, w, bias, weights, labels = (a[:7] if len(a) == TOKENS else a for a in draw(rng, "float64", 0.5))
    labels, options = labels % 9, OPTIONS["everything"]

    def every(x, w, bias, weights):
        arguments = {"bias": bias, "weights": weights, "chunk_tokens": 3}
        losses = loss(x, w, labels, **arguments, **options)
        return jnp.sum(jnp.sin(losses)) + loss(x, w, labels, reduction="sum", **arguments, **options) ** 2

    check_second_order(every, (x, w[:, :9], bias[:9], weights), rng)


def test_vmap(rng, full_precision):
    x, w, _, _, labels = draw(rng)
    xs, ws = jnp.stack([x, 2 * x]), jnp.stack([w, -w])
    one = lambda x, w: loss(x, w, labels, chunk_tokens=20)  # noqa: E731
    gradients = jax.grad(lambda x, w: loss(x, w, labels, reduction="mean", chunk_tokens=20), (0, 1))
    for axes in ((0, None), (None, 0), (0, 0)):
        operands = [many if axis == 0 else single for axis, many, single in zip(axes, (xs, ws), (x, w), strict=True)]
        for function in (one, gradients):
            got = jax.jit(jax.vmap(function, axes))(*operands)
            for i in range(2):
                wanted = function(*(a[i] if axis == 0 else a for a, axis in zip(operands, axes, strict=True)))
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                    np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-6)


# --- memory and work ---


def test_chunks_are_bounded():
    """XLA would unroll a loop over two chunks and hold both."""
    for tokens, columns, wanted in itertools.product(
        (*range(1, 9), 100, 512, 800, 1024, 1025, 2048, 2049, 4096, 8192, 8193, 32768, 10**6),
        (2, 50304, 128256, 262144, 524288, 10**7),
        (None, 1, 2, 3, 60, 1024),
    ):
        first, size = _chunk_sizes(tokens, columns, 2, wanted)
        default = max(TOKEN_STEP, CHUNK_BYTES // (columns * 2) // TOKEN_STEP * TOKEN_STEP)
        most = wanted or min(CHUNK_TOKENS, default)
        count = 1 + (tokens - first) // size
        assert first + (count - 1) * size == tokens and 0 < first <= most and 0 < size <= most
        assert count != 2 or tokens == 2
        assert most < 9 or count > 8 or 2 * first >= size
        assert count == 1 or size < 128 or size % 32 == 0


@pytest.mark.parametrize(
    ("tokens", "columns", "wanted", "sizes"),
    [
        (4096, 128256, None, (1024, 1536)),
        (8192, 128256, None, (2048, 2048)),
        (1024, 512000, None, (256, 384)),
        (1025, 262144, None, (257, 384)),
        (2048, 64, 1024, (512, 768)),
        (1025, 64, 512, (257, 384)),
        (4, 64, 2, (2, 1)),
    ],
)
def test_chunk_sizes(tokens, columns, wanted, sizes):
    assert _chunk_sizes(tokens, columns, 2, wanted) == sizes


@pytest.mark.parametrize("reduction", [None, "sum", "mean"])
def test_no_tokens(reduction):
    x, w, labels = jnp.ones((0, 16)), jnp.ones((16, 10)), jnp.ones(0, jnp.int32)
    total = lambda x, w: jnp.sum(loss(x, w, labels, reduction=reduction))  # noqa: E731
    value, (dx, dw) = jax.value_and_grad(total, (0, 1))(x, w)
    assert (value, dx.shape) == (0, x.shape) and not np.any(dw)


@pytest.mark.parametrize("sizes", ["d, 100", "16, v", "d, v"])
def test_symbolic_sizes(sizes, rng):
    width, columns = jax.export.symbolic_shape(sizes)
    step = jax.jit(jax.grad(lambda x, w: loss(x, w, jnp.zeros(64, jnp.int32), reduction="mean"), (0, 1)))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, width), (width, columns))]
    exported = jax.export.export(step, disabled_checks=jaxops.disabled_checks())(*shapes)
    x, w = (rng.standard_normal(shape).astype("bfloat16") for shape in ((64, 16), (16, 100)))
    for got, wanted in zip(exported.call(x, w), step(x, w), strict=True):
        np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=0.02, atol=1e-4)


#: (tokens, width, columns, transposed): whole tiles, parts of tiles, and vocabularies that no row of w is aligned to.
ONE_KERNEL = [
    (128, 64, 192, False),
    (256, 256, 1920, True),
    (300, 72, 1001, False),
    (137, 8, 56, False),
    (1000, 136, 4099, True),
    (513, 320, 3, True),
]


def whole_numbers(rng, tokens, width, columns, transposed, dtype):
    """x, w and a bias whose logits are whole numbers up to 256: exact in 16 bits, in whatever order they are added."""
    x = rng.integers(-1, 2, (tokens, width))
    w = rng.integers(-1, 2, (columns, width) if transposed else (width, columns))
    w[np.arange(w.shape[0]) % 8 > 3] = 0
    bias = rng.integers(-60, -40, columns)  # logits far from 0, which padded columns would have
    labels = rng.integers(0, columns, tokens).astype(np.int32)
    labels[:4] = 0, columns - 1, -1, -columns
    return *(jnp.asarray(a, dtype) for a in (x, w, bias)), jnp.asarray(labels)


def exact(x, w, bias, labels, transposed, **options):
    """The losses and the logsumexps in float64, on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        x, w, bias = (None if a is None else np.asarray(a, np.float64) for a in (x, w, bias))
        z = x @ (w.T if transposed else w) + (0 if bias is None else bias)
        return [np.asarray(exact_loss(jnp.asarray(z), labels, lse=lse, **options)) for lse in (False, True)]


def calls_one_kernel(function, *operands) -> bool:
    return "jaxops.linear_cross_entropy_fwd" in jax.jit(function).lower(*operands).as_text()


@hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens, width, columns, transposed", ONE_KERNEL)
def test_forward_in_one_kernel(tokens, width, columns, transposed, dtype, rng):
    """Every option, with a bias and without, in one chunk and in several."""
    x, w, bias, labels = whole_numbers(rng, tokens, width, columns, transposed, dtype)
    for options, b, chunk in itertools.product(OPTIONS.values(), (None, bias), (None, 128)):

        def function(x, w, b, options=options, chunk=chunk):
            options = {"transposed": transposed, "chunk_tokens": chunk, **options}
            return loss(x, w, labels, bias=b, return_logsumexp=True, **options)

        assert calls_one_kernel(function, x, w, b)
        for got, wanted in zip(jax.jit(function)(x, w, b), exact(x, w, b, labels, transposed, **options), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-5)


@hopper
def test_one_kernel_under_transformations(rng):
    """vmap, x64, shard_map on one device, and gradients without a reduction, whose forward pass it is."""
    x, w, bias, labels = whole_numbers(rng, 260, 64, 1000, False, "bfloat16")
    wanted, _ = exact(x, w, bias, labels, False)
    one = lambda x, w, labels: loss(x, w, labels, bias=bias)  # noqa: E731
    several = jax.vmap(one, (0, None, 0))
    assert calls_one_kernel(several, x[None], w, labels[None])
    np.testing.assert_allclose(several(jnp.stack([x, x]), w, jnp.stack([labels] * 2))[1], wanted, rtol=2e-6)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("v",))
    split = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(), P(None, "v"), P()), out_specs=P(), check_vma=False))
    np.testing.assert_allclose(split(x, w, labels), wanted, rtol=2e-6)
    with jax.enable_x64(True):
        np.testing.assert_allclose(one(x, w, labels.astype(np.int64)), wanted, rtol=2e-6)
    weights = jnp.asarray(rng.random(260), np.float32)
    both = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(weights * one(x, w, labels)), (0, 1)))
    assert calls_one_kernel(both, x, w)
    value, gradients = both(x, w)
    reduced = jax.value_and_grad(lambda x, w: loss(x, w, labels, bias=bias, weights=weights, reduction="sum"), (0, 1))
    same, others = reduced(x, w)
    np.testing.assert_allclose(value, same, rtol=1e-5)
    for a, b in zip(gradients, others, strict=True):
        np.testing.assert_allclose(*(np.asarray(g, np.float32) for g in (a, b)), rtol=0, atol=0.02 * np.abs(b).max())


@hopper
def test_one_kernel_with_labels_out_of_range_and_other_numbers(rng):
    """NaN for labels that no column has. Infinite and NaN logits are the plain form's; runs are equal to the bit."""
    x = rng.standard_normal((256, 64)).astype(np.float32)
    x[1], x[2, 3], x[3] = 1e4, np.nan, np.inf
    w = rng.standard_normal((64, 600)).astype(np.float32)
    bias = np.where(rng.random(600) < 0.5, -np.inf, 0).astype(np.float32)
    labels = rng.integers(0, 600, 256).astype(np.int32)
    labels[4:8] = 600, -601, 2**31 - 1, -(2**31)
    x, w, bias = (jnp.asarray(a, jnp.bfloat16) for a in (x, w, bias))
    labels = jnp.asarray(labels)  # NumPy's would be refused
    for b in (None, bias):
        one = jax.jit(lambda x, w, b: loss(x, w, labels, bias=b, return_logsumexp=True))
        plain = jax.jit(lambda x, w, b: loss(x[:100], w, labels[:100], bias=b, return_logsumexp=True))
        assert calls_one_kernel(one, x, w, b) and not calls_one_kernel(plain, x, w, b)
        for got, wanted in zip(one(x, w, b), plain(x, w, b), strict=True):
            np.testing.assert_allclose(got[:100], wanted, rtol=0.02, atol=0.1)
            assert np.isfinite(np.asarray(got[8:])).all() or b is not None
        assert np.isnan(np.asarray(one(x, w, b)[0])[4:8]).all()
        first = one(x, w, b)
        for _ in range(5):
            jax.tree.map(np.testing.assert_array_equal, one(x, w, b), first)


@hopper
def test_one_kernel_takes_slices(rng):
    """XLA copies operands that begin between multiples of 16 bytes."""
    x, w, _, labels = whole_numbers(rng, 256, 64, 384, False, "bfloat16")
    vectors = [jnp.concatenate([a.ravel()[:1], a.ravel()]) for a in (x, w)]
    cut = jax.jit(lambda x, w: loss(x[1:].reshape(256, 64), w[1:].reshape(64, 384), labels))
    np.testing.assert_allclose(cut(*vectors), exact(x, w, None, labels, False)[0], rtol=2e-6, atol=2e-5)


def compiled(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile()


def test_no_logits_of_all_tokens():
    """In a gradient's HLO nothing is as large as the logits; a chunk's logits bound the memory."""
    tokens, width, columns = 4096, 16, 3000
    labels = jnp.zeros(tokens, jnp.int32)
    for reduction in ("mean", None):
        step = jax.grad(lambda x, w, r=reduction: jnp.mean(loss(x, w, labels, reduction=r, chunk_tokens=256)), (0, 1))
        program = compiled(step, (tokens, width), (width, columns))
        sizes = [
            np.prod([int(d) for d in shape.split(",") if d] or [1])
            for shape in re.findall(r"(?:bf16|f32|s32|pred)\[([0-9,]*)\]", program.as_text())
        ]
        assert max(sizes) < tokens * columns // 8
        assert program.memory_analysis().temp_size_in_bytes < 2 * tokens * columns // 2


@pytest.mark.parametrize(
    ("tokens", "dtype", "reduction", "chunks"),
    [
        (2100, "bfloat16", "mean", 1),
        (2101, "bfloat16", "mean", 3),
        (2100, None, "mean", 3),
        (2100, "bfloat16", None, 3),
    ],
)
def test_few_tokens_need_no_wide_gradients(tokens, dtype, reduction, chunks):
    """Their logits are one chunk if w has 16 bits: they take no more memory than the gradient of w in f32."""
    width, columns = 1050, 8
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((width, columns), dtype or jnp.float32)
    labels = jnp.zeros(tokens, jnp.int32)
    step = jax.grad(lambda x, w: jnp.mean(loss(x, w, labels, reduction=reduction)), (0, 1))
    text = jax.jit(step).lower(x, w).as_text()
    assert ("while" in text) == (chunks > 1)
    assert bool(re.search(rf"dot_general.*-> tensor<{width}x{columns}xf32>", text)) == (chunks > 1)


def products(function, *shapes) -> int:
    """How many products a program has, each chunk's counted."""
    return len(re.findall(r"= [^=]* dot\(", compiled(function, *shapes).as_text()))


def test_number_of_products():
    """One forward; three with the gradients; four under jax.checkpoint, or without a reduction: none is taken twice."""
    labels = jnp.zeros(64, jnp.int32)
    shapes = ((64, 8), (8, 40))
    mean = lambda x, w: loss(x, w, labels, reduction="mean")  # noqa: E731
    squares = lambda x, w: jnp.sum(loss(x, w, labels) ** 2)  # noqa: E731
    assert products(mean, *shapes) == 1
    assert products(jax.grad(mean, (0, 1)), *shapes) == 3
    assert products(jax.grad(mean), *shapes) == 2
    checkpointed = jax.checkpoint(lambda x, w: jnp.sin(mean(jnp.sin(x), w)))
    assert products(jax.value_and_grad(checkpointed, (0, 1)), *shapes) in (3, 4)
    assert products(jax.grad(squares, (0, 1)), *shapes) in (3, 4)


# --- many devices ---


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("split", ["tokens", "vocabulary", "both"])
def test_split_over_devices(kind, split, rng, full_precision):
    """Values and gradients are one device's; nothing as large as the logits, nor x or w, is communicated."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    x = jnp.asarray(rng.standard_normal((16, 6)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((6, 24)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 24, 16))
    data, model = ("data" if split != "vocabulary" else None), ("model" if split != "tokens" else None)

    def step(x, w, labels, reduction):
        options = {"label_smoothing": 0.1, "z_loss": 1e-2, "chunk_tokens": 3}
        return jax.value_and_grad(lambda x, w: jnp.mean(loss(x, w, labels, reduction=reduction, **options)), (0, 1))(
            x, w
        )

    wanted = step(x, w, labels, "mean")
    with jax.set_mesh(mesh):
        places = (P(data, None), P(None, model), P(data))
        arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, w, labels), places, strict=True)]
        for reduction in ("mean", None):
            program = jax.jit(functools.partial(step, reduction=reduction)).lower(*arrays).compile()
            text = program.as_text()
            assert "all-gather" not in text and "all-to-all" not in text
            for a, b in zip(jax.tree.leaves(program(*arrays)), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_in_shard_map(rng, full_precision):
    """Tokens split by hand."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w, _, _, labels = draw(rng)
    x, labels = x[:36], jnp.asarray(labels[:36])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P())
    def total(x, w, labels):
        return jax.lax.psum(loss(x, w, labels, reduction="sum", chunk_tokens=7), "data")

    got = jax.jit(jax.value_and_grad(lambda x, w: total(x, w, labels), (0, 1)))(x, w)
    wanted = jax.value_and_grad(lambda x, w: loss(x, w, labels, reduction="sum"), (0, 1))(x, w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_gradients_of_weights_beside_labels_out_of_range(reduction, rng):
    """A label that is ignored may be outside of the vocabulary."""
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 8), (8, 10)))
    labels, weights = jnp.array([1, 5, -100, 9]), jnp.asarray(rng.random(4), jnp.float32)

    def ours(weights):
        return loss(x, w, labels, weights=weights, ignore_index=-100, reduction=reduction)

    def plain(weights):
        losses = jnp.where(labels == -100, 0, exact_loss(x @ w, jnp.maximum(labels, 0)))
        total = jnp.sum(jnp.where(labels == -100, 0, weights)) if reduction == "mean" else 1
        return jnp.sum(losses * weights) / total

    np.testing.assert_allclose(jax.grad(ours)(weights), jax.grad(plain)(weights), rtol=1e-4, atol=1e-5)
    tangents = [jax.jvp(f, (weights,), (weights**2,))[1] for f in (ours, plain)]
    np.testing.assert_allclose(*tangents, rtol=1e-4)


def test_second_derivatives_where_weights_are_zero(rng):
    """A step with weights, then the loss, whose derivative tells which weights would help."""
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 8), (8, 10)))
    labels = jnp.array([1, 5, 3, 9])

    def ours(w, weights):
        return loss(x, w, labels, weights=weights, reduction="sum", z_loss=1e-2)

    def plain(w, weights):
        return jnp.sum(weights * exact_loss(x @ w, labels, z_loss=1e-2))

    def helps(f):
        return jax.grad(lambda weights: f(w - 0.1 * jax.grad(f)(w, weights), jnp.ones(4)))(jnp.zeros(4))

    np.testing.assert_allclose(helps(ours), helps(plain), rtol=1e-4)


def test_no_vocabulary():
    out = loss(jnp.ones((2, 3)), jnp.ones((3, 0)), jnp.zeros(2, jnp.int32), ignore_index=0)
    np.testing.assert_array_equal(out, [0, 0])

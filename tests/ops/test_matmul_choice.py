"""Which kernel matmul chooses, and its lowering."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops import _kernel
from jaxops._device import H200, Device
from jaxops.flax import _functions
from jaxops.ops import _matmul_choice as choices
from jaxops.ops._matmul_kernel import Spec, kernel, precision_of

pytestmark = pytest.mark.usefixtures("full_precision")


def product(m, n, k, arithmetic="16bit", layout="NN", **options):
    return choices.Product(m, n, k, arithmetic, layout[0] == "T", layout[1] == "T", **options)


@pytest.mark.parametrize("arithmetic", choices.ARITHMETICS)
def test_choices_are_possible(arithmetic, rng):
    """The choice never contains a kernel that the handler would refuse."""
    shapes = [tuple(int(2 ** rng.uniform(0, 14)) for _ in range(3)) for _ in range(200)]
    for (m, n, k), layout, result_bytes in itertools.product(shapes, ("NN", "NT", "TN", "TT"), (2, 4)):
        choice = choices.choose(product(m, n, k, arithmetic, layout, result_bytes=result_bytes), H200)
        tile = choice.tile
        if choice.kernel == "few rows":
            rows_along = k if layout == "NT" else n
            assert arithmetic == "16bit" and m <= tile.rows and layout[0] == "N" and k % 8 == 0 and rows_along % 8 == 0
            assert tile in choices.FEW_ROWS_TILES and tile.rhs_transposed == (layout[1] == "T")
        if choice.kernel != "wgmma":
            continue
        assert tile in choices.TILES[arithmetic]
        assert tile.stores_any_rows or n * result_bytes % 16 == 0 or choice.partials
        assert arithmetic != "16bit" or layout != "TT"
        assert not tile.turned or (layout[1] == "N" and n % 4 == 0 and not choice.rhs_copy)
        assert choice.splits <= tile.parts or choice.partials
        assert choice.shared is None or choice.splits == 1
        itemsize = choices.ARITHMETICS[arithmetic].itemsize
        assert choice.splits <= math.ceil(k / choices.ARITHMETICS[arithmetic].depth)
        columns = k if layout[0] == "N" else m
        aligned_to = 4 if choice.in_pieces[0] else 16
        assert choice.lhs_copy or columns * itemsize % aligned_to == 0
        assert choice.lhs_copy or itemsize == 2 or (layout[0] == "N" and arithmetic != "f32")
        assert choice.rhs_copy or itemsize == 2 or layout[1] == "T" or tile.turned


def test_a_choice_depends_on_nothing_but_the_product_and_the_device():
    large = product(4096, 4096, 4096, "f32")
    assert choices.choose(large, H200) == choices.choose(large, H200)
    assert choices.choose(large, H200).kernel == "wgmma"
    assert choices.choose(product(16, 16, 16), H200).kernel == "xla"
    assert choices.choose(large, Device("8.0", 108)).kernel == "xla"
    assert choices.choose(product(1 << 30, 16, 16, "f8"), H200).kernel == "wgmma"
    assert choices.choose(product(1 << 31, 16, 16, "f8"), H200).kernel == "xla"
    assert choices.choose(product(4095, 4097, 4093), Device("8.0", 108)).kernel == "general"
    assert "tile" in str(choices.choose(large, H200))


@pytest.mark.parametrize(
    "layout, m, k, kernel",
    [
        ("NN", 4096, 100, "wgmma"),
        ("NT", 4096, 100, "wgmma"),
        ("NT", 4096, 99, "xla"),  # two copies for a short product
        ("TT", 4096, 100, "xla"),
        ("TN", 4096, 100, "xla"),  # no row lies along k
        ("TN", 4095, 4096, "wgmma"),
        ("NN", 4095, 4096, "xla"),  # no row lies along m
        ("TN", 4098, 4096, "xla"),  # rows along m are aligned to 4 bytes
        ("TN", 100, 4096, "xla"),  # few rows
    ],
)
def test_rows_are_aligned_as_they_lie_in_memory(layout, m, k, kernel):
    """XLA's dot is slow where a row is not aligned, unless the product is narrow."""
    assert choices.choose(product(m, 4096, k, layout=layout), H200).kernel == kernel


@pytest.mark.parametrize(
    "m, n, layout, kernel",
    [
        (8192, 50257, "NN", "wgmma"),
        (8192, 50258, "NN", "xla"),  # rows along n that are aligned to 4 bytes
        (8192, 50257, "NT", "xla"),  # operands are aligned, only the result is not
    ],
)
def test_logits_of_a_vocabulary_that_is_not_aligned(m, n, layout, kernel):
    assert choices.choose(product(m, n, 768, layout=layout), H200).kernel == kernel


@pytest.mark.parametrize(
    "m, n, k, kernel",
    [
        (128, 4096, 4096, "xla"),
        (8192, 128, 8192, "xla"),
        (256, 4096, 4096, "wgmma"),
        (4096, 4096, 63, "xla"),
        (4096, 4096, 64, "wgmma"),
        (512, 512, 512, "xla"),
        (1000, 1000, 1000, "wgmma"),
    ],
)
def test_narrow_products_in_full_precision_are_left_to_xla(m, n, k, kernel):
    """The copy that splits the large operand in parts takes as long as the product; short sums are as exact on XLA."""
    assert choices.choose(product(m, n, k, "f32"), H200).kernel == kernel


@pytest.mark.parametrize(
    "m, n, k, layout, tile, copies",
    [
        (2048, 2048, 2048, "NN", (256, 128), (0, 0)),
        (2048, 2048, 2048, "NT", (128, 256), (0, 0)),
        (2048, 2048, 2048, "TN", (256, 128), (2, 0)),  # a weight's gradient
        (2048, 2048, 2048, "TT", None, (0, 0)),
        (1024, 512, 640, "TN", None, (0, 0)),  # the copy takes as long as the product
        (1024, 1024, 1024, "NN", (128, 64), (0, 0)),
        (16, 4096, 4096, "NN", None, (0, 0)),
        (256, 256, 256, "NN", None, (0, 0)),
        (4096, 4096, 4096, "NN", None, (0, 0)),  # as fast on XLA
        (4096, 4096, 102, "NN", (256, 128), (1, 0)),
        (1002, 1002, 1002, "NN", (64, 64), (1, 2)),
        (753, 6080, 2368, "TN", (192, 128), (2, 0)),
        (6336, 320, 512, "TN", None, (0, 0)),
        (128, 1641, 3456, "TN", None, (0, 0)),
        (960, 5356, 6912, "NN", (192, 128), (0, 0)),  # rows lie across L2 cache lines
    ],
)
def test_tf32_without_copies_of_aligned_operands(m, n, k, layout, tile, copies):
    """But lhs along m; with the tiles that were measured."""
    choice = choices.choose(product(m, n, k, "tf32", layout, result_bytes=4), H200)
    assert (choice.tile and choice.tile[:2], (choice.lhs_copy, choice.rhs_copy)) == (tile, copies)


@pytest.mark.parametrize(
    "m, n, k, layout, shared",
    [
        (4096, 4096, 4104, "NT", "rhs"),  # both operands' rows lie across L2 cache lines
        (8192, 1000, 2048, "NN", "rhs"),
        (4096, 4096, 4104, "NN", "lhs"),
        (4096, 4096, 4096, "NT", None),
        (4095, 4097, 4093, "NT", None),  # copies' rows do not
    ],
)
def test_rows_across_lines_are_loaded_by_two_blocks(m, n, k, layout, shared, monkeypatch):
    """Also where the choice is XLA's dot."""
    monkeypatch.setattr(choices, "slower_than_xla", lambda *_: None)
    choice = choices.choose(product(m, n, k, layout=layout), H200, activation=True)
    assert (choice.kernel, choice.shared) == ("wgmma", shared)
    assert ("two blocks" in str(choice)) == bool(shared)


@pytest.mark.parametrize(
    "m, n, k, layout, tile, splits",
    [
        (1, 4096, 4096, "NN", (16, 64), 1),
        (1, 4096, 4096, "NT", (16, 32), 1),
        (1, 4096, 8192, "NN", (16, 64), 1),
        (1, 8192, 4096, "NN", None, 1),
        (1, 8192, 4096, "NT", None, 1),
        (1, 2048, 4096, "NN", (16, 32), 1),  # XLA multiplies element by element: four times as long
        (1, 2048, 4096, "NT", None, 1),
        (1, 1024, 4096, "NN", (16, 32), 1),
        (1, 28672, 4096, "NN", None, 1),  # XLA reads them at the memory's rate
        (8, 28672, 4096, "NT", None, 1),
        (8, 1024, 1024, "NT", (16, 16), 1),
        (8, 1024, 4096, "NN", None, 1),
        (16, 2048, 4096, "NN", (16, 32), 1),
        (12, 6144, 4096, "NN", (16, 64), 1),
        (16, 8192, 4096, "NN", (64, 64), 1),
        (16, 14336, 4096, "NN", (16, 64), 1),
        (2, 4096, 4096, "NT", (16, 32), 1),
        (16, 5000, 4096, "NN", None, 1),  # rows do not begin at 128 bytes
        (32, 8192, 4096, "NT", (64, 64), 1),
        (32, 4096, 4096, "NN", (64, 64), 1),
        (32, 2048, 4096, "NT", (32, 16), 1),
        (20, 1024, 4096, "NN", None, 1),
        (24, 11008, 4096, "NN", (64, 128), 1),
        (32, 6144, 4096, "NT", (64, 64), 1),
        (32, 12288, 4096, "NT", (64, 128), 1),
        (48, 4096, 4096, "NN", (64, 64), 1),
        (64, 14336, 4096, "NT", (64, 128), 1),
        (48, 28672, 4096, "NN", None, 1),
        (64, 4096, 4096, "TN", None, 1),
        (80, 4096, 4096, "NN", (64, 64), 1),  # 16 rows of the second tile are loaded
        (144, 4096, 4096, "NN", (64, 128), 1),
        (320, 4096, 4096, "NN", (64, 192), 1),
        (1152, 1152, 1152, "NN", (64, 192), 1),
        (2048, 768, 3072, "NN", (64, 192), 1),
        (128, 6144, 4096, "NN", (64, 128), 1),
        (128, 4096, 8192, "NN", (64, 64), 1),
        (384, 384, 384, "NN", (64, 64), 1),
        (768, 768, 768, "NN", (64, 128), 1),  # not (128, 128) in three parts, which takes twice as long
        (768, 512, 1024, "NT", (64, 64), 1),
        (640, 512, 896, "TT", None, 1),
        (512, 512, 256, "NN", None, 1),
        (1000, 504, 704, "NN", None, 1),  # rows do not begin at 128 bytes
        (1000, 500, 700, "NN", (64, 64), 1),  # nor at 16
        (300, 300, 300, "NT", (64, 64), 1),
        (256, 256, 100, "NN", None, 1),
        (1024, 1024, 1024, "NN", (64, 128), 1),
        (1024, 1024, 2048, "TN", (64, 128), 1),  # not (128, 128) in two parts
        (512, 512, 2048, "NN", (64, 64), 1),
        (1000, 1024, 1024, "NN", (64, 128), 1),
        (1280, 1280, 1280, "NN", None, 1),
        (1536, 1536, 1536, "NN", None, 1),
        (144, 960, 320, "NT", None, 1),
        (328, 320, 2496, "NN", (64, 64), 1),
        (64, 192, 1024, "NT", None, 1),
        # k in no whole k tiles, or in no equal parts
        (768, 704, 2248, "NN", (64, 64), 1),
        (336, 704, 488, "NT", (64, 64), 1),
        (192, 128, 288, "TN", (64, 64), 1),
        (128, 192, 13840, "NN", (64, 64), 15),
        (8, 768, 39872, "NT", (64, 64), 11),
        (17, 1792, 12608, "NN", (64, 64), 3),
        (640, 512, 904, "TT", None, 1),
        (1000, 1000, 1000, "NN", None, 1),
        # long sums
        (1, 4096, 28672, "NT", None, 1),
        (9, 3008, 21056, "NT", (16, 32), 1),
        (16, 1024, 28672, "NT", None, 1),
        (8, 1024, 16384, "NN", None, 1),
        (64, 1024, 16384, "NN", None, 1),
        (89, 2304, 9728, "NT", (64, 128), 3),
        (128, 128, 65536, "TN", (64, 64), 21),
        (256, 256, 16384, "NN", None, 1),
        # few columns
        (14336, 40, 14720, "NN", (64, 64), 1),
        (36928, 8, 6208, "NN", None, 1),
        # rows that are not aligned
        (234, 195, 1794, "NN", None, 1),
        (4096, 4096, 4, "NN", None, 1),
    ],
)
def test_small_products_of_16_bits(m, n, k, layout, tile, splits):
    """Ours if they were measured to be faster, with that measurement's tiles."""
    choice = choices.choose(product(m, n, k, layout=layout), H200)
    assert (choice.tile and choice.tile[:2], choice.splits) == (tile, splits)


@pytest.mark.parametrize(
    "m, n, k, layout, alone, followed",
    [
        (256, 256, 8192, "NN", "xla", "wgmma"),
        (1536, 1536, 1536, "NT", "xla", "wgmma"),
        (920, 576, 5760, "NN", "xla", "wgmma"),
        (4288, 480, 704, "TN", "xla", "wgmma"),  # rhs's rows lie across L2 cache lines
        (8192, 4096, 4096, "NN", "xla", "wgmma"),
        (768, 832, 2048, "NN", "wgmma", "wgmma"),
        (192, 4096, 14336, "NN", "xla", "xla"),
        (4, 28672, 4096, "NN", "xla", "xla"),
        (8192, 8192, 8192, "TT", "xla", "xla"),
    ],
)
def test_products_that_something_follows_are_ours(m, n, k, layout, alone, followed):
    """XLA's scales, bias and activation are a pass over f32 sums: in all 1.01 to 1.6 times as long."""
    assert choices.choose(product(m, n, k, layout=layout), H200).kernel == alone
    for options in ({"bias": True}, {"activation": True}, {"activation": True, "bias": True}):
        assert choices.choose(product(m, n, k, layout=layout), H200, **options).kernel == followed


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "band"),
    [
        (2048, 768, 3072, (64, 192, False), 8),  # 128 tiles: one for nearly every multiprocessor
        (8192, 4096, 14336, (128, 256, False), 8),
        (8192, 8192, 8192, (128, 192, True), 8),
        (128, 28672, 4096, (128, 256, False), 8),
        (48, 28672, 4096, (64, 128, False), 8),
        (48, 20480, 4096, (64, 192, False), 8),
        (65536, 256, 256, (128, 128, True), 2),
        (4095, 4097, 4093, (128, 128, False), 8),  # rows that the copy engine does not store
    ],
)
def test_tiles_and_bands_of_large_products(m, n, k, tile, band, monkeypatch):
    """The fastest that were measured, also where the choice is XLA's dot."""
    monkeypatch.setattr(choices, "slower_than_xla", lambda *_: None)
    choice = choices.choose(product(m, n, k), H200)
    assert (choice.tile[:3], choice.band) == (tile, band)


@pytest.mark.parametrize(
    ("m", "n", "k", "layout", "tile", "copies", "in_pieces"),
    [
        (4096, 4096, 100, "NN", (128, 256), (0, 0), (True, False)),
        (4096, 4096, 100, "NT", (128, 256), (0, 0), (True, True)),
        (4096, 4096, 102, "NN", (128, 256), (0, 0), (True, False)),
        (4096, 4096, 101, "NN", (128, 128), (1, 0), (False, False)),  # rows are aligned to 2 bytes
        (500, 500, 500, "NN", (64, 64), (0, 0), (True, True)),
        (64, 1000, 2050, "NN", (64, 64), (1, 0), (False, False)),  # in pieces it took less
        (1002, 1002, 1002, "NN", (64, 128), (1, 1), (False, False)),
        (4100, 4100, 4100, "NN", (128, 256), (0, 1), (True, False)),
    ],
)
def test_operands_in_pieces(m, n, k, layout, tile, copies, in_pieces):
    """Threads load them where that was measured to take less than a copy does."""
    choice = choices.choose(product(m, n, k, layout=layout), H200)
    assert (choice.tile[:2], (choice.lhs_copy, choice.rhs_copy), choice.in_pieces) == (tile, copies, in_pieces)
    assert str(choice).count("in pieces") == sum(in_pieces)


@pytest.mark.cuda
def test_a_training_step_of_an_mlp_is_our_calls_alone():
    """Forward and backward in full precision, lowered for a GPU: six products, no transposition."""

    def loss(params, x, wanted):
        first, second, bias = params
        hidden = jaxops.matmul(x, first, bias=bias, activation="gelu")
        return jnp.mean((jaxops.matmul(hidden, second) - wanted) ** 2)

    x, wanted = (jax.ShapeDtypeStruct((4, 1024, 2048), jnp.float32),) * 2
    params = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2048, 8192), (8192, 2048), (8192,))]
    text = jax.jit(jax.grad(loss, (0, 1))).trace(params, x, wanted).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"custom_call @{_kernel.target_name('matmul')}") == 6
    assert "stablehlo.transpose" not in text
    assert "stablehlo.dot" not in text
    assert "stablehlo.convert" not in text


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["alone", "in vmap", "with a mask", "under debug_nans", "short"])
def test_causal_attention_multiplies_triangles(where):
    """Forward and backward: all six products, unless something else may be seen after the query."""
    linen = pytest.importorskip("jaxops.flax.linen")
    tokens = 256 if where == "short" else 1024
    mask = jnp.ones((1, 1, tokens, tokens), bool) if where == "with a mask" else None

    def attend(q, k, v):  # drops weights: without that they would never be an array
        drop = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5}
        return linen.dot_product_attention(q, k, v, mask=mask, causal=True, **drop)

    def loss(*qkv):
        return jnp.sum((jax.vmap(attend) if where == "in vmap" else attend)(*qkv) ** 2)

    with jax.debug_nans(where == "under debug_nans"):
        shape = (*((3,) if where == "in vmap" else ()), 2, tokens, 4, 64)
        qkv = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3
        text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*qkv).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"triangle = (\d) : i32", text)
    if where in ("alone", "in vmap"):
        assert sorted(found) == ["1", "2", "2"]  # each called twice: for q k^T and w v, and their gradients
    else:
        assert not found
    assert ("stablehlo.dot_general" in text) == (not found)


def test_triangles(rng):
    """Values and gradients equal whole products wherever they are used."""
    q, k, v = (jnp.asarray(rng.standard_normal((2, 40, 3, 8)), jnp.float32) for _ in range(3))

    def attend(product, q, k, v):
        logits = _functions.query_key(q, k, product, causal=True)
        return _functions.weights_value(jaxops.softmax(logits, causal=True), v, product, causal=True)

    def results(product):
        y, pullback = jax.vjp(functools.partial(attend, product), q, k, v)
        moved = jax.jvp(functools.partial(attend, product), (q, k, v), (k, v, q))
        hvp = jax.jvp(jax.grad(lambda q: jnp.sum(jnp.sin(attend(product, q, k, v)))), (q,), (v,))
        return y, pullback(jnp.cos(y)), moved, hvp

    for got, wanted in zip(
        *map(jax.tree.leaves, (results(jaxops.dot_general), results(jax.lax.dot_general))), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_a_large_outer_product_is_a_sum_of_two_products():
    def dots(dtype, size):
        operands = (jax.ShapeDtypeStruct((size, 1), dtype), jax.ShapeDtypeStruct((1, size), dtype))
        text = jax.jit(jaxops.matmul).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r"stablehlo.dot_general.*tensor<(\w+)>, tensor<(\w+)>", text)

    assert dots(jnp.bfloat16, 8192) == [("2x8192xbf16", "2x8192xbf16")]
    assert dots(jnp.bfloat16, 4096) == [("2x4096xbf16", "2x4096xbf16")]
    assert dots(jnp.bfloat16, 2048) == [("2048x1xbf16", "1x2048xbf16")]
    assert dots(jnp.float32, 8192) == [("8192x1xf32", "1x8192xf32")]  # the memory's rate
    assert "k padded to 2" in str(choices.choose(product(8192, 8192, 1), H200))


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_an_outer_product_that_is_padded(layout, rng):
    """Infinities and no numbers stay in their rows and columns."""
    x, y = (rng.standard_normal((3, size)) for size in (5, 7))
    x[0, 1:3], y[1, 4] = (np.inf, np.nan), -np.inf
    x, y = jnp.asarray(x, jnp.float16), jnp.asarray(y, jnp.float16)
    lhs = x[:, None, :] if layout[0] == "T" else x[:, :, None]
    rhs = y[:, :, None] if layout[1] == "T" else y[:, None, :]
    spec = Spec(layout[0] == "T", layout[1] == "T", np.dtype("float16"), precision=precision_of(None))
    (got,) = kernel._on_xla(lhs, rhs, spec=spec, preactivation=False, padded=True)
    np.testing.assert_array_equal(got, x[:, :, None] * y[:, None, :])


@pytest.mark.cuda
def test_a_product_left_to_xla_is_the_one_that_jax_asks_for():
    def dots(function):
        operands = (jax.ShapeDtypeStruct((64, 96), jnp.bfloat16), jax.ShapeDtypeStruct((96, 32), jnp.bfloat16))
        text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        return [line.split(":", 1)[1] for line in text.splitlines() if "stablehlo.dot_general" in line]

    assert dots(jaxops.matmul) == dots(jnp.matmul) and len(dots(jnp.matmul)) == 1

"""matmul and dot_general beyond the contract. All values and gradients against float64."""

import functools
import itertools
import math
import re

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from support import contract
from support.ops import value_and_gradients
from support.row_cases import assert_matches, coarsest

import jaxops
from jaxops.ops import _epilogue, _matmul_choice, _matmul_kernel

pytestmark = pytest.mark.usefixtures("full_precision")

#: TF32 operands' relative rounding error, truncated as the tensor cores do.
TF32 = 2**-10


def wide(x):
    return np.asarray(x).astype(np.float64)


def normal(rng, shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def rounding_of(k, *dtypes):
    """In the result's ulp (the first dtype): sums of k products, with operands in their common dtype."""
    return (contract.GRADIENT_ROUNDING + 0.5 * max(k, 1) ** 0.5) * coarsest(*dtypes) / coarsest(dtypes[0])


@functools.cache
def gradients_of_all(*functions):
    """The functions' values and gradients; one compilation for all, and for all calls with such operands."""
    return jax.jit(
        lambda operands, cotangents: [
            value_and_gradients(f, xs, dy) for f, xs, dy in zip(functions, operands, cotangents, strict=True)
        ]
    )


def check(calls, operands, rng, slack=1):
    """calls: pairs, ours and a reference; compares our values and gradients with the reference in float64."""
    operands = [[jnp.asarray(x) for x in xs] for xs in operands]
    cotangents = []
    for (ours, reference), xs in zip(calls, operands, strict=True):
        out, wanted = jax.eval_shape(ours, *xs), jax.eval_shape(reference, *xs)
        assert (out.shape, out.dtype, out.weak_type) == (wanted.shape, wanted.dtype, False)
        cotangents.append(normal(rng, out.shape, out.dtype))
    results = gradients_of_all(*(ours for ours, _ in calls))(operands, cotangents)
    exactly = gradients_of_all(*(reference for _, reference in calls))
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        wanted = exactly(*jax.tree.map(lambda x: jnp.asarray(wide(x)), (operands, cotangents)))
    for xs, dy, got, targets in zip(operands, cotangents, results, wanted, strict=True):
        what = " and ".join(f"{x.dtype}{x.shape}" for x in xs)
        a, b, largest = (float(np.abs(wide(x)).max(initial=0)) for x in (*xs[:2], dy))
        summed = (max((1, *xs[0].shape, *xs[1].shape)), dy.size, dy.size, dy.size)
        products = (a * b, b * largest, a * largest, largest)
        for i, (gotten, target) in enumerate(zip(got, targets, strict=True)):
            assert gotten.dtype == (xs[i - 1].dtype if i else dy.dtype), what
            terms = products[i] * summed[i] ** 0.5  # the size of a sum of so many products with random signs
            rounding = slack * contract.GRADIENT_ROUNDING * coarsest(gotten.dtype, dy.dtype) / coarsest(gotten.dtype)
            rounding *= 8 if gotten.dtype == np.float64 else 1
            assert_matches(gotten, target, f"{what}: result {i}", rounding, terms=terms)


# --- jnp.matmul's shapes ---

SHAPES = [
    ((3,), (3,)),
    ((1,), (1,)),
    ((2, 3), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((1, 2, 3), (5, 3, 4)),
    ((5, 2, 3), (1, 3, 4)),
    ((6, 1, 2, 3), (5, 3, 4)),
    ((6, 1, 2, 3), (1, 5, 3, 4)),
    ((6, 5, 2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)),
    ((5, 1, 1, 3), (2, 3, 1)),
]


def test_shapes(rng):
    operands = [[normal(rng, s) for s in shapes] for shapes in SHAPES]
    check([(jaxops.matmul, jnp.matmul)] * len(SHAPES), operands, rng)


@pytest.mark.parametrize(
    "shapes",
    [((2, 0), (0, 4)), ((5, 2, 0), (0, 4)), ((0,), (0,)), ((0, 3), (3, 4)), ((2, 3), (3, 0)), ((0, 2, 3), (3, 4))],
)
def test_zero_sizes(shapes):
    a, b = (jnp.ones(s) for s in shapes)
    wanted = np.zeros(np.matmul(*map(np.asarray, (a, b))).shape)
    np.testing.assert_array_equal(jaxops.matmul(a, b), wanted)
    for gradient, operand in zip(jax.grad(lambda *xs: jaxops.matmul(*xs).sum(), (0, 1))(a, b), (a, b), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(operand.shape))


def test_empty_sums_take_bias_and_activation():
    got = jaxops.matmul(jnp.ones((2, 0)), jnp.ones((0, 3)), bias=jnp.array([1.0, -1.0, 2.0]), activation="relu")
    np.testing.assert_array_equal(got, [[1, 0, 2]] * 2)


# --- dtypes ---


def test_dtypes_promote(rng, x64):
    pairs = list(itertools.product(contract.DTYPES, repeat=2))
    operands = [(normal(rng, (3, 17), a), normal(rng, (17, 5), b)) for a, b in pairs]
    results = jax.jit(lambda operands: [jaxops.matmul(a, b) for a, b in operands])(operands)
    for (a, b), got in zip(operands, results, strict=True):
        assert got.dtype == jnp.result_type(a, b)
        assert_matches(got, wide(a) @ wide(b), f"{a.dtype} x {b.dtype}", 8 * rounding_of(17, got.dtype))


def test_gradients_of_mixed_dtypes(rng):
    pairs = [("bfloat16", "float32"), ("float32", "float16"), ("bfloat16", "float16"), ("float16", "float16")]
    operands = [[normal(rng, (4, 9), a), normal(rng, (9, 5), b)] for a, b in pairs]
    check([(jaxops.matmul, jnp.matmul)] * len(pairs), operands, rng)


@pytest.mark.parametrize(
    "dtypes", [("int8", "int8"), ("int32", "int32"), ("bool", "bool"), ("uint8", "int32")], ids=str
)
def test_integers_and_booleans_run_on_xla(dtypes, rng, fallback):
    a, b = (jnp.asarray(rng.integers(0, 2, s).astype(d)) for s, d in zip(((3, 4), (4, 5)), dtypes, strict=True))
    got, wanted = jaxops.matmul(a, b), jnp.matmul(a, b)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


def test_int8_to_int32_on_request(fallback):
    a = jnp.full((2, 300), 100, jnp.int8)
    got = jaxops.matmul(a, a.T, preferred_element_type=jnp.int32)
    assert got.dtype == np.int32 and (got == 3_000_000).all()


def test_integers_with_floats(rng):
    a, b = jnp.asarray(rng.integers(-3, 3, (3, 4)), jnp.int8), normal(rng, (4, 5))
    got = jaxops.matmul(a, b)
    assert got.dtype == jnp.matmul(a, b).dtype
    assert_matches(got, wide(a) @ wide(b))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_preferred_element_type_keeps_the_sum(dtype, rng):
    a, b = normal(rng, (6, 40), dtype), normal(rng, (40, 7), dtype)

    def ours(a, b):
        return jaxops.matmul(a, b, preferred_element_type=jnp.float32)

    assert ours(a, b).dtype == np.float32
    assert_matches(ours(a, b), wide(a) @ wide(b), rounding=rounding_of(40, "float32"))

    def reference(a, b):
        return jnp.matmul(a, b, preferred_element_type=jnp.result_type(a, np.float32))

    check([(ours, reference)], [(a, b)], rng)


def test_narrower_preferred_element_type_runs_on_xla(rng, fallback):
    a, b = normal(rng, (6, 40)), normal(rng, (40, 7))
    got = jaxops.matmul(a, b, preferred_element_type=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    assert_matches(got, wide(a) @ wide(b), rounding=16)


def test_complex_runs_on_xla(fallback):
    a = jnp.array([[1 + 2j, 3], [0, 1j]], jnp.complex64)
    np.testing.assert_allclose(jaxops.matmul(a, a), np.asarray(a) @ np.asarray(a), rtol=1e-3)


EIGHT_BITS = [
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("float8_e4m3fn", "float8_e5m2"),
    ("float8_e5m2", "float8_e4m3fn"),
    ("float8_e5m2", "float8_e5m2"),
]


@pytest.mark.parametrize("dtypes", EIGHT_BITS, ids="-".join)
def test_fp8(dtypes, rng):
    precisions = ("default", "highest", "ANY_F8_ANY_F8_F32", "ANY_F8_ANY_F8_F32_FAST_ACCUM")
    cases = [
        (m, n, k, layout, precision, result)
        for (m, n, k), result in itertools.product(((5, 16, 32), (130, 131, 300)), (jnp.float32, jnp.bfloat16))
        for layout, precision in zip(LAYOUTS.values(), precisions, strict=True)
    ]
    operands = [
        (normal(rng, (m, k) if c else (k, m), dtypes[0]), normal(rng, (n, k) if d else (k, n), dtypes[1]))
        for m, n, k, (c, d), *_ in cases
    ]
    results = jax.jit(
        lambda operands: [
            jaxops.dot_general(a, b, (((c,), (d,)), ((), ())), precision, result)
            for (a, b), (*_, (c, d), precision, result) in zip(operands, cases, strict=True)
        ]
    )(operands)
    for (m, n, k, (c, d), _, result), (a, b), got in zip(cases, operands, results, strict=True):
        left, right = (wide(a) if c else wide(a).T), (wide(b).T if d else wide(b))
        assert got.dtype == result
        # The tensor cores keep 14 bits of a sum.
        terms = np.abs(left).max() * np.abs(right).max() * k**0.5 * (1 if result == jnp.bfloat16 else 2**9)
        assert_matches(got, left @ right, f"{m} {n} {k} {c} {d}", rounding=8, terms=terms)


def test_weak_types_promote_as_in_the_references():
    weak, narrow = jnp.full((2, 2), 1.0), jnp.ones((2, 2), jnp.bfloat16)
    assert weak.weak_type
    numbers = (((1,), (0,)), ((), ()))
    for pair in ((weak, narrow), (narrow, weak), (weak, weak), (weak, jnp.ones((2, 2)))):
        assert jaxops.matmul(*pair).dtype == jnp.matmul(*pair).dtype
        assert jaxops.dot_general(*pair, numbers).dtype == lax.dot_general(*pair, numbers).dtype


@pytest.mark.filterwarnings("ignore::jaxops.FallbackWarning")
@pytest.mark.parametrize("dtype", ["float32", "int32", "complex64"])
def test_results_are_not_weakly_typed(dtype):
    """On the kernels and on XLA's own dot, where jax.numpy's would be."""
    weak = jnp.full((2, 2), np.dtype(dtype).type(1).item())
    assert weak.dtype == dtype and jnp.matmul(weak, weak).weak_type
    for got in (jaxops.matmul(weak, weak), jaxops.dot_general(weak, weak, (((1,), (0,)), ((), ())))):
        assert got.dtype == dtype and not got.weak_type


@pytest.mark.filterwarnings("ignore::jaxops.FallbackWarning")
@pytest.mark.parametrize("scalar", [float, int, complex])
def test_preferred_scalar_types_are_those_of_jnp(scalar, on_gpu):
    """Without a warning, which is an error here."""
    if on_gpu and scalar is complex:
        pytest.skip("XLA on a GPU has no such product")
    a = jnp.ones((2, 2))
    got, wanted = (f(a, a, preferred_element_type=scalar) for f in (jaxops.matmul, jnp.matmul))
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


def test_fp8_without_preferred_element_type_runs_on_xla(fallback):
    a = jnp.ones((4, 8), jnp.float8_e4m3fn)
    assert jaxops.dot_general(a, a, (((1,), (1,)), ((), ()))).dtype == a.dtype


def test_gradients_of_fp8(rng):
    a, b = normal(rng, (6, 8), "float8_e4m3fn"), normal(rng, (8, 5), "float8_e5m2")

    def loss(function):
        return lambda a, b: function(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32).sum()

    ours, reference = (jax.grad(loss(f), (0, 1))(a, b) for f in (jaxops.dot_general, lax.dot_general))
    for got, wanted in zip(ours, reference, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(wide(got), wide(wanted), rtol=0.13, atol=0.1)


@pytest.mark.filterwarnings("ignore:matmul on cuda:jaxops.FallbackWarning")  # where there is no GPU half
@pytest.mark.parametrize(
    "dtypes, preset, result",
    [
        (("float16", "float16"), "F16_F16_F32", "float32"),
        (("bfloat16", "bfloat16"), "BF16_BF16_F32", "float32"),
        (EIGHT_BITS[0], "ANY_F8_ANY_F8_F32", "float32"),
        (EIGHT_BITS[0], "ANY_F8_ANY_F8_F32", "bfloat16"),
        (EIGHT_BITS[1], "ANY_F8_ANY_F8_F32_FAST_ACCUM", "float32"),
    ],
    ids=str,
)
def test_gradients_under_dot_algorithms(dtypes, preset, result, rng):
    """A cotangent with more bits is rounded to 16 bits, as in XLA's dot, but not to 8; then no product for a GPU is
    wider."""
    numbers = (((1,), (0,)), ((), ()))
    a, b = normal(rng, (6, 8), dtypes[0]), normal(rng, (8, 5), dtypes[1])
    tiny = 1e-9 if dtypes in EIGHT_BITS else 1e-4  # in 8 bits it would be 0
    dy = (normal(rng, (6, 5)) * tiny).astype(result)

    def gradients(a, b):
        return jax.vjp(lambda *xs: jaxops.dot_general(*xs, numbers, preset, result, lhs_scale=1 / tiny), a, b)[1](dy)

    wanted = wide(dy) / tiny @ wide(b).T, wide(a).T @ wide(dy) / tiny
    for got, x, target in zip(gradients(a, b), (a, b), wanted, strict=True):
        assert got.dtype == x.dtype
        np.testing.assert_allclose(wide(got), target, rtol=float(jnp.finfo(x.dtype).eps), atol=0.05)
    second = jax.jit(jax.grad(lambda a, b: sum(g.astype(jnp.float32).sum() for g in gradients(a, b)), (0, 1)))
    assert all(np.isfinite(wide(x)).all() for x in second(a, b))
    program = second.trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall(r"dot_general .*: \((.*?)\)", program)
    assert products and (dtypes in EIGHT_BITS or not any("f32" in operands for operands in products))


# --- scales ---


@pytest.mark.parametrize("dtypes", [EIGHT_BITS[0], EIGHT_BITS[1], ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_scales(dtypes, rng):
    """Applied to the sums before bias and activation; gradients for all operands and the scales."""
    a, b = normal(rng, (6, 40), dtypes[0]), normal(rng, (40, 16), dtypes[1])
    bias, scales = normal(rng, (16,)), (jnp.float32(0.25), jnp.float32(0.3))
    options = {"activation": "silu", "preferred_element_type": jnp.float32}

    def ours(bias, *scales):
        return jaxops.matmul(a, b, bias=bias, lhs_scale=scales[0], rhs_scale=scales[1], **options)

    def reference(bias, *scales):
        z = scales[0] * scales[1] * (wide(a) @ wide(b)) + bias
        return z / (1 + jnp.exp(-z))

    operands, dy = (bias, *scales), rng.standard_normal((6, 16))
    got = jax.jit(lambda operands: value_and_gradients(ours, operands, jnp.asarray(dy, jnp.float32)))(operands)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        exact = value_and_gradients(reference, [jnp.asarray(x, np.float64) for x in operands], jnp.asarray(dy))
    for x, wanted in zip(got, exact, strict=True):
        np.testing.assert_allclose(x, wanted, rtol=2e-3, atol=2e-3)
    half = jaxops.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, rhs_scale=0.5)
    whole = jaxops.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    np.testing.assert_allclose(half, whole / 2, rtol=1e-6)


def test_gradients_with_scales(rng):
    a, b = normal(rng, (3, 6, 8)), normal(rng, (3, 8, 5))

    def ours(a, b, s, t):
        return jaxops.matmul(a, b, lhs_scale=s, rhs_scale=t)

    operands, dy = (a, b, jnp.float32(0.5), jnp.float32(3)), normal(rng, (3, 6, 5))
    got = value_and_gradients(ours, operands, dy)
    wanted = value_and_gradients(lambda a, b, s, t: s * t * jnp.matmul(a, b), operands, dy)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_scales_under_vmap(rng):
    """A scale for each entry, and one for all; operands mapped or not."""
    a, b, scales = normal(rng, (3, 6, 8)), normal(rng, (8, 5)), jnp.asarray([0.5, 2.0, 3.0])
    for axes in ((0, None, 0), (0, None, None), (None, None, 0)):
        xs = [a if axes[0] == 0 else a[0], b, scales if axes[2] == 0 else scales[0]]
        got = jax.vmap(lambda a, b, s: jaxops.matmul(a, b, lhs_scale=s), axes)(*xs)
        for i in range(3):
            x, y, s = (x[i] if axis == 0 else x for x, axis in zip(xs, axes, strict=True))
            np.testing.assert_allclose(got[i], s * (wide(x) @ wide(y)), rtol=1e-5, atol=1e-5)


def test_one_product_for_many_biases_and_scales(rng):
    """With neither operand mapped."""
    a, b, biases, scales = (normal(rng, shape) for shape in ((6, 8), (8, 5), (3, 5), (3,)))

    def function(bias, scale):
        return jaxops.matmul(a, b, bias=bias, lhs_scale=scale, activation="silu")

    for axes in ((0, 0), (0, None), (None, 0)):
        mapped = [x[0] if axis is None else x for x, axis in zip((biases, scales), axes, strict=True)]
        batched = jax.vmap(jax.value_and_grad(lambda *xs: function(*xs).sum(), (0, 1)), axes)
        assert str(jax.make_jaxpr(jax.vmap(function, axes))(*mapped)).count(" jaxops_matmul[") == 1
        for i, got in enumerate(zip(*jax.tree.leaves(batched(*mapped)), strict=True)):
            xs = [x if axis is None else x[i] for axis, x in zip(axes, mapped, strict=True)]
            wanted = jax.tree.leaves(jax.value_and_grad(lambda *xs: function(*xs).sum(), (0, 1))(*xs))
            for mine, target in zip(got, wanted, strict=True):
                np.testing.assert_allclose(mine, target, rtol=1e-5, atol=1e-5)


def test_scales_without_a_kernel(fallback):
    a = jnp.full((4, 8), 2, jnp.float8_e4m3fn)
    got = jaxops.matmul(a, a.T, lhs_scale=0.25)
    assert got.dtype == a.dtype and (wide(got) == 8).all()


@pytest.mark.filterwarnings("ignore::jaxops.FallbackWarning")
@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize(
    "dtype, result",
    [("float8_e4m3fn", None), ("float8_e5m2", None), ("float8_e4m3fnuz", None), ("bfloat16", "float16")],
)
def test_epilogues_without_a_kernel(dtype, result, promotion, rng, on_gpu):
    """In float32 and rounded once, whatever the result's dtype and whatever promotion is allowed."""
    if on_gpu and result == "float16":
        pytest.skip("XLA on a GPU has no such product")
    a, b, bias = normal(rng, (4, 8), dtype), normal(rng, (8, 5), dtype), normal(rng, (5,))
    numbers = (((1,), (0,)), ((), ()))
    product = jnp.matmul(a, b, preferred_element_type=result)
    z = jnp.asarray(wide(a) @ wide(b), jnp.float32)
    with jax.numpy_dtype_promotion(promotion):
        for activation, apply in _epilogue.ACTIVATIONS.items():
            ours = functools.partial(jaxops.matmul, a, b, preferred_element_type=result, activation=activation)
            for got, wanted in (
                (ours(), apply(z) if activation else product.astype(jnp.float32)),
                (ours(bias=bias), apply(z + bias)),
                (ours(lhs_scale=0.3, rhs_scale=0.7), apply(np.float32(0.3) * np.float32(0.7) * z)),
            ):
                assert got.dtype == product.dtype
                eps = float(jnp.finfo(got.dtype).eps)  # eager and fused activations may lie at two sides of a tie
                np.testing.assert_allclose(wide(got), wide(wanted.astype(got.dtype)), rtol=eps, atol=eps / 16)
        got = jaxops.dot_general(a, b, numbers, preferred_element_type=result, rhs_scale=0.5)
        np.testing.assert_allclose(wide(got), wide((z * np.float32(0.5)).astype(product.dtype)), rtol=eps)
        gradient = jax.grad(lambda bias: ours(bias=bias, lhs_scale=0.5).astype(jnp.float32).sum())(bias)
        assert gradient.dtype == bias.dtype and np.isfinite(gradient).all()


@pytest.mark.filterwarnings("ignore::jaxops.FallbackWarning")
def test_epilogues_without_a_kernel_in_float64(rng, x64, on_gpu):
    a, bias = normal(rng, (4, 4)), normal(rng, (4,), "float64")
    got = jaxops.matmul(a, a, bias=bias, lhs_scale=0.3, preferred_element_type=np.float64)
    assert got.dtype == np.float64
    rtol = 2e-6 if on_gpu else 1e-14  # XLA multiplies float32 operands in float32 on a GPU
    np.testing.assert_allclose(got, 0.3 * (wide(a) @ wide(a)) + bias, rtol=rtol)


def test_products_without_a_kernel_take_a_bias_of_lower_rank(fallback):
    a = jnp.ones((4, 8))
    with jax.numpy_rank_promotion("raise"):
        got = jaxops.matmul(a, a.T, bias=jnp.arange(4.0), preferred_element_type=jnp.bfloat16)
    np.testing.assert_array_equal(wide(got), np.broadcast_to(8 + np.arange(4.0), (4, 4)))


@pytest.mark.filterwarnings("ignore::jaxops.FallbackWarning")
@pytest.mark.parametrize("dtype", ["int32", "complex64"])
@pytest.mark.parametrize("options", [{"bias": 0.7}, {"activation": "gelu"}, {"rhs_scale": 0.5}], ids=str)
def test_epilogues_of_other_dtypes_are_refused(dtype, options):
    a = jnp.ones((2, 2), dtype)
    with pytest.raises(TypeError, match=rf"matmul: scales, bias and activation need .* floating dtype, got {dtype}"):
        jaxops.matmul(a, a, **options)


@pytest.mark.parametrize("name", ["lhs_scale", "rhs_scale"])
def test_bad_scales(name):
    a = jnp.ones((2, 2))
    for op, numbers in ((jaxops.matmul, ()), (jaxops.dot_general, ((((1,), (0,)), ((), ())),))):
        with pytest.raises(ValueError, match=rf"{op.__name__}: {name} must be a scalar, got shape \(2,\)"):
            op(a, a, *numbers, **{name: jnp.ones(2)})
        with pytest.raises(TypeError, match=rf"{op.__name__}: {name} has dtype complex64"):
            op(a, a, *numbers, **{name: 1j})


# --- precision, out_sharding ---


@pytest.mark.parametrize(
    "precision",
    [None, lax.Precision.HIGHEST, lax.Precision.DEFAULT, "highest", "float32", ("default", "highest"), ["highest"] * 2],
    ids=str,
)
def test_precision(precision, rng):
    a, b = normal(rng, (6, 40)), normal(rng, (40, 7))
    highest = "highest" in str(precision).lower() or precision in (None, "float32")  # None: as the fixture says
    rounding = rounding_of(40, "float32") * (1 if highest else TF32 * 2**24)
    for got in (
        jaxops.matmul(a, b, precision=precision),
        jaxops.dot_general(a, b, (((1,), (0,)), ((), ())), precision),
        jax.jit(lambda a, b: jaxops.matmul(a, b, precision=precision))(a, b),
    ):
        assert_matches(got, wide(a) @ wide(b), rounding=rounding)


def test_default_matmul_precision(rng):
    a, b = normal(rng, (6, 40)), normal(rng, (40, 7))
    with jax.default_matmul_precision("highest"):
        assert_matches(jaxops.matmul(a, b), wide(a) @ wide(b), rounding=rounding_of(40, "float32"))


@pytest.mark.parametrize("name", ["F32_F32_F32", "TF32_TF32_F32", "TF32_TF32_F32_X3"])
def test_dot_algorithms_with_a_kernel(name, rng):
    a, b = normal(rng, (6, 40)), normal(rng, (40, 7))
    rounding = rounding_of(40, "float32") * (TF32 * 2**24 if name == "TF32_TF32_F32" else 1)
    for precision in (name, lax.DotAlgorithmPreset[name]):
        assert_matches(matmul_on_kernel(a, b, precision=precision), wide(a) @ wide(b), rounding=rounding)


def matmul_on_kernel(a, b, **options):
    """The product, on our primitive."""
    function = functools.partial(jaxops.matmul, **options)
    assert "jaxops_matmul" in str(jax.make_jaxpr(function)(a, b))
    return function(a, b)


OTHER_ALGORITHMS = (
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    lax.DotAlgorithm(np.float16, np.float16, np.float16),
)


@pytest.mark.parametrize("algorithm", OTHER_ALGORITHMS, ids=str)
def test_other_dot_algorithms_run_on_xla(algorithm, rng, fallback):
    a, b = normal(rng, (6, 40)), normal(rng, (40, 7))
    assert "jaxops_matmul" not in str(jax.make_jaxpr(lambda a, b: jaxops.matmul(a, b, precision=algorithm))(a, b))


@pytest.mark.filterwarnings("ignore::jaxops.FallbackWarning")
@pytest.mark.parametrize("preset", [p for p in lax.DotAlgorithmPreset if "F64" not in p.name], ids=lambda p: p.name)
def test_every_dot_algorithm_is_taken_where_xla_takes_it(preset, rng):
    """By name, as an enum and from the configuration, for values and gradients."""
    general = functools.partial(jaxops.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    configured = preset.name if preset.name != "DEFAULT" else "default"

    def gradients(function, a, b, **options):
        return jax.grad(lambda a, b: function(a, b, **options).astype(np.float32).sum(), (0, 1))(a, b)

    @jax.jit
    def ours(a, b):
        with jax.default_matmul_precision(configured):
            found = [gradients(jaxops.matmul, a, b)]
        return found + [
            gradients(f, a, b, precision=p) for f in (jaxops.matmul, general) for p in (preset, preset.name)
        ]

    for dtype in ("float32", "bfloat16", "float16"):
        a, b = normal(rng, (6, 40), dtype), normal(rng, (40, 7), dtype)
        try:
            wanted = jax.jit(functools.partial(gradients, jnp.matmul, precision=preset))(a, b)
        except Exception:  # XLA does not have it for these operands on this device
            continue
        for x, y in itertools.chain.from_iterable(zip(got, wanted, strict=True) for got in ours(a, b)):
            np.testing.assert_allclose(wide(x), wide(y), rtol=0.02, atol=0.05)


def test_out_sharding_runs_on_xla(rng, fallback):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    a, b = normal(rng, (4, 6)), normal(rng, (6, 2))
    with jax.set_mesh(mesh):
        spec = jax.P("x", None)
        sharded = jax.device_put(a, jax.NamedSharding(mesh, spec))
        got = jaxops.matmul(sharded, b, out_sharding=spec, bias=jnp.ones(2), activation="relu")
        assert jax.typeof(got).sharding.spec == spec
    np.testing.assert_allclose(got, np.maximum(wide(a) @ wide(b) + 1, 0), rtol=2e-2, atol=2e-2)


# --- bias and activation ---

BIASED = [((5, 12), (12, 7), bias) for bias in ((), (1,), (7,), (5, 1), (5, 7))]
BIASED += [((3, 5, 12), (3, 12, 7), bias) for bias in ((7,), (3, 1, 1), (3, 5, 7), (1, 5, 1), (3, 1, 7))]
BIASED += [((3, 5, 12), (12, 7), bias) for bias in ((7,), (5, 1), (3, 1, 7))]
BIASED += [((12,), (12, 7), (7,)), ((5, 12), (12,), (5,)), ((3, 5, 12), (12,), (3, 1)), ((12,), (12,), ())]
BIASED += [((5, 12), (12, 7)), ((2, 3, 4), (4, 5))]


def activate(activation, z):
    return {
        None: lambda z: z,
        "relu": lambda z: jnp.where(z > 0, z, 0),
        "gelu": lambda z: 0.5 * z * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "gelu_exact": lambda z: 0.5 * z * (1 + lax.erf(z / math.sqrt(2))),
        "silu": lambda z: z / (1 + jnp.exp(-z)),
    }[activation](z)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_exact", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_bias_and_activation(activation, dtype, rng, on_gpu):
    # Bias shapes are XLA's business on the CPU and the epilogue's on CUDA: they do not depend on the dtype.
    cases = BIASED if dtype == "float32" and (on_gpu or activation == "gelu") else BIASED[2::4]
    wider = "float64" if dtype == "float64" else "float32"
    with contract.precision_of(dtype):
        operands = [
            [normal(rng, shape, wider if i == 2 else dtype) for i, shape in enumerate(shapes)] for shapes in cases
        ]
        slack = 1 if activation is None else 4 if on_gpu else 6
        check([with_activation(activation)] * len(cases), operands, rng, slack=slack)


@functools.cache
def with_activation(activation):
    def ours(a, b, bias=None):
        return jaxops.matmul(a, b, bias=bias, activation=activation)

    def reference(a, b, bias=None):
        z = jnp.matmul(a, b)
        return activate(activation, z if bias is None else z + bias.astype(z.dtype))

    return ours, reference


def test_sums_are_rounded_once(rng, on_gpu):
    """Bias and activation meet the f32 sum, not its bf16 rounding: within one rounding of the exact result."""
    size = 2048 if on_gpu else 16  # on a GPU one for which a kernel is chosen, not XLA's dot
    a, b = normal(rng, (size, 64), "bfloat16"), normal(rng, (64, size), "bfloat16")
    sums = wide(a) @ wide(b)
    got = jaxops.matmul(a, b, bias=jnp.asarray(-sums.round(), jnp.float32), activation="relu")
    assert_matches(got, np.maximum(sums - sums.round(), 0), rounding=1)


@pytest.mark.filterwarnings("ignore::jaxops.FallbackWarning")
@pytest.mark.parametrize(
    "value, k, dtype, options, wanted",
    [
        (40, 64, "float8_e4m3fn", {"lhs_scale": 0.01, "rhs_scale": 0.1}, 104),  # 102.4, rounded
        (10, 1024, "float16", {"lhs_scale": 0.1}, 10240),
        (10, 1024, "float16", {"bias": np.float32(-5e4)}, 52400),
        (10, 1024, "float16", {"bias": np.float32(-1e5), "activation": "relu"}, 2400),
        (1000, 1024, "float32", {"preferred_element_type": np.float16, "rhs_scale": 1e-5}, 10240),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["as it is", "out_sharding", "XLA's dot"])
def test_sums_that_only_the_result_holds(value, k, dtype, options, wanted, how, monkeypatch):
    """Scales, bias and activation meet sums that the result's dtype does not hold, whoever multiplies."""
    if how == "XLA's dot":
        monkeypatch.setattr(_matmul_choice, "choose", lambda *_: _matmul_choice.Choice("xla", "told to"))
        monkeypatch.setattr(_matmul_kernel.kernel, "plain", _matmul_kernel.kernel.call_target)
    a = jnp.full((16, k), value, dtype)
    options = options | ({"bias": jnp.full(16, options["bias"])} if "bias" in options else {})
    if how == "out_sharding":
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
        with jax.set_mesh(mesh):
            got = jaxops.matmul(a, a.T, **options, out_sharding=jax.P("x", None))
    else:
        got = jax.jit(lambda a: jaxops.matmul(a, a.T, **options))(a)
    np.testing.assert_array_equal(wide(got), np.asarray(wanted, got.dtype).astype(np.float64))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_exact", "silu"])
def test_activations_of_special_values(activation):
    z = np.array([[np.nan, np.inf, 0.0, 30.0, -30.0]], np.float32)
    got = jaxops.matmul(jnp.zeros((1, 2)), jnp.zeros((2, 5)), bias=z, activation=activation)[0]
    np.testing.assert_allclose(got, [np.nan, np.inf, 0, 30, 0], atol=1e-6)


# --- dot_general ---

LAYOUTS = {"NN": (1, 0), "NT": (1, 1), "TN": (0, 0), "TT": (0, 1)}
GENERAL = [
    ((2, 4, 3), (2, 3, 5), (((2,), (1,)), ((0,), (0,)))),
    ((2, 4, 3), (2, 5, 3), (((2,), (2,)), ((0,), (0,)))),
    ((2, 3, 4), (2, 3, 5), (((1,), (1,)), ((0,), (0,)))),
    ((2, 3, 4), (2, 5, 3), (((1,), (2,)), ((0,), (0,)))),
    ((4, 3, 2), (3, 5, 2), (((1,), (0,)), ((2,), (2,)))),
    ((4, 2, 3), (3, 2, 5), (((2,), (0,)), ((1,), (1,)))),
    ((2, 6, 4, 3), (6, 2, 3, 5), (((3,), (2,)), ((0, 1), (1, 0)))),
    ((4, 3, 6), (3, 6, 5), (((1, 2), (0, 1)), ((), ()))),
    ((4, 3, 6), (6, 3, 5), (((1, 2), (1, 0)), ((), ()))),
    ((4, 3, 6), (6, 3, 5), (((2, 1), (0, 1)), ((), ()))),
    ((3, 4, 6), (5, 6, 3), (((0, 2), (2, 1)), ((), ()))),
    ((3, 6, 4), (3, 6, 5), (((0, 1), (0, 1)), ((), ()))),
    ((2, 3, 4, 6), (6, 2, 7, 3), (((3, 1), (0, 3)), ((0,), (1,)))),
    ((4, 7, 3), (3, 5, 2), (((2,), (0,)), ((), ()))),
    ((4, 3), (5, 2), (((), ()), ((), ()))),
    ((4, 3), (4, 3), (((), ()), ((0, 1), (0, 1)))),
    ((4, 3), (4, 3), (((0, 1), (0, 1)), ((), ()))),
    ((4, 3), (3, 4), (((1,), (0,)), ((0,), (1,)))),
    ((), (), (((), ()), ((), ()))),
    ((), (3, 2), (((), ()), ((), ()))),
    ((5,), (5,), (((0,), (0,)), ((), ()))),
    ((1, 1), (1, 1), (((1,), (0,)), ((), ()))),
]


def test_dot_general(rng):
    """Against lax.dot_general: batch axes anywhere, several contracted axes in any order, outer products, scalars."""
    operands = [(normal(rng, a), normal(rng, b)) for a, b, _ in GENERAL]
    calls = [
        [functools.partial(function, dimension_numbers=numbers) for function in (jaxops.dot_general, lax.dot_general)]
        for *_, numbers in GENERAL
    ]
    check(calls, operands, rng)


def test_dot_general_takes_lists_and_positional_options(rng):
    a, b = normal(rng, (4, 3)), normal(rng, (5, 3))
    wanted = jaxops.dot_general(a, b, (((1,), (1,)), ((), ())))
    np.testing.assert_array_equal(jaxops.dot_general(a, b, [[[1], [1]], [[], []]]), wanted)
    np.testing.assert_array_equal(jaxops.dot_general(a, b, (([1], np.array([1])), ((), ())), "highest"), wanted)
    assert jaxops.dot_general(a, b, (((1,), (1,)), ((), ())), None, jnp.float32).dtype == np.float32


@pytest.mark.parametrize("dtype", contract.DTYPES)
def test_odd_shapes_in_every_layout(dtype, rng):
    with contract.precision_of(dtype):
        shapes = [tuple(int(d) for d in rng.integers(1, 300, 3)) for _ in range(5)]
        shapes += [(1, 1, 1), (1, 300, 1), (127, 128, 129), (16, 8, 33), (64, 65, 7), (300, 1, 5), (1, 257, 64)]
        cases = [(m, n, k, layout) for m, n, k in shapes for layout in LAYOUTS.values()]
        operands = [
            (normal(rng, (m, k) if c else (k, m), dtype), normal(rng, (n, k) if d else (k, n), dtype))
            for m, n, k, (c, d) in cases
        ]
        results = jax.jit(
            lambda operands: [
                jaxops.dot_general(a, b, (((c,), (d,)), ((), ())))
                for (a, b), (*_, (c, d)) in zip(operands, cases, strict=True)
            ]
        )(operands)
    for (m, n, k, (c, d)), (a, b), got in zip(cases, operands, results, strict=True):
        left, right = (x.astype(np.longdouble) if k * m * n < 1000 else x for x in (wide(a), wide(b)))
        wanted = (left if c else left.T) @ (right.T if d else right)
        rounding = rounding_of(k, dtype) * (8 if dtype == "float64" else 1)
        assert_matches(got, wanted, f"m {m}, n {n}, k {k}, contracting {c}, {d}", rounding)


def test_batched_odd_shapes(rng):
    for dtype in ("float32", "bfloat16"):
        shapes = [
            ((3, 65, 33), (3, 33, 130)),
            ((2, 1, 17, 9), (4, 9, 35)),
            ((7, 1, 5), (7, 5, 1)),
            ((65, 33), (4, 33, 2)),
        ]
        operands = [tuple(normal(rng, s, dtype) for s in pair) for pair in shapes]
        results = jax.jit(lambda operands: [jaxops.matmul(*pair) for pair in operands])(operands)
        for (a, b), got in zip(operands, results, strict=True):
            assert_matches(got, wide(a) @ wide(b), f"{a.shape} @ {b.shape}", rounding_of(a.shape[-1], dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_and_infinities(dtype, rng):
    a, b = rng.standard_normal((9, 37)), rng.standard_normal((37, 11))
    a[1, 3], a[2, 0], a[3, 36], a[3, 5] = np.nan, np.inf, np.inf, -np.inf
    b[4, 2], b[0, 5] = -np.inf, np.nan
    a[4, 4] = 0
    a, b = jnp.asarray(a, dtype), jnp.asarray(b, dtype)
    with np.errstate(invalid="ignore"):
        assert_matches(jaxops.matmul(a, b), wide(a) @ wide(b), rounding=rounding_of(37, dtype))


# --- where a dot_general can be injected ---


def test_flax_linen_dense(rng):
    x = normal(rng, (2, 3, 8))
    plain, swapped = linen.Dense(5), linen.Dense(5, dot_general=jaxops.dot_general)
    params = plain.init(jax.random.key(0), x)
    with jax.default_matmul_precision("highest"):
        wanted = plain.apply(params, x)
    np.testing.assert_allclose(swapped.apply(params, x), wanted, rtol=1e-5, atol=1e-5)
    general = linen.DenseGeneral((4, 5), axis=(-2, -1), dot_general=jaxops.dot_general)
    assert general.init_with_output(jax.random.key(0), x)[0].shape == (2, 4, 5)


def test_flax_nnx_linear(rng):
    x = normal(rng, (2, 3, 8))
    plain, swapped = (
        nnx.Linear(8, 5, rngs=nnx.Rngs(0), **options) for options in ({}, {"dot_general": jaxops.dot_general})
    )
    with jax.default_matmul_precision("highest"):
        wanted = plain(x)
    np.testing.assert_allclose(swapped(x), wanted, rtol=1e-5, atol=1e-5)
    preferred = nnx.Linear(
        8, 5, rngs=nnx.Rngs(0), dot_general=jaxops.dot_general, preferred_element_type=jnp.float32, dtype=jnp.bfloat16
    )
    np.testing.assert_allclose(preferred(x), wanted, rtol=0.05, atol=0.05)


def test_einsum(rng):
    for spec, shapes in (
        ("bthd,bshd->bhts", ((2, 5, 3, 4), (2, 6, 3, 4))),
        ("bhts,bshd->bthd", ((2, 3, 5, 6), (2, 6, 3, 4))),
        ("ij,kj->ki", ((3, 4), (5, 4))),
    ):
        a, b = (normal(rng, s) for s in shapes)
        got = jnp.einsum(spec, a, b, _dot_general=jaxops.dot_general)
        assert_matches(got, np.einsum(spec, wide(a), wide(b)), spec, rounding_of(6, "float32"))


def test_flax_variables_are_arrays(rng):
    x, kernel = normal(rng, (3, 4)), nnx.Param(normal(rng, (4, 5)))
    np.testing.assert_array_equal(jaxops.matmul(x, kernel), jaxops.matmul(x, kernel[...]))
    np.testing.assert_array_equal(jaxops.rms_norm(x, nnx.Param(jnp.ones(4))), jaxops.rms_norm(x, jnp.ones(4)))
    np.testing.assert_array_equal(jaxops.softmax(kernel), jaxops.softmax(kernel[...]))


# --- transposition, symbolic sizes ---


def test_linear_transpose(rng):
    """For each operand in which it is linear, as the reference's; for others an error."""
    x, w, dz = normal(rng, (3, 6, 8)), normal(rng, (8, 5)), normal(rng, (3, 6, 5))
    s, bias = jnp.float32(0.5), normal(rng, (1, 5))
    cases = {
        "lhs": (lambda x: jaxops.matmul(x, w, bias=bias), lambda x: x @ w, x),
        "rhs": (lambda w: jaxops.matmul(x, w, lhs_scale=s), lambda w: s * (x @ w), w),
        "scale": (lambda s: jaxops.matmul(x, w, lhs_scale=s), lambda s: s * (x @ w), s),
        "bias": (lambda b: jaxops.matmul(x, w, bias=b), lambda b: jnp.broadcast_to(b, dz.shape), bias),
    }
    for name, (ours, reference, operand) in cases.items():
        (got,), (wanted,) = (jax.linear_transpose(f, operand)(dz) for f in (ours, reference))
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4, err_msg=name)
    both = jax.linear_transpose(lambda x, b: jaxops.matmul(x, w, bias=b), x, bias)(dz)
    for got, name in zip(both, ("lhs", "bias"), strict=True):
        _, reference, operand = cases[name]
        np.testing.assert_allclose(got, *jax.linear_transpose(reference, operand)(dz), rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="matmul is not linear: with an activation"):
        jax.linear_transpose(lambda x: jaxops.matmul(x, w, activation="relu"), x)(dz)
    with pytest.raises(NotImplementedError, match="in several factors at once"):
        jax.linear_transpose(lambda x, w: jaxops.matmul(x, w), x, w)(dz)


def test_symbolic_sizes(rng):
    """Exported for any batch, m, n and k; on a GPU XLA's dot runs them."""
    sizes = jax.export.symbolic_shape("b, m, k, n")
    b, m, k, n = sizes
    x, w = normal(rng, (2, 3, 4)), normal(rng, (2, 4, 5))

    def run(a, b):
        general = jaxops.dot_general(a, b, (((2,), (1,)), ((0,), (0,))))
        return jax.value_and_grad(lambda a, b: (jaxops.matmul(a, b) * general).sum(), (0, 1))(a, b)

    types = (jax.ShapeDtypeStruct((b, m, k), jnp.float32), jax.ShapeDtypeStruct((b, k, n), jnp.float32))
    exported = jax.export.export(jax.jit(run), disabled_checks=jaxops.disabled_checks())(*types)
    for got, wanted in zip(jax.tree.leaves(exported.call(x, w)), jax.tree.leaves(run(x, w)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    spec = _matmul_kernel.Spec(False, False, np.dtype("float32"), precision=(lax.Precision.DEFAULT,) * 2)
    assert _matmul_kernel.kernel.choice(*types, spec=spec).kernel == "xla"


def test_symbolic_sizes_of_8_bits():
    (m,) = jax.export.symbolic_shape("m")
    types = (jax.ShapeDtypeStruct((m, 16), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((16, 32), jnp.float8_e4m3fn))
    run = jax.jit(functools.partial(jaxops.matmul, preferred_element_type=jnp.float32))
    exported = jax.export.export(run, disabled_checks=jaxops.disabled_checks())(*types)
    a, b = jnp.full((3, 16), 448, jnp.float8_e4m3fn), jnp.full((16, 32), 448, jnp.float8_e4m3fn)
    assert (exported.call(a, b) == 16 * 448.0**2).all()


def test_strict_promotion(rng):
    """Derivatives cast as they need to, where jax.numpy would refuse to promote."""
    a, b = normal(rng, (6, 8), "bfloat16"), normal(rng, (8, 5), "bfloat16")
    run = lambda f: jax.grad(lambda a, b: f(a, b, preferred_element_type=jnp.float32).sum(), (0, 1))(a, b)  # noqa: E731
    with jax.numpy_dtype_promotion("strict"):
        got, wanted = run(jaxops.matmul), run(jnp.matmul)
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(wide(x), wide(y), rtol=0.02)


def test_strict_promotion_is_asked_again():
    """After the same call under the standard promotion; lax promotes under either, and so do we, on the kernel."""
    a, b = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((4, 5))
    numbers = (((1,), (0,)), ((), ()))
    assert jaxops.matmul(a, b).dtype == np.float32
    for _ in range(2):
        with (
            jax.numpy_dtype_promotion("strict"),
            pytest.raises(ValueError, match=r"matmul: a bfloat16.* b float32"),
        ):
            jaxops.matmul(a, b)
    assert jaxops.matmul(a, b).dtype == np.float32
    with jax.numpy_dtype_promotion("strict"):
        got, wanted = jaxops.dot_general(a, b, numbers), lax.dot_general(a, b, numbers)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.attention_cases import check, dense, draw, exact, random_case, value_and_gradients
from support.meshes import mesh_of

import jaxops
from jaxops import _kernel
from jaxops.ops import _attention_kernel as kernels
from jaxops.ops import _attention_support as support
from jaxops.ops._attention_kernel import LSE_NAME, OUT_NAME
from jaxops.ops._attention_plain import WHOLE

pytestmark = pytest.mark.usefixtures("full_precision")

attend = jaxops.dot_product_attention


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(4))
def test_random_calls(dtype, seed, rng):
    check(random_case(np.random.default_rng(seed + 1000 * len(dtype)), dtype), rng)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1300, 1100, 2, 1, 16), {"is_causal": True, "segments": True}),
        ((1, 1100, 1300, 1, 1, 8), {"local_window_size": (200, 7), "bias": (1, 1, 1100, 1300)}),
        ((2, 1500, 1030, 1, 1, 8), {"query_lengths": [1500, 3], "key_lengths": [0, 700], "mask": (2, 1, 1, 1030)}),
        ((1, 1, 5000, 4, 2, 16), {"key_lengths": [4321], "sinks": True}),
        ((1, 1030, 1030, 2, 1, 8), {"is_causal": True, "logits_soft_cap": 2.0, "sinks": True}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_calls(shape, options, dtype, rng):
    check(draw(rng, shape, dtype, **options), rng)


@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"local_window_size": (60, 0)},
        {"mask": (2, 1, 200, 260), "density": 0.3},
        {"bias": (1, 4, 200, 260)},
        {"key_lengths": [260, 97]},
        {"scale": 1.0},
    ],
    ids=lambda options: next(iter(options), "full"),
)
def test_errors_are_no_larger_than_those_of_jax_nn(options, dtype, depth, rng):
    """Root mean squares of the differences from float64, beside the plain form's in the same dtype (printed by -s).

    Where the softmax is nearly one-hot, gradients are differences of <dout, value> and <dout, out>, and `out` is
    rounded.
    """
    if dtype == "float16" and jax.default_backend() == "cpu":
        pytest.skip("XLA has no such products on the CPU")
    case = draw(rng, (2, 200, 260, 4, 2, depth), dtype, **options)
    cotangent = rng.standard_normal(case.arrays["query"].shape).astype(dtype)
    wanted, _ = exact(case, cotangent)
    ours, theirs = (
        jax.jit(functools.partial(value_and_gradients, case, function))(cotangent, case.floats)
        for function in (attend, jax.nn.dot_product_attention)
    )
    for name, value in wanted.items():
        errors = [np.sqrt(np.mean((np.asarray(x[name]).astype(np.float64) - value) ** 2)) for x in (ours, theirs)]
        size = np.sqrt(np.mean(value**2))
        print(f"{dtype} depth {depth} {options} {name}: {errors[0] / size:.2e}, jax.nn {errors[1] / size:.2e}")
        assert errors[0] <= (2.5 if "scale" in options and name in ("query", "key") else 1.02) * errors[1], name


def test_float64(x64, rng):
    case = draw(rng, (2, 30, 40, 4, 2, 8), "float64", is_causal=True, sinks=True, bias=(2, 4, 30, 40))
    check(case, rng)


def test_values_of_another_depth(rng):
    check(draw(rng, (2, 30, 40, 4, 2, 8), values=24, is_causal=True), rng)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "sinks": True},
        {"mask": (2, 1, 9, 12), "density": 0.1},
        {"query_lengths": [0, 5], "sinks": True},
    ],
)
def test_residual_and_layouts(options, rng):
    case = draw(rng, (2, 9, 12, 4, 2, 8), **options)
    out, sums = case.run({}, return_residual=True)
    wanted, wanted_sums = case.run({}, dense, return_residual=True)
    np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(sums, wanted_sums, rtol=2e-5, atol=2e-5)
    assert sums.dtype == np.float32 and sums.shape == (2, 9, 4)
    single = {name: x if name == "sinks" or x.ndim == 1 else x[1] for name, x in case.arrays.items()}
    single |= {name: x[1:] for name, x in single.items() if name.endswith("lengths")}
    got, got_sums = attend(**single, **case.options, return_residual=True)
    rounding = 0 if jax.default_backend() == "cpu" else 1e-6  # XLA may multiply one sequence with other tiles
    np.testing.assert_allclose(got, out[1], rtol=rounding, atol=rounding)
    np.testing.assert_allclose(got_sums, sums[1], rtol=rounding, atol=rounding)


def test_the_logsumexp_has_a_derivative(rng):
    case = draw(rng, (1, 9, 12, 2, 2, 8), is_causal=True, sinks=True)

    def total(function, floats):
        out, sums = case.run(floats, function, return_residual=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(sums))

    got, wanted = (jax.grad(functools.partial(total, function))(case.floats) for function in (attend, dense))
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 30, 40, 4, 2, 8), {"local_window_size": (9, 3), "query_lengths": [30, 7], "key_lengths": [12, 40]}),
        ((2, 30, 40, 4, 2, 8), {"is_causal": True, "segments": True, "sinks": True}),
        ((2, 30, 40, 4, 2, 8), {"is_causal": True, "mask": (2, 1, 1, 40), "bias": (1, 4, 30, 40)}),
        ((1, 1100, 1040, 1, 1, 8), {"is_causal": True, "query_lengths": [700], "key_lengths": [900]}),
    ],
)
def test_ranks_are_not_promoted(shape, options, dtype, rng):
    """As in jax's own tests, which forbid it."""
    case = draw(rng, shape, dtype, **options)
    cotangent = np.ones(case.arrays["query"].shape, dtype)
    wanted = jax.jit(functools.partial(value_and_gradients, case, attend))(cotangent)
    with jax.numpy_rank_promotion("raise"):
        got = jax.jit(functools.partial(value_and_gradients, case, attend))(cotangent)
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value, name)


# What is not seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_lies_beyond_the_lengths_does_not_matter(dtype, value, rng):
    options = {"query_lengths": [20, 0, 33], "key_lengths": [17, 30, 1], "bias": (3, 1, 33, 41)}
    case = draw(rng, (3, 33, 41, 4, 2, 16), dtype, **options)
    cotangent = rng.standard_normal((3, 33, 4, 16)).astype(dtype)
    clean = jax.jit(functools.partial(value_and_gradients, case, attend))(cotangent)
    spoiled = {name: x.copy() for name, x in case.floats.items()}
    for b in range(3):
        queries, keys = options["query_lengths"][b], options["key_lengths"][b]
        spoiled["query"][b, queries:] = value
        cotangent[b, queries:] = value
        spoiled["bias"][b, :, queries:] = value
        spoiled["bias"][b, :, :, keys:] = value
        for name in ("key", "value"):
            spoiled[name][b, keys:] = value
    got = jax.jit(functools.partial(value_and_gradients, case, attend))(cotangent, spoiled)
    for name, wanted in clean.items():
        np.testing.assert_array_equal(got[name], wanted, name)
    assert not np.any(got["value"][1]) and not np.any(got["query"][0, 20:]) and not np.any(got["key"][0, 17:])


def test_masked_keys_may_be_nan(rng):
    case = draw(rng, (1, 20, 20, 2, 2, 8), is_causal=True)
    wanted = case.run({})
    key = case.arrays["key"].copy()
    key[0, 13:] = np.nan
    np.testing.assert_array_equal(case.run({"key": key})[0, :13], wanted[0, :13])


def test_rows_that_see_nothing(rng):
    case = draw(rng, (2, 8, 6, 2, 1, 4), mask=(2, 1, 8, 6))
    case.arrays["mask"][0, 0, 3] = False
    for function in (attend, jax.nn.dot_product_attention):
        np.testing.assert_allclose(
            case.run({}, function)[0, 3], np.broadcast_to(case.arrays["value"][0].mean(0), (2, 4)), rtol=1e-5
        )
    check(case, rng)
    for more in ({"sinks": np.zeros(2, np.float32)}, {"query_segment_ids": np.zeros((2, 8), np.int32)}):
        if "query_segment_ids" in more:
            more["key_value_segment_ids"] = np.zeros((2, 6), np.int32)
        case.arrays = {**case.arrays, **more}
        assert not np.any(case.run({})[0, 3])
        check(case, rng)


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((2, 70, 90, 4, 2, 64), "bfloat16", {"key_lengths": [0, 80], "query_lengths": [60, 50]}),
        ((2, 70, 70, 4, 1, 128), "float16", {"mask": (2, 1, 70, 70)}),
        ((1, 70, 130, 2, 2, 24), "bfloat16", {"mask": (1, 2, 70, 130), "is_causal": True}),
        ((1, 70, 70, 2, 1, 200), "bfloat16", {"mask": (1, 1, 70, 1)}),
        ((2, 40, 70, 2, 1, 136), "float16", {"mask": (2, 1, 1, 70), "query_lengths": [40, 20]}),
        ((3, 1, 300, 4, 2, 64), "bfloat16", {"key_lengths": [0, 300, 5]}),
    ],
    ids=str,
)
def test_rows_that_see_nothing_in_16_bits(shape, dtype, options, rng):
    case = draw(rng, shape, dtype, **options)
    if "mask" in case.arrays:
        mask = case.arrays["mask"] = case.arrays["mask"].copy()
        mask[0, 0, ::3] = False
    check(case, rng)


@pytest.mark.parametrize(
    ("dtype", "depth", "options"),
    [
        ("float32", 16, {"is_causal": True}),
        ("float32", 16, {"logits_soft_cap": 5.0}),
        ("bfloat16", 16, {}),
        ("bfloat16", 72, {"is_causal": True}),
        ("float16", 72, {"is_causal": True}),
        ("bfloat16", 192, {"logits_soft_cap": 5.0}),
        ("float16", 192, {}),
    ],
)
def test_rows_whose_biases_are_all_huge(dtype, depth, options, rng):
    """Beside -1e9, logits and the logarithm of how many keys share the weight are lost to rounding, as in jax.nn."""
    case = draw(rng, (2, 70, 70, 4, 2, depth), dtype, bias=(2, 4, 70, 70), **options)
    if dtype != "float16":
        case.arrays["bias"][:, :, 1::4] = np.where(rng.random((2, 4, 18, 70)) < 0.5, -1e9, -2e9)
    if dtype != "bfloat16":  # whose lowest numbers hide a key on a GPU, as -inf does
        case.arrays["bias"][:, :, 3::4] = jnp.finfo(dtype).min
    cotangent = rng.standard_normal((2, 70, 4, depth)).astype(dtype)
    wide = dataclasses.replace(case, arrays={name: x.astype(np.float32) for name, x in case.arrays.items()})
    got = jax.jit(functools.partial(value_and_gradients, case, attend))(cotangent)
    wanted = jax.jit(functools.partial(value_and_gradients, wide, dense))(cotangent.astype(np.float32))
    for name, x in wanted.items():
        error = np.linalg.norm(np.asarray(got[name], np.float32) - x) / np.linalg.norm(x)
        assert error < (2e-6 if dtype == "float32" else 8e-3), name

    def run(function, case):
        def total(floats):
            return jnp.sum(jnp.sin(case.run(floats, function).astype(jnp.float32)))

        return jax.jvp(jax.grad(total), (case.floats,), (tangents,))[1]  # forward over reverse

    if dtype == "float32":
        tangents = {name: rng.standard_normal(x.shape).astype(dtype) for name, x in case.floats.items()}
        got, wanted = run(attend, case), run(dense, wide)
        for name, x in wanted.items():
            np.testing.assert_allclose(got[name], x, rtol=1e-3, atol=1e-4 * np.max(np.abs(x)), err_msg=name)


def test_a_mask_of_queries_alone(rng):
    case = draw(rng, (2, 8, 6, 2, 1, 4), mask=(2, 1, 8, 1))
    check(case, rng)


def test_a_packed_batch_gives_the_gradients_of_its_documents(rng):
    lengths = [5, 1, 17, 9]
    total = sum(lengths)
    case = draw(rng, (1, total, total, 4, 2, 8), is_causal=True)
    case.arrays["query_segment_ids"] = np.repeat(np.arange(4), lengths).astype(np.int32)[None]
    cotangent = rng.standard_normal((1, total, 4, 8)).astype(np.float32)
    got = value_and_gradients(case, attend, cotangent)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = draw(rng, (1, length, length, 4, 2, 8), is_causal=True)
        alone.arrays = {name: x[:, part] for name, x in case.floats.items()}
        for name, wanted in value_and_gradients(alone, attend, cotangent[:, part]).items():
            np.testing.assert_allclose(got[name][:, part], wanted, rtol=1e-5, atol=1e-5, err_msg=name)
        start += length


# Beside jax.nn


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"local_window_size": 2},
        {"mask": (1, 1, 9, 12), "bias": (1, 4, 1, 12)},
        {"query_lengths": [3, 9], "key_lengths": [12, 0]},
    ],
)
def test_drop_in_for_jax_nn(options, rng):
    case = draw(rng, (2, 9, 12, 4, 2, 8), **options)
    cotangent = rng.standard_normal((2, 9, 4, 8)).astype(np.float32)
    got, wanted = (
        jax.jit(functools.partial(value_and_gradients, case, function))(cotangent)
        for function in (attend, jax.nn.dot_product_attention)
    )
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5, atol=2e-5, err_msg=name)


def test_scale_may_be_an_array(rng):
    case = draw(rng, (1, 9, 9, 2, 2, 8))
    gradient = jax.grad(lambda s, f: jnp.sum(jnp.sin(f(**case.arrays, scale=s))))
    got, wanted = (gradient(jnp.float32(0.3), function) for function in (attend, jax.nn.dot_product_attention))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    np.testing.assert_allclose(case.run({}, scale=-0.3), case.run({}, dense, scale=-0.3), rtol=1e-5, atol=1e-6)


# Derivatives


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "sinks": True, "bias": (1, 4, 1, 9), "logits_soft_cap": 3.0},
        {"mask": (1, 1, 7, 9), "density": 0.2, "query_lengths": [6]},
    ],
    ids=str,
)
def test_forward_mode_and_second_order(options, x64, rng):
    case = draw(rng, (1, 7, 9, 4, 2, 4), "float64", **options)
    moved = {name: rng.standard_normal(x.shape) for name, x in case.floats.items()}

    def total(function, floats):
        out, sums = case.run(floats, function, return_residual=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(sums))

    def all_of(function):
        f = functools.partial(total, function)
        penalty = lambda floats: sum(jnp.sum(g * g * g) for g in jax.grad(f)(floats).values())  # noqa: E731
        return (
            jax.jvp(f, (case.floats,), (moved,)),
            jax.jvp(jax.grad(f), (case.floats,), (moved,)),
            jax.grad(penalty)(case.floats),
        )

    got, wanted = (jax.jit(functools.partial(all_of, function))() for function in (attend, dense))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), got, wanted)


def sizes(jaxpr, found=None):
    """The sizes of all values in a program and in the programs inside it."""
    found = set() if found is None else found
    for equation in jaxpr.eqns:
        found.update(variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size"))
        for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                sizes(inner, found)
    return found


@pytest.mark.parametrize("derivative", ["value", "grad", "jvp", "hvp", "grad of grad"])
def test_no_array_of_all_weights(derivative):
    """The compiled program's largest buffers grow with the tokens, not with their square."""

    def total(x):
        return jnp.sum(jnp.sin(attend(x, x, x, is_causal=True)))

    functions = {
        "value": total,
        "grad": jax.grad(total),
        "jvp": lambda x: jax.jvp(total, (x,), (x,)),
        "hvp": lambda x: jax.jvp(jax.grad(total), (x,), (x,)),
        "grad of grad": jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(total)(x)))),
    }

    def temporaries(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
        return jax.jit(functions[derivative]).lower(x).compile().memory_analysis().temp_size_in_bytes

    tokens = 8 * WHOLE
    assert temporaries(tokens) < 4 * tokens**2 / 2
    assert temporaries(2 * tokens) < 2.5 * temporaries(tokens)


# Transformations


@pytest.mark.parametrize(
    ("mapped", "options"),
    [
        *((mapped, {"sinks": True}) for mapped in (("query",), ("key",), ("bias",), ("sinks",), ("mask",))),
        *((mapped, {"key_lengths": [9, 0]}) for mapped in (("query",), ("query", "key", "value"), ("mask",))),
    ],
    ids=str,
)
def test_vmap_is_one_launch(mapped, options, rng):
    options = {"bias": (1, 4, 1, 9), "mask": (2, 1, 7, 9), "key_lengths": [9, 4]} | options
    cases = [draw(rng, (2, 7, 9, 4, 2, 4), **options) for _ in range(3)]
    arrays = {
        name: np.stack([case.arrays[name] for case in cases], 1) if name in mapped else x
        for name, x in cases[0].arrays.items()
    }
    cotangent = rng.standard_normal((2, 7, 4, 4)).astype(np.float32)

    def run(arrays):
        floats = {name: arrays[name] for name in cases[0].floats}
        out, pull = jax.vjp(lambda floats: attend(**{**arrays, **floats}), floats)
        return out, pull(cotangent)[0]

    axes = {name: 1 if name in mapped else None for name in arrays}
    got = jax.jit(jax.vmap(run, (axes,)))(arrays)
    for j in range(3):
        picked = {name: x[:, j] if name in mapped else x for name, x in arrays.items()}
        wanted = run(picked)
        jax.tree.map(lambda g, w, j=j: np.testing.assert_allclose(g[j], w, rtol=2e-5, atol=2e-5), got, wanted)

    assert _calls(jax.vmap(run, (axes,)), arrays) == _calls(run, cases[0].arrays)


def _calls(function, *args):
    text = str(jax.make_jaxpr(function)(*args))
    return {name: text.count(f"jaxops_{name}[") for name in ("attention_fwd", "attention_bwd")}


def test_residuals_have_checkpoint_names():
    x = jnp.ones((1, 4, 1, 8))

    def loss(policy):
        f = jax.checkpoint(lambda x: jnp.sum(jnp.sin(attend(x, x, x))), policy=policy)
        return _calls(jax.grad(f), x)

    again, kept = {"attention_fwd": 2, "attention_bwd": 1}, {"attention_fwd": 1, "attention_bwd": 1}
    assert loss(None) == again
    assert loss(checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)) == kept
    assert loss(checkpoint_policies.save_only_these_names(LSE_NAME)) == again
    ours = jaxops.checkpoint_policies
    assert loss(ours.save_only_these_ops("attention")) == kept
    assert loss(ours.dots_saveable) == kept
    assert loss(ours.dots_with_no_batch_dims_saveable) == again


#: The split axes: batch and heads, the queries, both lengths (context parallel).
SPLITS = {
    "batch and heads": (PartitionSpec("x", None, "y"), PartitionSpec("x", None, "y")),
    "queries": (PartitionSpec(None, ("x", "y")), PartitionSpec()),
    "both lengths": (PartitionSpec(None, ("x", "y")), PartitionSpec(None, ("x", "y"))),
    "batch and both lengths": (PartitionSpec("x", "y"), PartitionSpec("x", "y")),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("split", SPLITS)
def test_sharded(split, kind, rng):
    """Values and gradients are one device's, and only keys, values and their gradients move."""
    mesh = mesh_of((2, 2), ("x", "y"), kind)
    options = {"is_causal": True, "local_window_size": (20, 3), "query_lengths": [30, 9, 32, 0]}
    case = draw(rng, (4, 32, 32, 4, 2, 8), key_lengths=[32, 0, 7, 32], **options)
    cotangent = rng.standard_normal((4, 32, 4, 8)).astype(np.float32)
    wanted = jax.jit(functools.partial(value_and_gradients, case, attend))(cotangent)
    query, key = (NamedSharding(mesh, spec) for spec in SPLITS[split])
    with jax.set_mesh(mesh):
        floats = {n: jax.device_put(x, query if n == "query" else key) for n, x in case.floats.items()}
        cotangent = jax.device_put(cotangent, query)
        step = jax.jit(functools.partial(value_and_gradients, case, attend))
        compiled = step.lower(cotangent, floats).compile()
        got = compiled(cotangent, floats)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=2e-5, err_msg=name)
    text = compiled.as_text()
    gathers, reductions = text.count(" all-gather("), text.count(" all-reduce(") + text.count(" reduce-scatter(")
    assert "all-to-all" not in text and "collective-permute" not in text
    if split == "batch and heads":
        assert gathers == reductions == 0
    elif split == "queries":
        assert gathers == 0 and reductions
    else:
        assert gathers and reductions
        for line in text.splitlines():
            if " all-gather(" in line:  # key and value, whole along their key axis
                assert "32,2,8]" in line or "8,2,32]" in line or "2,32,8]" in line or "2,8,32]" in line, line


def test_inside_shard_map(rng):
    mesh = mesh_of((2, 2), ("x", "y"), AxisType.Auto)
    case = draw(rng, (4, 1100, 1100, 4, 2, 8), is_causal=True)
    spec = PartitionSpec("x", None, "y")

    def grad(query, key, value):
        run = lambda *xs: jnp.sum(jnp.sin(attend(*xs, is_causal=True)))  # noqa: E731
        return jax.grad(run, (0, 1, 2))(query, key, value)

    wanted = jax.jit(grad)(*case.floats.values())
    got = jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=spec, out_specs=spec))(*case.floats.values())
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_export_and_donation(rng):
    case = draw(rng, (2, 7, 9, 4, 2, 4), is_causal=True)
    run = jax.jit(lambda q, k, v: attend(q, k, v, is_causal=True), donate_argnums=0)
    wanted = case.run({})
    batch, tokens = jax.export.symbolic_shape("batch, tokens")
    types = [jax.ShapeDtypeStruct((batch, tokens, *x.shape[2:]), x.dtype) for x in case.arrays.values()]
    query = types[0]
    exported = jax.export.export(run, disabled_checks=jaxops.disabled_checks())(
        query, *(jax.ShapeDtypeStruct((batch, 9, *t.shape[2:]), t.dtype) for t in types[1:])
    )
    np.testing.assert_allclose(exported.call(*map(jnp.asarray, case.arrays.values())), wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(run(*map(jnp.asarray, case.arrays.values())), wanted, rtol=1e-6, atol=1e-6)


# Which implementation


def test_explain_says_which_and_why():
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)

    def details(*operands, **options):
        return [
            call.detail
            for call in jaxops.explain(functools.partial(attend, **options), *operands, platform="cuda").calls
            if call.kernel == "attention_fwd"
        ]

    (found,) = details(x, x, x, is_causal=True)
    assert found == "on a GPU jaxops, causal"
    (found,) = details(x, x, x, implementation="xla")
    assert "implementation='xla' was asked for" in found
    wide = jax.ShapeDtypeStruct((1, 64, 2, 264), jnp.bfloat16)
    (found,) = details(wide, wide, wide)
    assert "multiples of 8 up to" in found
    (found,) = details(*[jax.ShapeDtypeStruct(x.shape, jnp.float32)] * 3)
    assert "there is no attention kernel for float32" in found
    causal, full = (
        jaxops.explain(functools.partial(attend, is_causal=c), x, x, x, platform="cuda").flops for c in (True, False)
    )
    assert full == 4 * 2 * 64 * 64 * 64 and causal == 4 * 2 * 64 * (64 * 65 // 2)


def test_cpu_runs_without_a_warning_and_without_a_target():
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    text = jax.jit(attend).trace(x, x, x).lower(lowering_platforms=("cpu",)).as_text()
    assert "jaxops.attention" not in text
    assert _kernel.KERNELS["attention_fwd"].plain_on == {"cpu"}


def test_empty_axes():
    x = jnp.ones((2, 3, 1, 4))
    assert attend(x[:, :0], x, x).shape == (2, 0, 1, 4)
    assert attend(x[:0], x[:0], x[:0]).shape == (0, 3, 1, 4)
    np.testing.assert_array_equal(attend(x, x[:, :0], x[:, :0]), 0 * x)


def test_few_queries_split_the_keys():
    """Parts fill the multiprocessors in whole waves; a workspace with room for them tells the handler."""
    assert support.key_splits(8, 8, 4, 8192, 128) == 2  # 64 heads, 128 blocks
    assert support.key_splits(1, 8, 4, 131072, 128) == 16
    assert support.key_splits(32, 32, 1, 2048, 64) == 1  # 1024 heads fill them
    assert support.key_splits(1, 1, 1, 100, 64) == 1
    assert support.key_splits(1, 1, support.FEW_ROWS + 1, 8192, 64) == 0
    (queries,) = jax.export.symbolic_shape("queries")
    assert support.key_splits(1, 1, queries, 8192, 64) == 0
    few, many = (support.forward_workspace(8, t, 8192, 8, 4, 128, False) for t in (1, 100))
    assert many == 4 and few == many + 2 * 8 * 32 * (128 + 2)


# The kernels

on_hopper = pytest.mark.gpu("9.0")


@on_hopper
@pytest.mark.parametrize("mapped", [("query",), ("query", "key", "value"), ("bias",), ("sinks", "mask")])
def test_kernels_under_vmap(mapped, rng):
    options = {"bias": (1, 4, 1, 90), "sinks": True, "mask": (2, 1, 70, 90), "key_lengths": [90, 41]}
    cases = [draw(rng, (2, 70, 90, 4, 2, 64), "bfloat16", **options) for _ in range(3)]
    arrays = {
        name: np.stack([case.arrays[name] for case in cases], 1) if name in mapped else x
        for name, x in cases[0].arrays.items()
    }

    def run(arrays):
        floats = {name: arrays[name] for name in cases[0].floats}
        out, pull = jax.vjp(lambda floats: attend(**{**arrays, **floats}, implementation="jaxops"), floats)
        return out, pull(jnp.cos(out))[0]

    axes = {name: 1 if name in mapped else None for name in arrays}
    got = jax.jit(jax.vmap(run, (axes,)))(arrays)
    for j in range(3):
        wanted = jax.jit(run)({name: x[:, j] if name in mapped else x for name, x in arrays.items()})
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            g, w = np.asarray(g[j], np.float32), np.asarray(w, np.float32)
            assert np.linalg.norm(g - w) <= 0.02 * np.linalg.norm(w)


@on_hopper
@pytest.mark.parametrize("depth", [64, 128, 192])
def test_kernels_of_parts_of_the_queries(depth, rng):
    """The parts run as on devices that share the queries: their results and gradients equal the whole's."""
    case = draw(rng, (2, 384, 384, 4, 2, depth), "bfloat16")
    query, key, value = case.arrays.values()
    query = query.reshape(2, 384, 2, 2, depth)
    call = kernels.Call(depth**-0.5, causal=True, window=(200, -1))

    @jax.jit
    def run(query, dout, offset):
        x = {"query": query, "key": key, "value": value, "query_offset": offset}
        out = kernels.forward(call, x, ("out", "lse"))
        return out["out"], *kernels._backward(call, x | out | {"dout": dout}, ("dquery", "dkey", "dvalue")).values()

    dout = rng.standard_normal(query.shape).astype("bfloat16")
    whole = run(query, dout, np.zeros(1, np.int32))
    parts = [run(query[:, i : i + 128], dout[:, i : i + 128], np.int32([i])) for i in range(0, 384, 128)]
    found = [np.concatenate(xs, 1) for xs in list(zip(*parts, strict=True))[:2]]
    found += [np.sum(np.asarray(xs, np.float32), 0) for xs in list(zip(*parts, strict=True))[2:]]
    for got, wanted in zip(found, whole, strict=True):
        got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
        assert np.linalg.norm(got - wanted) <= 0.02 * np.linalg.norm(wanted)


@on_hopper
@pytest.mark.parametrize("few", [0, 10**6])
@pytest.mark.parametrize(
    ("depth", "options"),
    [(64, {"mask": (2, 6, 300, 260)}), (64, {"is_causal": True}), (128, {"bias": (1, 6, 300, 260)}), (128, {})],
)
def test_kernels_of_shared_keys(depth, options, few, monkeypatch, rng):
    """Query heads that share a key head, one after the other or taken apart."""
    monkeypatch.setattr(kernels, "_FEW_BLOCKS", few)
    check(draw(rng, (2, 300, 260, 6, 2, depth), "bfloat16", **options), rng)


def _arranged(kind, rng, queries, keys, heads):
    """Segments or a mask: only ranges, or with gaps."""
    i, j = np.arange(queries)[:, None], np.arange(keys)[None]
    documents = np.minimum(np.arange(keys) // 150, 3)
    masks = {
        "causal mask": j <= i,
        "prefix mask": j <= np.maximum(i, 200),
        "banded mask": (j >= i - 90) & (j <= i + 40),
        "later mask": j > i,
        "padding mask": j < keys - 77,
        "documents mask": documents[None] == documents[:queries, None],
        "random mask": rng.random((queries, keys)) < 0.8,
        "empty mask": np.zeros((queries, keys), bool) | (i % 100 == 3),
    }
    if kind in masks:
        return {"mask": np.broadcast_to(masks[kind], (queries, keys))[None, None]}
    if kind == "mask of heads":
        return {"mask": np.stack([j <= i + 50 * h for h in range(heads)])[None]}
    if kind == "mask of batches":
        return {"mask": np.stack([j <= i, (j > i - 99) & (j < i + 99)])[:, None]}
    if kind == "mask of keys":
        return {"mask": (np.arange(keys) < np.array([[keys - 9], [133]]))[:, None, None]}
    ids = {
        "ascending": documents,
        "padded": np.where(np.arange(keys) < keys - 99, documents + 1, 0),
        "backwards": 7 - documents,
        "mixed": np.arange(keys) // 50 % 3,
        "short": np.arange(keys) // 3,
    }[kind]
    batches = np.stack([ids, ids[::-1]]).astype(np.int32)
    return {"query_segment_ids": batches[:, :queries].copy(), "key_value_segment_ids": batches}


ARRANGED = ["causal mask", "prefix mask", "banded mask", "later mask", "padding mask", "documents mask", "random mask"]
ARRANGED += ["empty mask", "mask of heads", "mask of batches", "mask of keys"]
ARRANGED += ["ascending", "padded", "backwards", "mixed", "short"]


@on_hopper
@pytest.mark.parametrize(
    ("kind", "depth"), [(kind, (64, 128, 192)[i % 3]) for i, kind in enumerate(ARRANGED * 2)][::-1]
)
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_ranges_and_of_gaps(kind, depth, causal, rng):
    """The keys that segments or a mask let queries see form a range, for the fast kernel, or have gaps, for the other
    one."""
    groups = 4 if kind == "mask of heads" else 2
    queries, keys = (390, 517) if depth == 64 else (400, 512)
    case = draw(rng, (2, queries, keys, 4, groups, depth), "bfloat16", is_causal=causal, query_lengths=[queries, 350])
    case.arrays |= _arranged(kind, rng, queries, keys, 4)
    check(case, rng)


@on_hopper
@pytest.mark.parametrize("depth", [64, 128, 192])
@pytest.mark.parametrize(
    "shape", [(2, 4, 300, 520), (1, 4, 300, 520), (2, 1, 300, 520), (1, 4, 1, 520), (1, 1, 300, 519)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_of_biases(shape, depth, dtype, rng):
    """The copy engine brings 16-bit biases whose rows are aligned."""
    more = {"is_causal": True} if depth == 64 else {"segments": True, "sinks": True} if depth == 128 else {}
    case = draw(rng, (2, 300, shape[-1], 4, 2, depth), "bfloat16", bias=shape, key_lengths=[shape[-1], 400], **more)
    case.arrays["bias"] = case.arrays["bias"].astype(dtype)
    check(case, rng)


@on_hopper
@pytest.mark.parametrize("depth", [64, 128, 192])
@pytest.mark.parametrize("kind", ["lengths", "mask", "gaps", "segments", "bias"])
def test_kernels_of_many_tiles_that_nothing_sees(kind, depth, rng):
    """Each block computes many tiles, most of them empty, and reuses its shared memory. A few sequences, with one tile
    a block, give the same results."""
    batch, tokens, heads, groups, few = 96, 512, 4, 2 if kind in ("mask", "segments") else 4, 4
    lengths = rng.integers(1, 200, batch).astype(np.int32)
    query, key, value, dout = (
        rng.standard_normal((batch, tokens, n, depth)).astype("bfloat16") for n in (heads, groups, groups, heads)
    )
    seen = np.arange(tokens) < lengths[:, None]
    dout = np.where(seen[..., None, None], dout, 0).astype("bfloat16")
    pairs = (seen[:, :, None] & seen[:, None])[:, None]
    segments = np.where(seen, 1, np.arange(tokens) + 2).astype(np.int32)  # each padding token is its own segment
    masks = {
        "lengths": {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths},
        "mask": {"mask": pairs},
        "gaps": {"mask": pairs & (rng.random(pairs.shape) < 0.9)},
        "segments": {"query_segment_ids": segments, "key_value_segment_ids": segments},
        "bias": {"bias": np.where(pairs, 0, -np.inf).astype("bfloat16"), "key_value_seq_lengths": lengths},
    }[kind]

    @jax.jit
    def run(operands, masks, dout):
        out, pull = jax.vjp(lambda operands: attend(*operands, **masks, implementation="jaxops"), operands)
        return jnp.where((dout != 0).any((2, 3), keepdims=True), out, 0), *pull(dout)[0]

    found = run((query, key, value), masks, dout)
    for i in range(0, batch, few):
        part = slice(i, i + few)
        wanted = run(tuple(x[part] for x in (query, key, value)), {k: x[part] for k, x in masks.items()}, dout[part])
        for got, right in zip(found, wanted, strict=True):
            got, right = np.asarray(got[part], np.float32), np.asarray(right, np.float32)
            assert np.linalg.norm(got - right) <= 1e-2 * np.linalg.norm(right)


@on_hopper
@pytest.mark.parametrize("depth", [64, 192])
@pytest.mark.parametrize("rows, dtype", [(512, "bfloat16"), (512, "float32"), (1, "bfloat16")])
def test_kernels_of_bias_gradients_with_many_tiles(rows, dtype, depth, rng):
    """As above: each block computes up to 47 tiles of the bias's gradient. Two sequences give it one at most."""
    batch, tokens, heads, few = 96, 512, 4, 2
    operands = [rng.standard_normal((batch, tokens, heads, depth)).astype("bfloat16") for _ in range(4)]
    bias = rng.standard_normal((batch, heads, rows, tokens)).astype(dtype)
    lengths = rng.integers(1, tokens, batch).astype(np.int32)

    @jax.jit
    def run(query, key, value, dout, bias, lengths):
        options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "implementation": "jaxops"}
        return jax.vjp(lambda bias: attend(query, key, value, bias, **options), bias)[1](dout)[0]

    found = run(*operands, bias, lengths)
    for i in range(0, batch, few):
        part = slice(i, i + few)
        wanted = np.asarray(run(*(x[part] for x in (*operands, bias, lengths))), np.float32)
        assert np.linalg.norm(np.asarray(found[part], np.float32) - wanted) <= 1e-2 * np.linalg.norm(wanted)


@on_hopper
def test_kernels_of_more_documents_than_they_count(rng):
    case = draw(rng, (1, 10000, 10000, 1, 1, 64), "bfloat16", is_causal=True)
    case.arrays["query_segment_ids"] = (np.arange(10000, dtype=np.int32) // 2)[None]
    query = case.arrays["query"]
    floats = {name: x[:, -700:] for name, x in case.floats.items()}
    few = draw(rng, (1, 700, 700, 1, 1, 64), "bfloat16", is_causal=True)
    few.arrays = floats | {"query_segment_ids": case.arrays["query_segment_ids"][:, -700:]}
    cotangent = rng.standard_normal(query.shape).astype(query.dtype)
    got = jax.jit(functools.partial(value_and_gradients, case, attend))(cotangent)
    wanted, _ = exact(few, cotangent[:, -700:])
    for name, value in wanted.items():
        value, found = value.astype(np.float32), np.asarray(got[name][:, -700:], np.float32)
        assert np.linalg.norm(found - value) <= 0.01 * np.linalg.norm(value), name


@on_hopper
def test_kernels_of_more_than_2_to_the_31_elements():
    """The end of long operands gives the same result alone."""
    if jax.devices()[0].memory_stats()["bytes_limit"] < 60e9:
        pytest.skip("needs 60 GB of memory")
    tokens, heads, few = 2**17 + 70, 256, 640

    @functools.partial(jax.jit, static_argnums=1)
    def normal(seed, heads):
        return jax.random.normal(jax.random.key(seed), (1, tokens, heads, 64), jnp.bfloat16)

    @jax.jit
    def run(query, key, value, dout):
        out, pull = jax.vjp(functools.partial(attend, local_window_size=(127, 0)), query, key, value)
        return out, *pull(dout)

    arrays = [normal(seed, n) for seed, n in enumerate((heads, 8, 8, heads))]
    assert arrays[0].size > 2**31
    found = [x[:, -few + 128 :, -x.shape[2] // 8 :] for x in run(*arrays)]
    wanted = run(*(x[:, -few:, -x.shape[2] // 8 :] for x in arrays))
    for got, other in zip(found, wanted, strict=True):
        got, other = np.asarray(got, np.float32), np.asarray(other[:, 128:], np.float32)
        assert np.linalg.norm(got - other) <= 0.005 * np.linalg.norm(other)


@on_hopper
@pytest.mark.parametrize("depth", [64, 128, 192])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "segments": True}, {"bias": (1, 4, 500, 704)}, {"mask": (1, 1, 500, 704)}]
)
def test_kernels_repeat_their_bits(depth, options, rng):
    """In 400 launches."""
    case = draw(rng, (2, 500, 704, 4, 2, depth), "bfloat16", **options)
    cotangent = rng.standard_normal((2, 500, 4, depth)).astype("bfloat16")
    step = jax.jit(functools.partial(value_and_gradients, case, attend))
    differ = jax.jit(lambda a, b: sum(jnp.sum(x != y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)))
    text = step.lower(cotangent).as_text()
    assert all(f"@{_kernel.target_name(name)}(" in text for name in ("attention_fwd", "attention_bwd"))
    first = step(cotangent)
    assert sum(int(differ(step(cotangent), first)) for _ in range(400)) == 0


@pytest.mark.parametrize(("queries", "few", "apart"), [(72, 5, True), (72, 4, False), (8, 5, False)])
def test_few_key_blocks_take_query_heads_apart(queries, few, apart, monkeypatch, rng):
    """Keys and values then have gradients for each query head in f32, which are summed."""
    shapes = []

    def fake(results, query, key, value, out, lse, dout, *, scale, causal, **_):
        shapes.append(results[1].shape)
        assert results[0].shape == query.shape and results[2].shape == results[1].shape
        key, value = (jnp.repeat(x, results[1].shape[2] // x.shape[2], 2) for x in (key, value))
        attention = functools.partial(jax.nn.dot_product_attention, scale=float(scale), is_causal=causal)
        gradients = jax.vjp(attention, query, key, value)[1](dout)
        assert [x.dtype for x in results[:3]] == [query.dtype, *[np.float32 if apart else key.dtype] * 2]
        found = [x.astype(result.dtype) for x, result in zip(gradients, results[:3], strict=True)]
        return [*found, jnp.zeros(results[3].shape, results[3].dtype)]

    monkeypatch.setattr(kernels._backward, "ffi_call", fake)
    monkeypatch.setattr(kernels._backward, "why_not", lambda *_: None)
    monkeypatch.setattr(kernels, "_FEW_BLOCKS", few)
    batch, keys, heads, group, depth = 2, 72, 2, 3, 16
    query = rng.standard_normal((batch, queries, heads, group, depth)).astype("bfloat16")
    key, value = (rng.standard_normal((batch, keys, heads, depth)).astype("bfloat16") for _ in range(2))
    call = kernels.Call(0.3, causal=True)
    given = {"query": query, "key": key, "value": value}
    found = kernels.plain.forward(call, given)
    given |= {"out": found["out"], "lse": found["lse"]}
    given |= {"dout": rng.standard_normal(found["out"].shape).astype("bfloat16")}
    params = {"names": tuple(given), "wanted": ("dquery", "dkey", "dvalue"), "call": call}
    found = kernels._backward.call_target(*given.values(), **params)
    assert shapes == [(batch, keys, heads * group if apart else heads, depth)]
    wanted = kernels._backward.plain(*given.values(), **params)
    for got, right in zip(found, wanted, strict=True):
        assert got.shape == right.shape
        got, right = np.asarray(got, np.float32), np.asarray(right, np.float32)
        assert np.linalg.norm(got - right) <= 1e-2 * np.linalg.norm(right)


def test_sinks_of_queries_that_a_mask_hides():
    """The logsumexp and its gradient do not depend on the shape in which the mask is given."""
    q, sinks = jnp.ones((1, 3, 1, 4)), jnp.array([0.7])
    mask = jnp.array([[True], [False], [False]])

    def sums(sinks, mask):
        options = {"mask": mask, "sinks": sinks, "return_residual": True, "query_seq_lengths": jnp.array([2])}
        return jaxops.dot_product_attention(q, q, q, **options)[1]

    for given in (mask, jnp.broadcast_to(mask, (3, 3))):
        np.testing.assert_allclose(sums(sinks, given).ravel()[1:], [0.7, -np.inf], rtol=1e-6)
        np.testing.assert_allclose(jax.jacrev(sums)(sinks, given).ravel()[1:], [1, 0])

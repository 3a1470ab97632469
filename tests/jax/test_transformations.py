"""The matrix of transformations.py, and cases that do not fit into it."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformations
from jax.experimental import checkify
from jax.test_util import check_grads
from support import transformer
from support.derivatives import check_second_order
from support.ops import CASES, ROW_OPS

import jaxops
from jaxops import _kernel
from jaxops.ops import matmul

#: Tested with more shapes and axes elsewhere.
ELSEWHERE = ("jit", "vmap", "nested vmap", "scan", "while", "cond", "remat", "check_grads")
#: Of ops that are there with all their options, too, the others are slow tests.
PLAIN = ("grad", "jvp")


def cells():
    for op in transformations.OPS:
        twice = any(other.startswith(f"{op}, ") for other in transformations.OPS)
        for name in transformations.TRANSFORMATIONS:
            if name not in ELSEWHERE:
                yield pytest.param(op, name, marks=[pytest.mark.slow] * (twice and name not in PLAIN))


@pytest.mark.parametrize(("op", "name"), [*cells()])
def test_cell(op, name):
    transformations.check(op, name)


# --- derivatives ---


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape))


def options_of_softmax(rng, op):
    x, bias, scale = draw(rng, 2, 3, 4), draw(rng, 3, 4), jnp.asarray(0.7)
    where = rng.random((2, 1, 4)) < 0.7
    where[:, :, 0] = True
    visible = where & np.tril(np.ones((3, 4), bool))
    call = getattr(jaxops, op)
    return {
        "bias": (lambda x, b: call(x, bias=b), (x, bias[0])),
        "bias of rows": (lambda x, b: call(x, bias=b), (x, bias[:, :1])),
        "axes and where": (lambda x, b: jnp.where(where, call(x, (0, 2), where, bias=b, scale=0.5), 0), (x, bias)),
        "no axes": (lambda x: call(x, ()), (x,)),
        "everything": (
            lambda x, b, s: jnp.where(visible, call(x, where=where, bias=b, scale=s, causal=True), 0),
            (x, bias, scale),
        ),
    }


def options_of_norm(rng, op):
    call = getattr(jaxops, op)
    x, residual, scale = draw(rng, 2, 3, 4), draw(rng, 2, 3, 4), draw(rng, 4)
    add = lambda pair: pair[0] + transformations.bend(pair[1])  # noqa: E731
    calls = {
        "x alone": (call, (x,)),
        "axes": (lambda x, s: call(x, s, axis=(0, 2)), (x, draw(rng, 2, 4))),
        "residual": (lambda x, r, s: add(call(x, s, residual=r)), (x, residual, scale)),
        "the sum alone": (lambda x, r: call(x, residual=r)[1], (x, residual)),
    }
    if op == "layer_norm":
        where = rng.random((2, 1, 4)) < 0.7
        where[:, :, 0] = True
        every = lambda x, r, s, b: add(call(x, s, b, residual=r, where=where, epsilon=0.1))  # noqa: E731
        calls["bias alone"] = (lambda x, b: call(x, None, b), (x, scale))
        calls["everything"] = (every, (x, residual, scale, draw(rng, 4)))
    return calls


def options_of_matmul(rng, op):
    a, b, bias = draw(rng, 2, 3, 4), draw(rng, 4, 5), draw(rng, 2, 1, 5)
    activations = {
        name: (lambda a, b, c, name=name: jaxops.matmul(a, b, bias=c, activation=name), (a, b, bias))
        for name in ("relu", "gelu_exact", "silu")
    }
    numbers = (((1, 2), (2, 0)), ((0,), (1,)))
    return activations | {
        "broadcast": (jaxops.matmul, (a[:, None], draw(rng, 3, 4, 2))),
        "dot_general": (lambda a, b: jaxops.dot_general(a, b, numbers), (draw(rng, 2, 3, 4, 2), draw(rng, 4, 2, 3))),
        "vectors": (jaxops.matmul, (a[0, 0], b[:, 0])),
    }


OPTIONS = dict.fromkeys(("softmax", "log_softmax"), options_of_softmax)
OPTIONS |= dict.fromkeys(("layer_norm", "rms_norm"), options_of_norm) | {"matmul": options_of_matmul}


#: The others have the rules of one of these.
FAMILIES = ("softmax", "layer_norm", "matmul")


@pytest.mark.parametrize("op", [pytest.param(op, marks=[pytest.mark.slow] * (op not in FAMILIES)) for op in OPTIONS])
def test_second_derivatives_of_every_option(op, rng, x64):
    """Against differences, in both modes and all their compositions; all options in one function."""
    calls = OPTIONS[op](rng, op)
    operands = [xs for _, xs in calls.values()]

    def every_call(operands):
        return sum(transformations.scalar(f)(*xs) for (f, _), xs in zip(calls.values(), operands, strict=True))

    check_second_order(every_call, (operands,), rng)


def test_third_derivatives(rng, x64):
    x, scale = draw(rng, 2, 5), draw(rng, 5)
    f = jax.jit(lambda x, s: jaxops.log_softmax(jaxops.layer_norm(jaxops.softmax(x), s)))
    check_grads(f, (x, scale), order=3, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_jvp_through_a_transformer(rng, x64):
    """With every op swapped: values, tangents and Hessian-vector products are plain JAX's."""
    params = transformer.parameters(16, 2, 12, "float64")
    x, targets = draw(rng, 2, 6, 16), rng.integers(0, 12, (2, 6))
    direction = jax.tree.map(lambda p: jnp.cos(3 * jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), params)

    def derivatives(ops):
        loss = lambda p: transformer.loss(ops, p, x, targets)  # noqa: E731

        @jax.jit
        def both(p):
            return jax.jvp(loss, (p,), (direction,)), jax.jvp(jax.grad(loss), (p,), (direction,))

        return both(params)

    with jax.default_matmul_precision("highest"):
        got, wanted = (jax.tree.leaves(derivatives(ops)) for ops in (transformer.OURS, transformer.PLAIN))
    for ours, plain in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-8, atol=1e-8 * float(jnp.max(jnp.abs(plain))))


# --- compilation ---


def test_checkpoint_policies(rng):
    """What a policy saves is not computed again."""
    x, w = (jnp.asarray(rng.standard_normal((8, 8)), jnp.float32) for _ in range(2))
    policies = jaxops.checkpoint_policies

    def layer(x, w):
        return jnp.sum(jaxops.softmax(jnp.sin(jaxops.matmul(jnp.cos(x), w))) ** 2)

    def kernels(policy):
        gradient = jax.grad(jax.checkpoint(layer, policy=policy), (0, 1))
        text = str(jax.make_jaxpr(gradient)(x, w))
        return text.count("jaxops_matmul["), text.count("jaxops_softmax_fwd[")

    assert kernels(None) == (4, 2)
    assert kernels(policies.dots_saveable) == kernels(policies.dots_with_no_batch_dims_saveable) == (3, 2)
    assert kernels(policies.save_only_these_ops("softmax")) == (4, 1)
    assert kernels(policies.save_only_these_ops("softmax", "matmul")) == (3, 1)
    batched = jax.make_jaxpr(jaxops.matmul)(jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))).eqns[-1]
    assert batched.primitive.name == "jaxops_matmul"
    operands = [v.aval for v in batched.invars]
    assert policies.dots_saveable(batched.primitive, *operands, **batched.params)
    assert not policies.dots_with_no_batch_dims_saveable(batched.primitive, *operands, **batched.params)
    with pytest.raises(ValueError, match=r"ops must be among .*softmax.*, got 'dense'"):
        policies.save_only_these_ops("dense")


@pytest.mark.parametrize("name", ["dots_saveable", "dots_with_no_batch_dims_saveable", "checkpoint_dots"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_policies_of_jax_save_products(name, batch):
    """As many as of JAX's own, also inside jit and scan."""
    x, w = jnp.ones((*batch, 4, 4)), jnp.ones((*batch, 4, 4))

    def products(matmul, primitive):
        def layer(x, w):
            y = jax.jit(lambda x: jnp.sin(matmul(jnp.sin(x), w)))(x)
            return jax.lax.scan(lambda y, _: (jnp.sin(matmul(y, w)), None), y, None, length=2)[0]

        f = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, name))
        text = str(jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(f(x, w)), (0, 1)))(x, w))
        return text.count(f" {primitive}[")

    assert products(jaxops.matmul, "jaxops_matmul") == products(jnp.matmul, "dot_general")


def test_policies_of_jax_save_attention():
    """The result of attention is a product, whose batches are heads."""
    x = jnp.ones((1, 8, 2, 64), jnp.bfloat16)

    def kernels(policy):
        attend = functools.partial(jaxops.dot_product_attention, implementation="jaxops")
        f = jax.checkpoint(lambda x: jnp.sin(attend(x, x, x)), policy=policy)
        return str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(f(x))))(x)).count("jaxops_attention_fwd[")

    policies = jax.checkpoint_policies
    assert kernels(policies.dots_saveable) == kernels(jaxops.checkpoint_policies.dots_saveable) == 1
    assert kernels(policies.dots_with_no_batch_dims_saveable) == kernels(None) == 2


def test_products_are_not_offloaded():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    f = jax.checkpoint(lambda x: jnp.sin(jaxops.matmul(x, x)), policy=policy)
    with pytest.warns(UserWarning, match="recomputes matmul: its policy would offload"):
        text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(f(x))))(jnp.ones((4, 4))))
    assert text.count("jaxops_matmul[") == 4


def test_no_tangent_costs_nothing(rng):
    """Operands that are not differentiated bring neither kernels nor residuals."""
    x, s, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 8), (8,), (8,)))
    pullback = jax.vjp(lambda x: jaxops.layer_norm(x, s, b), x)[1]
    kept = sorted(v.shape for v in jax.tree.leaves(pullback) if isinstance(v, jax.Array))
    assert [shape for shape in kept if np.prod(shape) > 8] == [(4, 8)]  # x; and mean, rstd and scale


def test_persistent_compilation_cache(tmp_path):
    """A second process compiles nothing, on one device or many. Calls that differ in parameters have two entries."""
    script = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, jaxops
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
misses = []
jax.monitoring.register_event_listener(lambda event, **_: misses.append(event) if "cache_misses" in event else None)
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.arange(32.0).reshape(4, 8)
values = []
for sharding in (x.sharding, NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))):
    for epsilon in (0.0, 100.0):
        f = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jaxops.rms_norm(x, epsilon=epsilon)))))
        values.append(round(float(f(jax.device_put(x, sharding))[0, 0]), 5))
print(len(misses), *values)
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True, env=os.environ
        )
        for _ in range(2)
    ]
    first, second = (output.stdout.split() for output in outputs)
    assert int(first[0]) > 0 and int(second[0]) == 0
    assert first[1:] == second[1:] and first[1::2] == [first[1]] * 3 and first[2::2] == [first[2]] * 3
    assert first[1] != first[2]


@pytest.mark.parametrize("op", ROW_OPS)
def test_gradients_for_rows_and_columns_of_any_number(op, rng):
    def gradients(x, parameter):
        """Of x, and of the bias, or of the scale."""
        call = getattr(jaxops, op)
        calls = {"rows": lambda x, p: call(x * p), "logits": lambda x, p: call(x, bias=p), "norm": call}
        f = calls[CASES[op].family]
        return jax.grad(lambda x, p: jnp.square(f(x, p)).sum(), (0, 1))(x, parameter)

    rows, columns = jax.export.symbolic_shape("rows, columns")
    types = (jax.ShapeDtypeStruct((rows, columns), jnp.float32), jax.ShapeDtypeStruct((columns,), jnp.float32))
    exported = jax.export.export(jax.jit(gradients), disabled_checks=jaxops.disabled_checks())(*types)
    for shape in ((300, 7), (3, 64)):
        x, parameter = draw(rng, *shape).astype(jnp.float32), draw(rng, shape[1]).astype(jnp.float32)
        for got, wanted in zip(exported.call(x, parameter), gradients(x, parameter), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_transposed(rng):
    x, scale = draw(rng, 3, 4), draw(rng, 4)
    for function, operand, name in (
        (jaxops.softmax, x, "softmax_fwd cannot be transposed in x"),
        (lambda s: jaxops.layer_norm(x, s), scale, "layer_norm_fwd cannot be transposed in scale"),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}; use jax.vjp"):
            jax.linear_transpose(function, operand)(x)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "layer_norm", "rms_norm", "matmul"])
def test_checkify_names_the_kernel(op):
    """Also the kernel of a gradient alone, and inside jit and scan."""
    x = jnp.ones((2, 4, 4)).at[0, 0, 0].set(jnp.nan)
    call = getattr(jaxops, op)
    call = functools.partial(call, x[1]) if op == "matmul" else call
    in_scan = jax.jit(lambda x: jax.lax.scan(lambda carry, row: (carry, call(row)), 0, x)[1])
    error, _ = checkify.checkify(in_scan, errors=checkify.float_checks)(x)
    assert f"nan generated by primitive: jaxops_{op}" in error.get()
    assert checkify.checkify(in_scan, errors=checkify.float_checks)(jnp.ones((2, 4, 4)))[0].get() is None
    assert checkify.checkify(in_scan, errors=checkify.index_checks)(x)[0].get() is None
    _, pullback = jax.vjp(call, jnp.ones((4, 4)))
    error, _ = checkify.checkify(pullback, errors=checkify.float_checks)(jnp.full((4, 4), jnp.nan))
    assert "nan generated by primitive: jaxops_" in error.get()


def test_checkify_has_no_undefined_elements():
    """A product of which only a triangle is wanted is whole under checkify."""
    x = jnp.ones((4, 4))
    numbers = (((1,), (1,)), ((), ()))
    product = lambda x: matmul.general_product(x, x, numbers, triangle="result")  # noqa: E731
    checked = checkify.checkify(product, errors=checkify.float_checks)
    assert "triangle='result'" in str(jax.make_jaxpr(product)(x))
    assert "triangle='result'" not in str(jax.make_jaxpr(checked)(x))


def test_exported_programs_name_their_kernels():
    names = {check._impl if hasattr(check, "_impl") else str(check) for check in jaxops.disabled_checks()}
    assert len(names) == len(_kernel.KERNELS)
    with pytest.raises(ValueError, match="softmax_fwd"):
        jax.export.export(jax.jit(jaxops.softmax))(jnp.ones((2, 3)))

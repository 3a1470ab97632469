"""jaxops.explain."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen

import jaxops
from jaxops import _device, _kernel

X = jnp.ones((4, 8), jnp.bfloat16)
W = jax.ShapeDtypeStruct((8, 6), jnp.bfloat16)


def network(x, w):
    with jax.named_scope("head"):
        return jaxops.softmax(jaxops.matmul(x, w, bias=jnp.ones(6), activation="gelu"), where=jnp.ones(6, bool))


def test_calls():
    found = jaxops.explain(jax.jit(network), X, W, platform="cuda")
    product, softmax = found.calls
    assert (product.kernel, softmax.kernel) == ("matmul", "softmax_fwd")
    assert product.operands == ("bf16[4,8]", "bf16[8,6]", "f32[1,6]")
    assert product.results == ("bf16[4,6]",)
    assert product.flops == 2 * 4 * 8 * 6
    assert product.bytes == 2 * (32 + 48 + 24) + 4 * 6
    assert product.detail == "on a GPU xla: rows along m or n that are aligned to 4 bytes: XLA's own dot is ahead; gelu"
    assert product.runs_on == "XLA"
    assert (
        softmax.detail.startswith("4 rows of 6 adjacent: WarpRows, 1 lane x 16 elements; axes=(1,)")
        and "has=('where',)" in softmax.detail
    )
    assert softmax.bytes == 2 * 24 * 2 + 6
    assert {call.scope for call in found.calls} == {"head"}
    assert (found.bytes, found.flops) == (product.bytes + softmax.bytes, product.flops)
    assert found.xla_products == 0


@pytest.mark.cuda
def test_the_chosen_kernel_is_named():
    x, w = (jax.ShapeDtypeStruct((4095, 4097), jnp.bfloat16), jax.ShapeDtypeStruct((4097, 4093), jnp.bfloat16))
    (product,) = jaxops.explain(jaxops.matmul, x, w, platform="cuda").calls
    assert product.runs_on == "jaxops"
    assert product.detail.startswith("on a GPU wgmma (tile ")


def test_table():
    lines = str(jaxops.explain(network, X, W)).splitlines()
    assert lines[0].split() == ["kernel", "times", "runs", "on", "operands", "->", "results", "bytes", "flops", "call"]
    assert lines[1].startswith("matmul") and "@head" in lines[1]
    assert lines[-1].startswith(f"2 calls on {'cuda' if jax.default_backend() == 'gpu' else 'cpu'}: 334 B")
    assert repr(jaxops.explain(jnp.sin, X)).splitlines()[-1].startswith("0 calls")


def test_table_of_one_call_with_symbolic_sizes():
    (size,) = jax.export.symbolic_shape("m")
    x = jax.ShapeDtypeStruct((size, 8), jnp.float32)
    assert str(jaxops.explain(jaxops.softmax, x, platform="cpu")).splitlines()[-1] == "1 call on cpu: 64*m B, 0 FLOP"
    table = str(jaxops.explain(jaxops.matmul, x, jnp.ones((8, 2)), platform="cpu"))
    assert "32*m" in table and "the shape is symbolic" in table


def test_options_are_not_traced():
    found = jaxops.explain(jaxops.softmax, X, axis=0, dtype=jnp.float32, causal=True, where=jnp.ones((4, 8), bool))
    assert "axes=(0,)" in found.calls[0].detail and found.calls[0].results == ("f32[4,8]",)
    static = jax.jit(jaxops.softmax, static_argnames="axis")
    assert "axes=(0,)" in jaxops.explain(static, X, axis=np.int64(0)).calls[0].detail
    module = flax_linen.Einsum((8, 5), "ab,bc->ac", dtype=jnp.float32)  # has a shape and a dtype, and is no array
    assert not jaxops.explain(lambda m, x: m.init(jax.random.key(0), x), module, X).calls
    nested = jaxops.explain(lambda options: jaxops.layer_norm(**options), {"x": X, "epsilon": 1e-3})
    assert "epsilon=0.001" in nested.calls[0].detail


def test_gradients():
    kernels = [c.kernel for c in jaxops.explain(jax.grad(lambda x: jaxops.softmax(x).sum()), X).calls]
    assert kernels == ["softmax_fwd", "softmax_bwd"]


@pytest.mark.parametrize("op", ["softmax", "rms_norm", "layer_norm"])
def test_forward_mode(op):
    """Its tangents are what the backward kernel gives."""
    function = getattr(jaxops, op)
    kernels = [c.kernel for c in jaxops.explain(lambda x: jax.jvp(function, (x,), (x,)), X).calls]
    assert kernels == [f"{op}_fwd", f"{op}_bwd"]


def test_scans_without_steps():
    found = jaxops.explain(lambda x: jax.lax.scan(lambda c, _: (jaxops.rms_norm(c), None), x, None, length=0), X)
    assert [call.times for call in found.calls] == [0] and found.bytes == 0


def test_gradients_of_an_activation():
    kernels = [c.kernel for c in jaxops.explain(jax.grad(lambda x: network(x, jnp.ones((8, 6))).sum()), X).calls]
    assert kernels == ["matmul", "softmax_fwd", "softmax_bwd", "epilogue_bwd", "matmul"]


def test_loops_branches_and_products():
    def function(x, n):
        x, _ = jax.lax.scan(lambda c, _: (jax.lax.scan(step, c, None, length=3)[0], None), x, None, length=5)
        x = jax.lax.fori_loop(0, n, lambda i, c: jaxops.rms_norm(c), x)
        x = jax.lax.cond(n > 1, jaxops.softmax, jaxops.log_softmax, x)
        return jax.checkpoint(lambda x: x @ x.T)(x)

    def step(c, _):
        return jaxops.layer_norm(c), None

    found = jaxops.explain(function, X, jnp.int32(3))
    times = {call.kernel: call.times for call in found.calls}
    assert times == {"layer_norm_fwd": 15, "rms_norm_fwd": None, "softmax_fwd": 1, "log_softmax_fwd": 1}
    assert found.xla_products == 1
    assert "  loop  " in str(found)


def test_where_kernels_run(monkeypatch):
    assert jaxops.explain(jaxops.softmax, X, platform="cpu").calls[0].runs_on == "jaxops"
    assert jaxops.explain(jaxops.softmax, X, platform="tpu").calls[0].runs_on == "XLA"
    assert jaxops.explain(jaxops.softmax, X[:0], platform="cpu").calls[0].runs_on == "XLA"
    monkeypatch.setattr(_kernel.KERNELS["softmax_fwd"], "explain", lambda x, **params: f"tile for {x.shape}")
    assert jaxops.explain(jaxops.softmax, X).calls[0].detail == "tile for (4, 8)"


def test_names_in_profiles():
    """HLO's op_name, which profilers show, has the scope and the kernel."""
    text = jax.jit(jax.grad(lambda x: network(x, jnp.ones(W.shape, W.dtype)).astype(jnp.float32).sum())).lower(X)
    names = re.findall(r'custom_call_target="jaxops[^\n]*op_name="([^"]*)"', text.compile().as_text())
    for kernel in ("softmax_fwd", "softmax_bwd"):
        assert any("(head)" in name and f"jaxops_{kernel}" in name for name in names), names


def test_rows_over_other_axes():
    (call,) = jaxops.explain(lambda x: jaxops.softmax(x, axis=0), X).calls
    assert call.detail.startswith("8 rows of 4 strided: TileRows, 1 lane x 4 packs; axes=(0,)")


def test_only_functions():
    with pytest.raises(TypeError, match="function must be callable, got int"):
        jaxops.explain(3)


def test_parameters_of_zero_are_shown():
    found = jaxops.explain(lambda x: jaxops.rms_norm(x, epsilon=0.0), X)
    assert "epsilon=0.0" in found.calls[0].detail


def test_calls_beyond_the_limits_run_on_xla():
    """Arrays of many axes, and of few."""
    for rank, wanted in ((14, "XLA"), (13, "jaxops")):
        (call,) = jaxops.explain(jaxops.softmax, jax.ShapeDtypeStruct((2,) * rank, jnp.float32), platform="cpu").calls
        assert call.runs_on == wanted


def test_empty_products_run_on_xla():
    for shape in ((0, 512, 512), (512, 512, 0), (512, 0, 512)):
        m, k, n = shape
        x, w = (jax.ShapeDtypeStruct(size, jnp.float32) for size in ((m, k), (k, n)))
        found = jaxops.explain(lambda a, b: jaxops.matmul(a, b, precision="highest"), x, w, platform="cuda")
        assert [call.runs_on for call in found.calls] == ["XLA"]
        assert "nothing to multiply" in found.calls[0].detail


def test_a_log_softmax_for_a_loss_is_said():
    """Where only a gather uses it, the function that needs no logarithms of all entries is named."""
    x, labels = jnp.ones((4, 9)), jnp.zeros((4, 1), int)

    def loss(x):
        return -jnp.take_along_axis(jaxops.log_softmax(x), labels, -1).mean()

    def of_all(x):
        y = jaxops.log_softmax(x)
        return jnp.take_along_axis(y, labels, -1).mean() + y.sum()

    for function, said in ((loss, True), (jax.jit(loss), True), (jax.grad(loss), True), (of_all, False)):
        forward = next(c for c in jaxops.explain(function, x).calls if c.kernel == "log_softmax_fwd")
        assert ("softmax_cross_entropy_with_integer_labels" in forward.detail) == said
    assert "cross_entropy" not in str(jaxops.explain(jaxops.log_softmax, x))


def test_linear_losses(monkeypatch):
    """One call where Hopper's kernel runs; where it does not, the calls in its chunks."""
    monkeypatch.setattr("jaxops.ops._linear_cross_entropy.local_device", lambda: _device.Device("9.0", 132))
    monkeypatch.setattr("jaxops.ops._linear_cross_entropy.why_no_handler", lambda *_: None)

    def kernels(tokens, width=64, dtype="bfloat16", columns=1001, platform="cuda", **options):
        types = ((tokens, width), dtype), ((width, columns), dtype), ((tokens,), "int32")
        function = functools.partial(jaxops.linear_cross_entropy, reduction="mean", **options)
        found = jaxops.explain(function, *itertools.starmap(jax.ShapeDtypeStruct, types), platform=platform)
        return {call.kernel for call in found.calls}

    assert kernels(300) == {"linear_cross_entropy_fwd"}
    for others in ({"dtype": "float32"}, {"width": 60}, {"tokens": 64}, {"platform": "cpu"}, {"chunk_tokens": 100}):
        assert kernels(**{"tokens": 300, **others}) == {"cross_entropy_fwd"}

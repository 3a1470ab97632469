"""gated_matmul and gated_mlp: values and derivatives against float64, the residuals kept for them, Hopper's kernels."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracle
from support.meshes import mesh_of

import jaxops
from jaxops._device import H200
from jaxops.ops import _matmul_choice as choices
from jaxops.ops import _matmul_kernel as ops
from jaxops.ops._gated_kernel import backward, kernel

pytestmark = pytest.mark.usefixtures("full_precision")


def draw(rng, shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def by_hand(activation):
    act = {
        "silu": jax.nn.silu,
        "relu": jax.nn.relu,
        "gelu": jax.nn.gelu,
        "gelu_exact": lambda z: jax.nn.gelu(z, approximate=False),
    }[activation]
    return lambda x, w_gate, w_up: act(x @ w_gate) * (x @ w_up)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_exact", "relu"])
def test_values_and_derivatives(activation, recompute, rng):
    """Forward, reverse, second order and vmap."""
    xs = [draw(rng, shape) for shape in ((3, 5, 8), (8, 6), (8, 6))]
    moved = [draw(rng, x.shape) for x in xs]

    @jax.jit
    def results(xs, moved):
        found = []
        for f in (
            lambda *xs: jaxops.gated_matmul(*xs, activation=activation, recompute=recompute),
            by_hand(activation),
        ):
            gradient = jax.grad(lambda *xs, f=f: jnp.sum(jnp.sin(f(*xs))), (0, 1, 2))
            mapped = jax.vmap(f, (0, None, None))(*xs)
            found.append((jax.jvp(f, xs, moved), gradient(*xs), jax.jvp(gradient, xs, moved)[1], mapped))
        return found

    got, wanted = results(xs, moved)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_rounding(rng):
    """The products are rounded to 16 bits, the result once more."""
    xs = [draw(rng, shape, "bfloat16") for shape in ((40, 64), (64, 48), (64, 48))]
    got = jaxops.gated_matmul(*xs)
    assert got.dtype == jnp.bfloat16
    x, w_gate, w_up = (np.asarray(v).astype(np.float64) for v in xs)
    gates, ups = x @ w_gate, x @ w_up
    wanted = gates / (1 + np.exp(-gates)) * ups
    # Three roundings; silu's derivative is at most 1.1.
    bound = 2**-8 * (1.1 * np.abs(gates * ups) + 2 * np.abs(wanted)) + 1e-6
    assert np.all(np.abs(np.asarray(got).astype(np.float64) - wanted) <= bound)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_the_backward_pass_keeps(recompute, rng):
    """The two products in 16 bits, or only the operands."""
    xs = [draw(rng, shape, "bfloat16") for shape in ((40, 64), (64, 48), (64, 48))]
    _, pullback = jax.vjp(lambda *xs: jaxops.gated_matmul(*xs, recompute=recompute), *xs)
    kept = [x for x in jax.tree.leaves(pullback) if getattr(x, "shape", None) == (40, 48)]
    assert [x.dtype for x in kept] == [jnp.bfloat16] * (0 if recompute else 2)


# --- 16-bit operands, which one kernel may take ---

SIXTEEN_BITS = ("bfloat16", "float16")
HALF = ((3, 8, 16), (16, 24), (16, 24))
WHOLE = (*HALF, (24, 40))


def near(got, wanted, share):
    """Whether a result's distance from another is at most this share of its norm."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return got.shape == wanted.shape and np.linalg.norm(got - wanted) <= share * np.linalg.norm(wanted)


def plainly(*xs):
    """The MLP, or its first half, in f32."""
    x, w_gate, w_up, *down = (x.astype(jnp.float32) for x in xs)
    hidden = jax.nn.silu(x @ w_gate) * (x @ w_up)
    return (hidden @ down[0] if down else hidden).astype(xs[0].dtype)


def gradients(f):
    return lambda *xs: jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs).astype(jnp.float32))), [*range(len(xs))])(*xs)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("op, shapes", [(jaxops.gated_matmul, HALF), (jaxops.gated_mlp, WHOLE)])
def test_transformations_in_16_bits(op, shapes, dtype, rng):
    """Forward, reverse and second order; vmap along every operand."""
    xs, moved = ([draw(rng, shape).astype(dtype) / 3 for shape in shapes] for _ in range(2))

    def results(f):
        gradient = gradients(f)

        def squares(*xs):
            return sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in gradient(*xs))

        def mapped(i, axis):
            stacked = [jnp.stack([x, 2 * x], axis) if i == j else x for j, x in enumerate(xs)]
            axes = [axis if i == j else None for j in range(len(xs))]
            return [jax.vmap(g, axes)(*stacked) for g in (f, gradient)]

        return jax.jit(
            lambda xs, moved: (
                (f(*xs), jax.jvp(f, xs, moved), gradient(*xs), jax.jvp(gradient, xs, moved)[1]),
                (jax.grad(squares, [*range(len(xs))])(*xs), f(xs[0][0, 0], *xs[1:])),
                [mapped(i, axis) for i, axis in ((0, 0), *enumerate(1 for _ in xs))],
            )
        )(xs, moved)

    pairs = list(zip(*(jax.tree.leaves(results(f)) for f in (op, plainly)), strict=True))
    assert len(pairs) > 20
    for i, (got, wanted) in enumerate(pairs):
        assert got.dtype == dtype and near(got, wanted, 0.03), f"result {i}"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_whole_mlp_keeps(dtype, recompute, rng):
    """Of the inner width both products; or only the operands. The product with w_down does not run again."""
    xs = [draw(rng, shape).astype(dtype) for shape in WHOLE]
    _, pullback = jax.vjp(lambda *xs: jaxops.gated_mlp(*xs, recompute=recompute), *xs)
    kept = [x for x in jax.tree.leaves(pullback) if getattr(x, "shape", None) == (3, 8, 24)]
    assert [x.dtype for x in kept] == [dtype] * (0 if recompute else 2)
    if not recompute:
        backward_pass = str(jax.make_jaxpr(pullback)(draw(rng, (3, 8, 40)).astype(dtype)))
        products = re.findall(r"jaxops_(?:matmul|gated_matmul|gated_matmul_bwd)\[", backward_pass)
        # Of w_down's transpose, of w_gate's and w_up's, and of the three weights' gradients.
        assert len(products) == 6


@pytest.mark.parametrize("spec", [("a",), ("columns",), ("a", "columns"), ("k",)], ids="+".join)
@pytest.mark.parametrize("op, shapes", [(jaxops.gated_matmul, HALF), (jaxops.gated_mlp, WHOLE)])
@pytest.mark.parametrize("here", [False, True], ids=["composed", "local"])
def test_split_over_devices(op, shapes, spec, here, rng, monkeypatch):
    """Rows, the first weights' columns (the last weights' rows), or the first contracted axis are split.

    here: each device's part as on a GPU that has the kernels, by the products that are chosen there for small sizes.
    """
    if here:
        monkeypatch.setattr("jaxops.ops._gated_kernel.why_no_handler", lambda *_: None)
        monkeypatch.setattr("jaxops._kernel.why_no_handler", lambda *_: None)
    mesh = mesh_of((2, 2), ("a", "b"))
    columns, k = "b" if "columns" in spec else None, "b" if "k" in spec else None
    specs = [("a" if "a" in spec else None, None, k), (k, columns), (k, columns), (columns, None)]
    xs = [draw(rng, shape).astype("float16") / 3 for shape in ((4, *shapes[0][1:]), *shapes[1:])]
    split = [
        jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec))) for x, spec in zip(xs, specs[: len(xs)], strict=True)
    ]
    for f, wanted in ((op, plainly), (gradients(op), gradients(plainly))):
        for got, exact in zip(jax.tree.leaves(jax.jit(f)(*split)), jax.tree.leaves(wanted(*xs)), strict=True):
            assert near(got, exact, 0.01)


# --- Hopper's kernels ---

hopper = pytest.mark.gpu("9.0")
ACCEPTED = ("silu", "gelu", "gelu_exact", "relu")
#: Products' m, n and k: parts of a tile, odd rows, columns at tile edges, several tiles a block.
SIZES = (
    *((200, 328, 256), (333, 520, 1032), (1, 8, 96), (64, 1000, 640), (129, 264, 4104), (17, 400, 2048)),
    *((8, 64, 64), (130, 72, 8), (1000, 2056, 72), (257, 136, 1000), (2056, 1992, 200), (128, 192, 128)),
)


@pytest.fixture
def force(monkeypatch):
    """Makes Hopper's kernels the choice for every size."""

    def choose(tile, all_columns, count, product, device):
        whole = dataclasses.replace(product, n=count * product.n)
        return choices.Choice("wgmma", "forced", tile, choices.band(whole, tile))

    monkeypatch.setattr(choices, "_choose_one_pass", choose)
    monkeypatch.setattr(choices, "_GATED_BACKWARD_K", 0)
    monkeypatch.setattr(choices, "_GATED_BACKWARD_TILES", 0)


def sums_error(x, w):
    """A bound on the error of f32 sums of the products of x and w, truncated after every few."""
    return (8 + x.shape[-1] / 16) * 2**-23 * (np.abs(x) @ np.abs(w))


def within(got, wanted, bound):
    """Whether each element in a 16-bit result is within `bound` and its rounding from the exact one."""
    finfo = jnp.finfo(got.dtype)
    got = np.asarray(got, np.float64)
    rounding = float(finfo.eps) / 2 * (np.abs(wanted) + bound) + float(finfo.smallest_subnormal)
    assert np.isfinite(got).all()
    worst = np.max(np.abs(got - wanted) / (bound + 1.01 * rounding))
    assert worst <= 1, f"{worst:.2f} times the bound"


@hopper
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward_kernel(size, dtype, force, rng):
    m, n, k = size
    xs = [draw(rng, (m, k)).astype(dtype)]
    xs += [(draw(rng, (k, n)) / k**0.5).astype(dtype) for _ in range(2)]
    x, w_gate, w_up = (np.asarray(v, np.float64) for v in xs)
    gate, up = x @ w_gate, x @ w_up
    gate_error, up_error = sums_error(x, w_gate), sums_error(x, w_up)
    options = [{"activation": a, "precision": ops.precision_of(None)} for a in ACCEPTED]
    run = jax.jit(lambda xs: [kernel.bind(*xs, **o, kept=kept) for o in options for kept in (False, True)])
    first, second = jax.device_get(run(xs)), jax.device_get(run(xs))
    for (alone, whole), activation in zip(zip(first[::2], first[1::2], strict=True), ACCEPTED, strict=True):
        act, *_ = oracle.activate(activation, gate)
        bound = 1.2 * gate_error * (np.abs(up) + up_error) + np.abs(act) * up_error + 2**-18 * np.abs(act * up)
        bound += 2**-20 * np.abs(up)  # for an activation near 0 after cancellation
        within(alone[0], act * up, bound)
        np.testing.assert_array_equal(alone[0], whole[0])
        within(whole[1], gate, gate_error)
        within(whole[2], up, up_error)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


@hopper
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_backward_kernel(size, dtype, force, rng):
    m, n, k = size
    dy = draw(rng, (m, k)).astype(dtype)
    w_down = (draw(rng, (n, k)) / k**0.5).astype(dtype)
    gate, up = (draw(rng, (m, n)).astype(dtype) for _ in range(2))
    xs = [dy, w_down, gate, up]
    wide = [np.asarray(v, np.float64) for v in xs]
    dh, error = wide[0] @ wide[1].T, sums_error(wide[0], wide[1].T)
    options = [{"activation": a, "precision": ops.precision_of(None), "wants_hidden": True} for a in ACCEPTED]
    run = jax.jit(lambda xs: [backward.bind(*xs, **o) for o in options])
    first, second = jax.device_get(run(xs)), jax.device_get(run(xs))
    for (dgate, dup, hidden), activation in zip(first, ACCEPTED, strict=True):
        act, slope, _ = oracle.activate(activation, wide[2])
        size_of_up = np.abs(wide[3])
        within(dgate, dh * wide[3] * slope, (1.2 * error + 2**-18 * np.abs(dh) * (1 + np.abs(wide[2]))) * size_of_up)
        within(dup, dh * act, error * np.abs(act) + np.abs(dh) * (2**-18 * np.abs(act) + 2**-20))
        assert near(hidden, act * wide[3], 0.01)  # by XLA
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


@hopper
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("op, down", [(jaxops.gated_matmul, False), (jaxops.gated_mlp, True)])
def test_gradients_of_the_kernels(op, down, dtype, force, rng):
    """Against f32, with rows along several axes, second order, vmap, and rounding alone between."""
    shapes = [(3, 67, 136), (136, 200), (136, 200), *([(200, 72)] if down else [])]
    sizes = [1, *(shape[0] ** -0.5 for shape in shapes[1:])]
    xs, moved = (
        [(draw(rng, shape) * size).astype(dtype) for shape, size in zip(shapes, sizes, strict=True)] for _ in range(2)
    )

    def results(f):
        gradient = gradients(f)
        return jax.jit(
            lambda xs, moved: (
                f(*xs),
                gradient(*xs),
                jax.jvp(gradient, xs, moved)[1],
                jax.vmap(gradient, (0, *(None for _ in xs[1:])))(*xs),
                f(xs[0][0, 0], *xs[1:]),
            )
        )(xs, moved)

    for got, wanted in zip(jax.tree.leaves(results(op)), jax.tree.leaves(results(plainly)), strict=True):
        assert near(got, wanted, 0.02)


@hopper
@pytest.mark.cuda
def test_operands_beside_a_pack(force, rng):
    """Slices that begin between 16-byte multiples, which the copy engine cannot read."""
    m, n, k = 40, 24, 16
    flat = [draw(rng, (1 + a * b,)).astype("bfloat16") for a, b in ((m, k), (k, n), (k, n))]

    @jax.jit
    def run(flat):
        sliced = [f[1:].reshape(shape) for f, shape in zip(flat, ((m, k), (k, n), (k, n)), strict=True)]
        return jaxops.gated_matmul(*sliced), plainly(*sliced)

    got, wanted = run(flat)
    assert near(got, wanted, 0.01)


@pytest.mark.cuda
def test_choice_and_explain(monkeypatch):
    """Large products take one pass, small ones do not, and explain says so."""
    monkeypatch.setattr("jaxops.ops._gated_kernel.local_device", lambda: H200)

    def calls(tokens, width, inner):
        shapes = ((tokens, width), (width, inner), (width, inner), (inner, width))
        xs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        found = jaxops.explain(gradients(jaxops.gated_mlp), *xs, platform="cuda").calls
        return {call.kernel: call for call in found}

    large, small = calls(8192, 4096, 14336), calls(24, 64, 64)
    for name in ("gated_matmul", "gated_matmul_bwd"):
        assert large[name].runs_on == "jaxops" and "tile 128x" in large[name].detail
        assert small[name].runs_on == "XLA" and "a pass over it" in small[name].detail

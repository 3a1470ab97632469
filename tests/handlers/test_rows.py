"""The row kernels' calling convention: handlers beside plain JAX, nothing of x's size around a call, wrong bindings."""

import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracle
from support.ops import value_and_gradients

import jaxops
from jaxops import _kernel, _warnings
from jaxops._rows import accumulator

SHAPE = (4, 3, 16, 24)  # batch, heads, queries, keys


def draw(rng, shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def softmax_calls(rng, op):
    """Functions of x and further operands, and the operands."""
    call = getattr(jaxops, op)
    bias, where = draw(rng, (1, 3, 16, 24)), rng.random((4, 1, 1, 24)) < 0.8
    where[1] = False
    scale = jnp.float32(0.7)
    every_option = lambda x, b, **o: call(x, bias=b, where=where, scale=0.5, causal=True, **o)  # noqa: E731
    return {
        "x alone": (call, ()),
        "axis 1": (functools.partial(call, axis=1), ()),
        "axes 0 and 2": (lambda x, b: call(x, (0, 2), where, bias=b), (bias,)),
        "no axes": (lambda x, b: call(x, (), bias=b, causal=True), (bias,)),
        "every option": (every_option, (bias,)),
        "every option, bfloat16 result": (functools.partial(every_option, dtype=jnp.bfloat16), (bias,)),
        "bias of columns": (lambda x, b: call(x, bias=b), (bias[0, 0, 0],)),
        "bfloat16 bias": (every_option, (bias[:, :1].astype(jnp.bfloat16),)),
        "traced scale": (lambda x, b, s: call(x, bias=b, where=where, scale=s), (bias, scale)),
        "mapped": (jax.vmap(lambda x, b: call(x, bias=b, causal=True), (2, None)), (bias[0, 0, :3],)),
    }


def norm_calls(rng, op):
    call = getattr(jaxops, op)
    scale, bias, residual = draw(rng, (24,)), draw(rng, (24,)), draw(rng, SHAPE)
    add = lambda pair: pair[0] + 2 * pair[1]  # noqa: E731
    calls = {
        "x alone": (call, ()),
        "scale": (call, (scale,)),
        "axis 1": (lambda x, s: call(x, s, axis=1), (scale[:3],)),
        "axes 0 and 2": (lambda x, s: call(x, s, axis=(0, 2)), (draw(rng, (4, 16)),)),
        "no axes": (functools.partial(call, axis=()), ()),
        "residual": (lambda x, s, r: add(call(x, s, residual=r.astype(x.dtype))), (scale, residual)),
        "float32 result": (lambda x, s: call(x, s, dtype=jnp.float32), (scale,)),
        "mapped": (jax.vmap(call, (2, 0)), (draw(rng, (16, 24)),)),
    }
    if op == "layer_norm":
        where = rng.random((4, 1, 1, 24)) < 0.7
        calls |= {
            "bias": (call, (scale, bias)),
            "bias alone": (lambda x, b: call(x, None, b), (bias,)),
            "where": (lambda x, s, b: call(x, s, b, where=where), (scale, bias)),
            "everything": (lambda x, s, b, r: add(call(x, s, b, where=where, residual=r)), (scale, bias, residual)),
        }
    return calls


CALLS = {"softmax": softmax_calls, "log_softmax": softmax_calls, "layer_norm": norm_calls, "rms_norm": norm_calls}
every_op = pytest.mark.parametrize("op", CALLS)


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_handlers_agree_with_plain_jax(op, dtype, rng, monkeypatch):
    """Every option and layout, values and gradients."""
    with jax.enable_x64(dtype == "float64"):
        calls = CALLS[op](rng, op)
        x = draw(rng, SHAPE, dtype)
        cotangents = [draw(rng, jax.eval_shape(f, x, *operands).shape) for f, operands in calls.values()]

        def run_all():
            return jax.jit(
                lambda x, rest, dys: [
                    value_and_gradients(f, (x, *operands), dy)
                    for (f, _), operands, dy in zip(calls.values(), rest, dys, strict=True)
                ]
            )(x, [operands for _, operands in calls.values()], cotangents)

        by_handlers = run_all()
        monkeypatch.setattr(_kernel, "HANDLERS", {})
        monkeypatch.setattr(_warnings, "_said", set())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jaxops.FallbackWarning)
            by_jax = run_all()
    for name, got, wanted in zip(calls, by_handlers, by_jax, strict=True):
        for i, (ours, plain) in enumerate(zip(got, wanted, strict=True)):
            assert ours.dtype == plain.dtype and ours.shape == plain.shape, (name, i)
            ours, plain = (np.asarray(v).astype(np.float64) for v in (ours, plain))
            size = np.abs(np.where(np.isfinite(plain), plain, 0)).max()
            # softmax's gradient starts from its rounded result: an ulp of the result, if exponentials differ by
            # rounding.
            coarsest = max((x.dtype, got[0].dtype), key=lambda d: float(jnp.finfo(d).eps))
            tolerance = {"float32": 1e-5, "float64": 1e-12}.get(str(coarsest), 2e-2)
            what = f"{name}: result {i}"
            atol = tolerance * max(size, 1e-3)
            if (op, name, i) == ("layer_norm", "no axes", 1):  # 0, left over by terms dy / sqrt(epsilon)
                atol = max(atol, 4e3 * float(jnp.finfo(accumulator(dtype)).eps))
            np.testing.assert_allclose(ours, plain, rtol=tolerance, atol=atol, err_msg=what)


# --- rows that blocks share in parts ---

#: Shapes and axes: rows with adjacent elements, whole packs or not, and with elements along two separate axes; rows
#: across, in packs and not.
IN_PARTS = [((1, 1048583), (1,)), ((3, 600009), (1,)), ((2, 600008), (1,)), ((70, 3, 151), (0, 2))]
IN_PARTS += [((9, 2, 4096), (0, 2)), ((2, 16500, 8), (1,)), ((2, 2500, 3), (1,))]


@every_op
@pytest.mark.parametrize(
    "dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")], ids=str
)
def test_rows_in_parts(op, dtypes, rng, on_gpu):
    """Values and every gradient against float64, in one program."""
    if not on_gpu and dtypes[0] == dtypes[1] != "float32":
        pytest.skip("only GPUs have blocks, and kernels for each dtype")
    norm = "norm" in op
    names = ("scale", "bias", "residual") if op == "layer_norm" else ("scale",) if norm else ()
    options = {"epsilon": 1e-6} if norm else {}

    def call(axes, x, *others):
        results = getattr(jaxops, op)(x, axis=axes, dtype=dtypes[1], **options, **dict(zip(names, others, strict=True)))
        return results if op == "layer_norm" else (results,)

    cases = []
    for shape, axes in IN_PARTS:
        row = tuple(shape[a] for a in axes)
        others = [draw(rng, row if name != "residual" else shape) for name in names]
        operands = [draw(rng, shape, dtypes[0]), *others[:2], *[r.astype(dtypes[0]) for r in others[2:]]]
        cotangents = jax.eval_shape(functools.partial(call, axes), *operands)
        cases.append((axes, operands, tuple(draw(rng, y.shape, y.dtype) for y in cotangents)))

    def run(cases):
        found = []
        for (axes, _, _), (operands, dys) in zip(known, cases, strict=True):
            y, pull = jax.vjp(functools.partial(call, axes), *operands)
            found.append((y, pull(dys)))
        return found

    known, arrays = cases, [case[1:] for case in cases]
    program = jax.jit(run)
    text = program.lower(arrays).as_text()
    assert text.count("has_parts = true") == 2 * len(IN_PARTS)
    for (axes, operands, dys), (y, gradients) in zip(cases, program(arrays), strict=True):
        named = dict(zip(("x", *names), map(np.asarray, operands), strict=True))
        kind = oracle.Norm if norm else oracle.Logits
        wanted = kind(op, **named, axes=axes, dtype=dtypes[1], **options)
        for got, target in zip(y, wanted.value(), strict=True):
            assert oracle.error(got, target) <= 4, (axes, operands[0].shape)
        targets = wanted.vjp(*map(np.asarray, dys))
        for name, got in zip(named, gradients, strict=True):
            assert oracle.error(got, targets[name]) <= 16, (name, axes, operands[0].shape)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("columns", [256, 151])
def test_parameter_gradients_of_rows_in_parts(op, columns, rng):
    """Mapped entries with their own parameters; each row is along two separate axes."""
    count = 2 if op == "layer_norm" else 1
    x, *parameters = draw(rng, (70, 3, columns)), *(draw(rng, (3, 70, columns)) for _ in range(count))

    def gradients(x, *parameters):
        return value_and_gradients(lambda *xs: getattr(jaxops, op)(*xs, axis=(0, 1)), (x, *parameters), x)

    mapped = jax.vmap(gradients, (1, *[0] * count))
    assert jax.jit(mapped).lower(x, *parameters).as_text().count("has_parts = true") == 2
    alone = zip(*(gradients(x[:, i], *(p[i] for p in parameters)) for i in range(3)), strict=True)
    for i, (got, wanted) in enumerate(zip(mapped(x, *parameters), map(np.stack, alone), strict=True)):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5, err_msg=f"result {i}")


# --- operations that XLA adds around the kernels ---


def other_instructions(function, *operands) -> list[str]:
    """The compiled program's instructions, beside kernels, whose result has at least as many elements as x."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        text = jax.jit(function).lower(*operands).compile().as_text()
    assert 'custom_call_target="jaxops.' in text
    found = []
    for line in text.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?\S+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if match and match[2] not in ("parameter", "custom-call", "get-tuple-element"):
            size = math.prod(int(d) for d in match[1].split(",") if d)
            found += [line.strip()] if size >= operands[0].size else []
    return found


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_are_not_materialised(op, dtype, rng):
    """Forward and in the gradient of x, nothing is broadcast, converted, transposed or masked outside the kernels."""
    call = getattr(jaxops, op)
    x, dy = draw(rng, SHAPE, dtype), draw(rng, SHAPE, dtype)
    where = jnp.asarray(rng.random((4, 1, 1, 24)) < 0.8)
    biases = (
        draw(rng, (1, 3, 16, 24)),
        draw(rng, (3, 1, 1), "bfloat16"),
        draw(rng, (16, 24)),
        draw(rng, (4, 1, 1, 24)),
    )
    for bias in biases:
        forward = lambda x, b, w, s: call(x, where=w, scale=s, bias=b, causal=True)  # noqa: E731
        assert other_instructions(forward, x, bias, where, jnp.float32(0.5)) == []

        def backward(x, bias, where, dy):
            return jax.vjp(lambda x: call(x, where=where, scale=0.5, bias=bias, causal=True), x)[1](dy)

        assert other_instructions(backward, x, bias, where, dy) == []

        def with_bias(x, bias, where, dy):
            return jax.vjp(lambda x, b: call(x, where=where, bias=b, causal=True), x, bias)[1](dy)

        if dtype == "float32":  # else the logits' gradient is wider than x's gradient
            assert other_instructions(with_bias, x, bias, where, dy) == []
    assert other_instructions(lambda x, w: call(x, (0, 2), w), x, where) == []
    mapped = jax.vmap(lambda x, w, b: call(x, where=w, bias=b), (2, None, None), 2)
    assert other_instructions(mapped, draw(rng, (4, 3, 5, 24), dtype), where[..., 0, :], draw(rng, (3, 24))) == []


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("axis", [-1, 1, (0, 2)], ids=str)
def test_norms_are_one_call(op, axis, rng):
    x, residual, dy, dsum = (draw(rng, SHAPE, "bfloat16") for _ in range(4))
    scale = draw(rng, [SHAPE[a] for a in np.sort(np.atleast_1d(axis) % 4)])
    where = {"where": jnp.asarray(rng.random((4, 1, 1, 24)) < 0.8)} if op == "layer_norm" else {}
    call = functools.partial(getattr(jaxops, op), axis=axis, dtype=jnp.bfloat16)

    def forward(x, residual, scale, where):
        return call(x, scale, residual=residual, **where)

    def backward(x, residual, scale, where, cotangents):
        return jax.vjp(lambda x, scale: forward(x, residual, scale, where), x, scale)[1](cotangents)

    assert other_instructions(forward, x, residual, scale, where) == []
    assert other_instructions(backward, x, residual, scale, where, (dy, dsum)) == []


# --- the binding itself ---


def test_wrong_bindings():
    """Operands that do not fit are refused when the primitive is bound, by name."""
    x, row = jnp.ones((2, 3, 4)), jnp.ones((2, 3, 1))
    options = {"axes": (2,), "dtype": x.dtype, "query_axis": -1, "key_axis": -1}
    forward = _kernel.KERNELS["softmax_fwd"]
    with pytest.raises(TypeError, match=r"softmax_fwd: bias has shape \(1, 2, 4\), which does not fit x's \(2, 3, 4\)"):
        forward(x, None, jnp.ones((1, 2, 4)), None, **options)
    with pytest.raises(TypeError, match="where has shape"):
        forward(x, None, None, jnp.ones(4, bool), **options)
    with pytest.raises(TypeError, match="dy has shape"):
        _kernel.KERNELS["softmax_bwd"](x, None, None, None, row, masked=False, **options)
    with pytest.raises(TypeError, match="rstd has shape"):
        _kernel.KERNELS["rms_norm_bwd"](x, None, None, x, x, None, axes=(2,), dtype=x.dtype)
    with pytest.raises(TypeError, match="softmax_fwd takes"):
        forward.bind(x, x, has=(), kept=(), **options)


def test_more_axes_than_the_handlers_take(rng):
    """Left to XLA, with a warning."""
    x = draw(rng, (1,) * 12 + (2, 3), "float32")
    with pytest.warns(jaxops.FallbackWarning, match="up to 12 axes"):
        got = jax.jit(jaxops.softmax)(x)
    np.testing.assert_allclose(got, jax.nn.softmax(x), rtol=1e-6)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "layer_norm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_boolean_is_its_lowest_bit(op, dtype, rng):
    """As for XLA, whatever other bits a mask from elsewhere has."""
    x, cotangent = (draw(rng, (3, 5, 48), dtype) for _ in range(2))
    for shape, axis in (((3, 5, 48), -1), ((48,), -1), ((5, 48), (1, 2)), ((3, 5, 48), 0), ((3, 1, 1), 0)):
        seen = rng.random(shape) < 0.7
        seen.reshape(shape[0], -1)[:, 0] = True
        mask = (rng.integers(0, 128, shape, np.uint8) << 1 | seen).view(bool)

        def run(x, where, cotangent, axis=axis):
            f = lambda x: getattr(jaxops, op)(x, axis=axis, where=where)  # noqa: E731
            return value_and_gradients(f, (x,), cotangent)

        for got, wanted in zip(*(jax.jit(run)(x, where, cotangent) for where in (mask, seen)), strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))

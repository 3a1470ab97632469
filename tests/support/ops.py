"""The ops: everything that the tests, the benchmarks and the demo need to know about each, once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

import jaxops

Function = Callable[..., jax.Array]

#: The axes that a variant's operands have.
SIZES = {"b": 8, "t": 4, "c": 16, "n": 8, "k": 4}


@dataclasses.dataclass(frozen=True)
class Variant:
    """An op with some options, beside the form that a user would write without jaxops.

    ours, reference: functions that take the operands. `axes` names the operands' axes (see SIZES); x has b, t, c.
    """

    ours: Function
    reference: Function
    axes: tuple[str, ...] = ("btc",)

    def operands(self, dtype="float32") -> tuple[jax.Array, ...]:
        """Random numbers, the same in each call."""
        rng = np.random.default_rng(1)
        return tuple(
            jnp.asarray((rng.standard_normal([SIZES[a] for a in names]) + (names != "btc")).astype(dtype))
            for names in self.axes
        )


@dataclasses.dataclass(frozen=True)
class OpCase:
    """An op. A new op on x alone needs the first four attributes, and `axis` if it takes one.

    Attributes:
      name: its name in jaxops, or a name for it with some options.
      ours, reference: functions that take the operands: the op, and the form that a user would write without jaxops.
        None: the op has separate tests instead of the contract.
      operands: from a numpy generator, the first operand's shape and a dtype.
      oracle: taken in float64 as the exact function; default: reference.
      family: which random calls, error bounds and benchmarks suit it: "rows" (any function on rows), "logits", "norm",
        "product", "attention" or "loss".
      axis: whether ours and reference also take an axis.
      fuzzed: whether tests/fuzz.py and tests/accuracy.py call it by its name.
      variants: by options, for tests/transformations.py; default: ours and reference on x.
      repeated: by name, functions of x and a vector, for tests/determinism.py; default: ours on x.
    """

    name: str
    ours: Function | None = None
    reference: Function | None = None
    operands: Callable[[np.random.Generator, tuple[int, ...], np.dtype], tuple[np.ndarray, ...]] | None = None
    oracle: Function | None = None
    family: str = "rows"
    axis: bool = False
    fuzzed: bool = True
    variants: Mapping[str, Variant] | None = dataclasses.field(default=None, compare=False)
    repeated: Mapping[str, Function] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        if self.variants is None:
            object.__setattr__(self, "variants", {"": Variant(self.ours, self.reference)})
        if self.repeated is None:
            object.__setattr__(self, "repeated", {self.name: lambda x, _: self.ours(x)})


def _normal(rng, shape, dtype, scale=1.0, offset=0.0):
    return (offset + scale * rng.standard_normal(shape)).astype(dtype)


def logits(rng, shape, dtype):
    """x alone, with deviation 3."""
    return (_normal(rng, shape, dtype, 3.0),)


def parameter_dtype(dtype) -> np.dtype:
    """The dtype for the scale and bias that go with x: at least f32."""
    return np.dtype("float64") if np.dtype(dtype) == np.float64 else np.dtype("float32")


def _norm_operands(parameters):
    def operands(rng, shape, dtype):
        wide = parameter_dtype(dtype)
        vectors = [_normal(rng, shape[-1:], wide, 0.2, 1.0), _normal(rng, shape[-1:], wide, 0.2)]
        return (_normal(rng, shape, dtype, 1.5, 0.5), *vectors[:parameters])

    return operands


def _flax_layer_norm(x, scale, bias, use_fast_variance=True):
    import flax.linen as nn

    module = nn.LayerNorm(dtype=x.dtype, use_fast_variance=use_fast_variance)
    return module.apply({"params": {"scale": scale, "bias": bias}}, x)


def _flax_rms_norm(x, scale):
    import flax.linen as nn

    return nn.RMSNorm(dtype=x.dtype).apply({"params": {"scale": scale}}, x)


def _matrices(rng, shape, dtype):
    m, k = shape[-2:]
    return _normal(rng, shape, dtype), _normal(rng, (k, m), dtype)


def _dense_operands(rng, shape, dtype):
    a, b = _matrices(rng, shape, dtype)
    # Preactivations about as large as 1: far below 0, gelu's derivative is smaller than its absolute error on a GPU.
    b = (b / max(b.shape[0], 1) ** 0.5).astype(b.dtype)
    return a, b, _normal(rng, b.shape[-1:], parameter_dtype(dtype))


WHERE = np.arange(SIZES["c"]) % 3 != 1
CAUSAL = np.tril(np.ones((SIZES["t"], SIZES["c"]), bool))


def _reference_norm(x, scale, bias=0.0, where=None, centred=True):
    wide = {"axis": -1, "keepdims": True, "where": None if where is None else jnp.broadcast_to(where, x.shape)}
    x = x - jnp.mean(x, **wide) if centred else x
    return x / jnp.sqrt(jnp.mean(jnp.square(x), **wide) + 1e-6) * scale + bias


def _masked_softmax(function, x, scale, bias):
    """log_softmax's masked entries, -inf, are left out."""
    visible = WHERE & CAUSAL
    if function in (jaxops.softmax, jaxops.log_softmax):
        y = function(x, where=WHERE, scale=jnp.mean(scale), bias=bias, causal=True)
    else:
        y = function(x * jnp.mean(scale) + bias, where=visible)
    return jnp.where(visible, y, 0)


def _add_norm(ours, x, residual, scale, bias):
    if ours:
        y, total = jaxops.layer_norm(x, scale, bias, where=WHERE, residual=residual)
    else:
        total = x + residual
        y = _reference_norm(total, scale, bias, WHERE)
    return y + 0.5 * total


def _attention(ours, query, key, value, sinks=None, bias=None):
    """Eight heads with depth 2; with all options also causality, a window, a mask and segments."""
    heads = SIZES["n"]
    query, key, value = (x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads) for x in (query, key, value))
    i, j = np.arange(query.shape[-3])[:, None], np.arange(key.shape[-3])[None]
    segments = np.arange(query.shape[-3]) > 0
    mask = None if bias is None else (i + j) % 3 != 1
    if ours:
        ids = jnp.broadcast_to(segments, query.shape[:-2]).astype(np.int32)
        options = {"is_causal": True, "local_window_size": (2, 1), "mask": mask, "query_segment_ids": ids}
        options = {"sinks": sinks, "bias": bias, **(options if bias is not None else {})}
        y = jaxops.dot_product_attention(query, key, value, **options)
    else:
        z = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
        if bias is not None:
            seen = mask & (j <= i) & (j >= i - 2) & (segments[:, None] == segments[None])
            z = jnp.where(seen, z + bias, -jnp.inf)
            z = jnp.concatenate([z, jnp.broadcast_to(sinks[:, None, None], (*z.shape[:3], 1))], -1)
        weights = jax.nn.softmax(z)[..., : key.shape[1]]
        y = jnp.einsum("bhts,bshd->bthd", weights, value)
    return y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])


def _labels(x, numbers):
    """x's columns, from an operand: it is split and mapped as x is."""
    return jnp.broadcast_to(jnp.floor(jnp.abs(numbers) * 7).astype(int) % SIZES["c"], x.shape[:-1])


def _loss(x, numbers):
    return jaxops.softmax_cross_entropy_with_integer_labels(x, _labels(x, numbers))


def _loss_with_options(x, numbers):
    return jaxops.softmax_cross_entropy_with_integer_labels(
        x, _labels(x, numbers), where=WHERE[None, None], label_smoothing=0.1, z_loss=0.01, logits_soft_cap=4.0
    )


def _plain_loss(x, numbers):
    here = jnp.arange(SIZES["c"]) == _labels(x, numbers)[..., None]
    return jax.nn.logsumexp(x, -1) - jnp.sum(jnp.where(here, x, 0), -1)


def _plain_loss_with_options(x, numbers):
    z = 4 * jnp.tanh(x / 4)
    lse = jax.nn.logsumexp(z, -1, where=WHERE)
    picked = jnp.sum(jnp.where(jnp.arange(SIZES["c"]) == _labels(x, numbers)[..., None], z, 0), -1)
    return lse - 0.9 * picked - 0.1 * jnp.mean(z, -1, where=WHERE) + 0.01 * lse**2


_OPS = (
    OpCase(
        "softmax",
        jaxops.softmax,
        jax.nn.softmax,
        logits,
        family="logits",
        axis=True,
        variants={
            "": Variant(jaxops.softmax, jax.nn.softmax),
            "all options": Variant(
                functools.partial(_masked_softmax, jaxops.softmax),
                functools.partial(_masked_softmax, jax.nn.softmax),
                ("btc", "n", "tc"),
            ),
        },
        repeated={
            "softmax": lambda x, b: jaxops.softmax(x, bias=b, scale=0.5, causal=True),
            "softmax of columns": lambda x, b: jaxops.softmax(x + b, 0),
        },
    ),
    OpCase(
        "log_softmax",
        jaxops.log_softmax,
        jax.nn.log_softmax,
        logits,
        family="logits",
        axis=True,
        variants={
            "": Variant(jaxops.log_softmax, jax.nn.log_softmax),
            "all options": Variant(
                functools.partial(_masked_softmax, jaxops.log_softmax),
                functools.partial(_masked_softmax, jax.nn.log_softmax),
                ("btc", "n", "tc"),
            ),
        },
        repeated={"log_softmax": lambda x, b: jaxops.log_softmax(x, bias=b, where=b > -1)},
    ),
    OpCase(
        "layer_norm",
        lambda x, scale, bias: jaxops.layer_norm(x, scale, bias, dtype=x.dtype),
        _flax_layer_norm,
        _norm_operands(2),
        functools.partial(_flax_layer_norm, use_fast_variance=False),
        family="norm",
        variants={
            "": Variant(jaxops.layer_norm, _reference_norm, ("btc", "c", "c")),
            "all options": Variant(
                functools.partial(_add_norm, True), functools.partial(_add_norm, False), ("btc", "btc", "c", "c")
            ),
        },
        repeated={"layer_norm": lambda x, b: jaxops.layer_norm(x, b, b)},
    ),
    OpCase(
        "rms_norm",
        lambda x, scale: jaxops.rms_norm(x, scale, dtype=x.dtype),
        _flax_rms_norm,
        _norm_operands(1),
        family="norm",
        variants={
            "": Variant(jaxops.rms_norm, functools.partial(_reference_norm, centred=False), ("btc", "c")),
        },
        repeated={"rms_norm": lambda x, b: jaxops.rms_norm(x, b)},
    ),
    OpCase(
        "matmul",
        jaxops.matmul,
        jnp.matmul,
        _matrices,
        family="product",
        variants={
            "": Variant(
                functools.partial(jaxops.matmul, precision="highest"),
                functools.partial(jnp.matmul, precision="highest"),
                ("btc", "cn"),
            ),
            "bias and gelu": Variant(
                lambda a, b, bias: jaxops.matmul(a, b, precision="highest", bias=bias, activation="gelu"),
                lambda a, b, bias: jax.nn.gelu(jnp.matmul(a, b, precision="highest") + bias),
                ("btc", "cn", "n"),
            ),
        },
        repeated={
            "matmul": lambda x, b: jaxops.matmul(x, x.T, bias=jnp.sum(b), activation="gelu"),
            "matmul in full precision": lambda x, b: jaxops.matmul(x.T, x, bias=b, precision="highest"),
        },
    ),
    OpCase(
        "dense_gelu",
        lambda a, b, bias: jaxops.matmul(a, b, bias=bias, activation="gelu"),
        lambda a, b, bias: jax.nn.gelu(a @ b + bias.astype(a.dtype)),
        _dense_operands,
        family="product",
        fuzzed=False,
        variants={},
        repeated={},
    ),
    OpCase("dot_general", family="product", variants={}, repeated={}),
    OpCase(
        "attention",
        family="attention",
        variants={
            "": Variant(functools.partial(_attention, True), functools.partial(_attention, False), ("btc",) * 3),
            "all options": Variant(
                functools.partial(_attention, True), functools.partial(_attention, False), ("btc",) * 3 + ("n", "tk")
            ),
        },
        repeated={},
    ),
    OpCase(
        "cross_entropy",
        family="loss",
        fuzzed=False,
        variants={
            "": Variant(_loss, _plain_loss, ("btc", "t")),
            "all options": Variant(_loss_with_options, _plain_loss_with_options, ("btc", "t")),
        },
        repeated={},
    ),
)

CASES = {case.name: case for case in _OPS}

#: The ops that the contract covers, with a reference to compete with.
COMPARISONS = {name: case for name, case in CASES.items() if case.operands is not None}
#: The ops that work on rows.
ROW_OPS = tuple(name for name, case in CASES.items() if case.family in ("rows", "logits", "norm"))
#: The ops that tests/fuzz.py calls.
FUZZED = tuple(name for name, case in CASES.items() if case.fuzzed)


def value_and_gradients(function, operands, cotangent):
    """function(*operands), and for every operand the gradient of its inner product with `cotangent`."""
    value, pullback = jax.vjp(function, *operands)
    return value, *pullback(cotangent.astype(value.dtype))


@functools.cache
def _oracle(case: OpCase):
    """Compiled once for each shape, whatever the dtypes."""
    function = case.oracle or case.reference
    return jax.jit(lambda *xs: value_and_gradients(function, xs[:-1], xs[-1]))


def exact(case: OpCase, operands, cotangent) -> list[np.ndarray]:
    """The reference's value and gradients in float64, computed on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = [np.asarray(x).astype(np.float64) for x in (*operands, cotangent)]
        return [np.asarray(x) for x in _oracle(case)(*wide)]


def ulps(got, wanted: np.ndarray, least: float = 0.0) -> float:
    """The largest error in `got`, in units in the last place at the largest of the wanted values and `least`."""
    got = np.asarray(got)
    if not got.size:
        return 0.0
    largest = max(float(np.max(np.abs(wanted))), float(jnp.finfo(got.dtype).tiny), least)
    return float(np.max(np.abs(got.astype(np.float64) - wanted))) / (float(jnp.finfo(got.dtype).eps) * largest)

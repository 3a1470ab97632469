"""Random attention calls, and their exact results, in float64 with all weights at once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from support.contract import GRADIENT_ROUNDING, ROUNDING, assert_close

#: The operands that have gradients.
FLOATS = ("query", "key", "value", "bias", "sinks")

#: Options that jax.nn does not have.
_OURS = ("sinks", "query_segment_ids", "key_value_segment_ids", "logits_soft_cap")


@dataclasses.dataclass
class Case:
    """A call: its arrays by the function's argument names, and its other options."""

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]

    @property
    def floats(self) -> dict[str, np.ndarray]:
        return {name: x for name, x in self.arrays.items() if name in FLOATS}

    def run(self, floats: dict[str, Any], function=jaxops.dot_product_attention, **options: Any):
        return function(**{**self.arrays, **floats}, **self.options, **options)

    @functools.cached_property
    def exact(self):
        """`dense`, its gradients and its weights, compiled once for all numbers."""

        def run(cotangent, floats):
            call = functools.partial(self.run, function=dense, return_weights=True)
            out, pull, weights = jax.vjp(call, floats, has_aux=True)
            return {"out": out, **pull(cotangent)[0]}, weights

        return jax.jit(run)


def draw(rng, shape, dtype="float32", values=None, **options: Any) -> Case:
    """A case with [batch, queries, keys, heads, key heads, depth].

    options: "mask", "bias": the shape; "sinks", "segments": whether there are; "query_lengths", "key_lengths": these;
    others are the function's.
    """
    batch, queries, keys, heads, groups, depth = shape

    def normal(*dims):
        return rng.standard_normal(dims).astype(dtype)

    arrays = {
        "query": normal(batch, queries, heads, depth),
        "key": normal(batch, keys, groups, depth),
        "value": normal(batch, keys, groups, values or depth),
    }
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    if bias := options.pop("bias", None):
        arrays["bias"] = normal(*bias)
    if mask := options.pop("mask", None):
        arrays["mask"] = rng.random(mask) < options.pop("density", 0.6)
    if options.pop("sinks", False):
        arrays["sinks"] = rng.standard_normal(heads).astype(np.float64 if dtype == "float64" else np.float32)
    if options.pop("segments", False):
        for name, size in (("query_segment_ids", queries), ("key_value_segment_ids", keys)):
            arrays[name] = np.sort(rng.integers(0, 4, (batch, size)), -1).astype(np.int32)
    for name, argument in (("query_lengths", "query_seq_lengths"), ("key_lengths", "key_value_seq_lengths")):
        if (lengths := options.pop(name, None)) is not None:
            arrays[argument] = np.asarray(lengths, np.int32)
    return Case(arrays, options)


def random_case(rng, dtype: str) -> Case:
    """Options, lengths and sizes at random."""
    batch, groups = (int(rng.integers(1, 4)) for _ in range(2))
    heads = groups * int(rng.integers(1, 4))
    queries, keys = (int(rng.integers(1, 200)) for _ in range(2))
    depth = 8 * int(rng.integers(1, 33))

    def maybe(value, chance=0.3):
        return value if rng.random() < chance else None

    def partly(*dims):
        return tuple(d if rng.random() < 0.6 else 1 for d in dims)

    options = {
        "bias": maybe((*partly(batch, heads, queries), keys)),
        "mask": maybe((*partly(batch, heads, queries), keys)),
        "sinks": maybe(True),
        "segments": maybe(True),
        "query_lengths": maybe(rng.integers(0, queries + 2, batch)),
        "key_lengths": maybe(rng.integers(0, keys + 2, batch)),
        "is_causal": bool(rng.random() < 0.5),
        "local_window_size": maybe(tuple(int(n) for n in rng.integers(0, 60, 2))),
        "logits_soft_cap": maybe(float(rng.uniform(1, 10))),
        "scale": maybe(float(rng.uniform(0.05, 0.25))),
    }
    return draw(
        rng, (batch, queries, keys, heads, groups, depth), dtype, **{k: v for k, v in options.items() if v is not None}
    )


def dense(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    local_window_size=None,
    logits_soft_cap=None,
    sinks=None,
    return_residual=False,
    return_weights=False,
):
    """The documented result, with all weights as one array; all arrays have a batch.

    return_weights: also return the weights [batch, heads, queries, keys], followed by the sinks' weights.
    """
    repeat = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, repeat, 2) for x in (key, value))
    z = jnp.einsum("bthd,bshd->bhts", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    z = z if logits_soft_cap is None else logits_soft_cap * jnp.tanh(z / logits_soft_cap)
    z = z if bias is None else z + bias
    i, j = jnp.arange(z.shape[2])[:, None], jnp.arange(z.shape[3])[None]
    seen = jnp.ones(z.shape, bool)
    seen = seen if mask is None else seen & mask
    seen = seen & (j <= i) if is_causal else seen
    if local_window_size is not None:
        pair = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
        seen = seen & (j >= i - pair[0]) & (j <= i + pair[1])
    inside = jnp.ones((query.shape[0], z.shape[2]), bool)
    if query_seq_lengths is not None:
        inside = jnp.arange(z.shape[2]) < query_seq_lengths[:, None]
        seen = seen & inside[:, None, :, None]
    if key_value_seq_lengths is not None:
        seen = seen & (j < key_value_seq_lengths[:, None, None, None])
    if query_segment_ids is not None:
        other = query_segment_ids if key_value_segment_ids is None else key_value_segment_ids
        seen = seen & (query_segment_ids[:, None, :, None] == other[:, None, None, :])
    z = jnp.where(seen, z, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[None, :, None, None], (*z.shape[:3], 1))
        z = jnp.concatenate([z, sink], -1)
    largest = jax.lax.stop_gradient(jnp.max(z, -1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(z - jnp.where(largest == -jnp.inf, 0, largest))
    total = jnp.sum(weights, -1, keepdims=True)
    nothing = (total == 0) | ~inside[:, None, :, None]
    weights = weights / jnp.where(nothing, 1, total)
    if sinks is None and query_segment_ids is None:  # the mean of all values, as jax.nn
        weights = jnp.where(nothing & inside[:, None, :, None], 1 / z.shape[3], weights)
    sums = jnp.where(nothing, -jnp.inf, largest + jnp.log(jnp.where(nothing, 1, total)))
    out = jnp.einsum("bhts,bshd->bthd", weights[..., : key.shape[1]], value)
    if return_weights:
        return out, weights
    return (out, jnp.swapaxes(sums[..., 0], 1, 2)) if return_residual else out


def value_and_gradients(case: Case, function, cotangent, floats=None):
    """The result "out", and the operands' gradients for its product with the cotangent, by name."""
    floats = case.floats if floats is None else floats
    out, pull = jax.vjp(lambda x: case.run(x, function), floats)
    return {"out": out, **pull(cotangent.astype(out.dtype))[0]}


def exact(case: Case, cotangent, floats=None) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The result "out" with the operands' gradients, by name, and the weights; in float64, on the CPU."""
    floats = case.floats if floats is None else floats
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = {name: np.asarray(x).astype(np.float64) for name, x in floats.items()}
        return jax.tree.map(np.asarray, case.exact(np.asarray(cotangent).astype(np.float64), wide))


def cancelling_terms(case: Case, cotangent, floats, out, weights) -> dict[str, float]:
    """The size of rounded terms that may cancel in each operand's gradient, by the operand's name.

    A logit's gradient is p (<cotangent, value> - <cotangent, out>) with the weight p, and nearly zero if p is nearly 1.
    Both sums have an error of some f32 ulp, and the second, with a rounded out, of some ulp of out's dtype.
    """
    cotangent = np.asarray(cotangent).astype(np.float64)
    largest = {name: float(np.max(np.abs(x), initial=0)) for name, x in floats.items()}
    query, seen = floats["query"], weights[..., : case.arrays["key"].shape[1]]
    scale = case.options.get("scale", query.shape[-1] ** -0.5)
    sums = query.shape[-1] ** 0.5 * float(np.max(np.abs(cotangent), initial=0))
    sums *= float(jnp.finfo(np.float32).eps / jnp.finfo(query.dtype).eps)
    products = np.sqrt(np.sum(np.square(cotangent * out), -1))  # [batch, queries, heads]
    squares = np.square(seen * np.swapaxes(products, 1, 2)[..., None])  # [batch, heads, queries, keys]

    def of(axes):
        return max(sums, float(np.max(np.sum(squares, axes), initial=0)) ** 0.5)

    factor = scale * max(largest["query"], largest["key"])
    terms = {"query": factor * of((3,)), "key": factor * of((1, 2))}
    if "bias" in floats:
        sizes = (1,) * (4 - floats["bias"].ndim) + floats["bias"].shape
        terms["bias"] = of(tuple(axis for axis, size in enumerate(sizes) if size == 1))
    if "sinks" in floats:  # a term, the product of an exponential and a sum over the depth, is off by some ulp itself
        each = weights[..., -1] * np.swapaxes(np.sum(cotangent * out, -1), 1, 2)
        terms["sinks"] = 4 * float(np.sqrt(np.mean(np.square(each))))
    return terms


def check(case: Case, rng, draws: int = 1) -> None:
    """Values and gradients are float64's, up to rounding, or at least as near as a plain form comes.

    The plain form is jax.nn's, or for f32 `dense`, if the call has options that jax.nn does not know.

    draws: sets of numbers for the same program.
    """
    query = case.arrays["query"]
    shape = (*query.shape[:3], case.arrays["value"].shape[-1])
    theirs = not any(name in case.arrays or name in case.options for name in _OURS)
    ours, reference = (
        jax.jit(functools.partial(value_and_gradients, case, function))
        for function in (jaxops.dot_product_attention, jax.nn.dot_product_attention if theirs else dense)
    )
    # jax.nn's products with 16-bit operands and f32 results are not there on the CPU.
    compares = query.dtype == np.float32 or (theirs and jax.default_backend() == "gpu")
    # Logits, and with them their rounding, are as large as this; 16-bit weights are rounded more than their logits.
    spread = max(1.0, case.options.get("scale", 0) * query.shape[-1] ** 0.5) if query.dtype == np.float32 else 1.0
    floats = case.floats
    for _ in range(draws):
        cotangent = rng.standard_normal(shape).astype(query.dtype)
        wanted, weights = exact(case, cotangent, floats)
        least = cancelling_terms(case, cotangent, floats, wanted["out"], weights)

        plain = functools.cache(lambda c=cotangent, f=floats: reference(c, f))
        for name, value in ours(cotangent, floats).items():
            assert value.dtype == (query if name == "out" else floats[name]).dtype
            rounding = ROUNDING if name == "out" else GRADIENT_ROUNDING
            terms = max(query.shape[1], case.arrays["key"].shape[1])
            if name in ("sinks", "bias"):  # summed over the batch as well; on GPUs XLA's exp has an error of 2 ulp
                terms, rounding = terms * query.shape[0], rounding + 2
            rounding += (1.25 if jax.default_backend() == "gpu" else 1.5) * terms**0.5
            if name in ("sinks", "bias"):  # sums over products with factors rounded to query's dtype
                rounding *= float(jnp.finfo(query.dtype).eps / jnp.finfo(value.dtype).eps)
            rounding *= spread
            other = (lambda n=name, p=plain: p()[n]) if compares else None
            times = 2.5 if name in ("query", "key") else 2.0  # docs/ops/attention.md: nearly one-hot softmaxes
            assert_close(value, wanted[name], other, name, rounding, least.get(name, 0.0), times)
        floats = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in floats.items()}

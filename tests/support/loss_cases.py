"""The exact loss in float64, and random calls, for the losses' tests."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from support.contract import assert_close

#: Option sets, by name.
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z loss": {"z_loss": 1e-2},
    "soft cap": {"logits_soft_cap": 5.0},
    "ignore": {"ignore_index": 2},
    "everything": {"label_smoothing": 0.2, "z_loss": 3e-3, "logits_soft_cap": 4.0, "ignore_index": 1},
}


def exact_loss(
    x, labels, where=None, *, label_smoothing=0.0, z_loss=0.0, logits_soft_cap=None, ignore_index=None, lse=False
):
    """Of logits [..., columns], in jax.numpy on float64, from the definition. Labels must be in range."""
    z = x if logits_soft_cap is None else logits_soft_cap * jnp.tanh(x / logits_soft_cap)
    visible = jnp.ones(x.shape, bool) if where is None else jnp.broadcast_to(where, x.shape)
    some = jnp.any(visible, -1, keepdims=True)
    hidden = jnp.where(visible | ~some, z, -jnp.inf)
    max = jax.lax.stop_gradient(jnp.max(hidden, -1, keepdims=True))
    max = jnp.where(jnp.isfinite(max), max, 0)
    logsumexp = (max + jnp.log(jnp.sum(jnp.where(visible | ~some, jnp.exp(hidden - max), 0), -1, keepdims=True)))[
        ..., 0
    ]
    if lse:
        return logsumexp
    one_hot = jnp.arange(x.shape[-1]) == (labels % x.shape[-1])[..., None]
    picked = jnp.sum(jnp.where(one_hot, z, 0), -1)
    mean = jnp.sum(jnp.where(visible, z, 0), -1) / jnp.maximum(jnp.sum(visible, -1), 1)
    loss = logsumexp - (1 - label_smoothing) * picked + z_loss * logsumexp**2
    if label_smoothing:
        loss -= label_smoothing * mean
    counted = some[..., 0] if ignore_index is None else some[..., 0] & (labels != ignore_index)
    return jnp.where(counted, loss, 0)


def exact(
    x,
    labels,
    cotangent,
    where=None,
    *,
    label_smoothing=0.0,
    z_loss=0.0,
    logits_soft_cap=None,
    ignore_index=None,
    lse=False,
) -> tuple[np.ndarray, np.ndarray]:
    """The loss, or the logsumexp, and the gradient for its product with `cotangent`, in numpy on float64."""
    x, labels = np.asarray(x).astype(np.float64), np.asarray(labels)
    cap = 1.0 if logits_soft_cap is None else logits_soft_cap
    z, slope = (x, 1.0) if logits_soft_cap is None else (cap * np.tanh(x / cap), 1 - np.tanh(x / cap) ** 2)
    visible = np.broadcast_to(True if where is None else where, x.shape)
    some = visible.any(-1, keepdims=True)
    counted = visible | ~some  # a row without visible columns has a loss of zero
    largest = np.max(z, -1, keepdims=True, where=counted, initial=-np.inf)
    exponentials = np.where(counted, np.exp(np.where(counted, z - largest, 0)), 0)
    total = exponentials.sum(-1, keepdims=True)
    logsumexp, weights = (largest + np.log(total))[..., 0], exponentials / total
    cotangent = np.asarray(cotangent).astype(np.float64)
    if lse:
        return logsumexp, weights * slope * cotangent[..., None]
    one_hot = np.arange(x.shape[-1]) == (labels % x.shape[-1])[..., None]
    share = visible / np.maximum(visible.sum(-1, keepdims=True), 1)
    kept = (some[..., 0] & (labels != ignore_index)) if ignore_index is not None else some[..., 0]
    loss = logsumexp - (1 - label_smoothing) * z[one_hot].reshape(labels.shape) + z_loss * logsumexp**2
    loss = loss - label_smoothing * (share * np.where(visible, z, 0)).sum(-1)
    gradient = weights * (1 + 2 * z_loss * logsumexp)[..., None]
    gradient = gradient - (1 - label_smoothing) * one_hot - label_smoothing * share
    return np.where(kept, loss, 0), gradient * slope * np.where(kept, cotangent, 0)[..., None]


@dataclasses.dataclass
class Case:
    """A call of a loss: from logits, or from hidden states "x", weights "w" and more.

    arrays: by name; FLOATS lists the ones with gradients. options: of the loss. others: of the function alone.
    """

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    others: dict[str, Any]

    @property
    def linear(self) -> bool:
        return "w" in self.arrays

    def ours(self, floats, arrays):
        """What the function returns."""
        given = {**arrays, **floats}
        if not self.linear:
            return jaxops.softmax_cross_entropy_with_integer_labels(
                given["logits"], given["labels"], self.others["axis"], given.get("where"), **self.options
            )
        x, w, labels = (given.pop(name) for name in ("x", "w", "labels"))
        return jaxops.linear_cross_entropy(x, w, labels, **given, **self.options, **self.others)

    def plain(self, floats, arrays):
        """Computes the same in the arrays' own precision, with all logits as one array."""
        given = {**arrays, **floats}
        labels, where, weights = given["labels"], given.get("where"), given.get("weights")
        if not self.linear:
            logits = given["logits"]
            where = None if where is None else jnp.broadcast_to(where, logits.shape)
            logits, where = (None if a is None else jnp.moveaxis(a, self.others["axis"], -1) for a in (logits, where))
        else:
            x, w = given["x"], given["w"].astype(given["x"].dtype)
            logits = jnp.matmul(x, w.T if self.others["transposed"] else w)
            if "bias" in given:  # added in f32, in which its gradient is then summed
                wide = jnp.promote_types(x.dtype, jnp.float32)
                logits = (logits.astype(wide) + given["bias"].astype(wide)).astype(x.dtype)
        wide = jnp.promote_types(logits.dtype, jnp.float32)
        losses = exact_loss(logits.astype(wide), labels, where, **self.options)
        losses = losses if weights is None else losses * weights.astype(wide)
        reduction = self.others.get("reduction")
        if reduction is None:
            return losses
        counted = jnp.ones(labels.shape, wide) if weights is None else weights.astype(wide)
        ignored = self.options.get("ignore_index")
        counted = counted if ignored is None else jnp.where(labels == ignored, 0, counted)
        total = jnp.sum(counted) if reduction == "mean" else 1
        return jnp.sum(losses) / jnp.where(total == 0, 1, total)


#: The operands that have gradients.
FLOATS = ("logits", "x", "w", "bias", "weights")


def random_case(rng, dtype: str, linear: bool) -> Case:
    """Options, sizes and layouts at random."""

    def maybe(value, chance=0.3):
        return value if rng.random() < chance else None

    def normal(*shape, scale=1.0, dtype=dtype):
        return (scale * rng.standard_normal(shape)).astype(dtype)

    columns = int(
        rng.choice([1, 2, int(rng.integers(3, 70)), 8 * int(rng.integers(1, 200)), int(rng.integers(70, 3000))])
    )
    options = {
        "label_smoothing": maybe(float(rng.uniform(0, 0.5))),
        "z_loss": maybe(float(rng.uniform(1e-4, 1e-2))),
        "logits_soft_cap": maybe(float(rng.uniform(2, 20))),
        "ignore_index": maybe(int(rng.integers(0, columns))),
    }
    options = {name: value for name, value in options.items() if value is not None}
    spread = float(rng.choice([1.0, 5.0, 30.0]))

    def labels(tokens):
        """Some or all are ignored."""
        share = rng.choice([0.3, 1.0], p=[0.9, 0.1]) if "ignore_index" in options else 0
        drawn = rng.integers(-columns, columns, tokens)
        return np.where(rng.random(tokens) < share, options.get("ignore_index"), drawn).astype(np.int32)

    if not linear:
        tokens = tuple(int(n) for n in rng.integers(1, 40, rng.integers(0, 3)))
        axis = int(rng.integers(0, len(tokens) + 1))
        shape = (*tokens[:axis], columns, *tokens[axis:])
        arrays = {"logits": normal(*shape, scale=spread)}
        sizes = tuple(d if rng.random() < 0.6 else 1 for d in shape)
        arrays |= {} if rng.random() < 0.6 else {"where": rng.random(sizes) < 0.8}
        arrays["labels"] = labels(tokens)
        return Case(arrays, options, {"axis": axis - len(shape) if rng.random() < 0.5 else axis})
    tokens, width = (
        int(rng.integers(1, 400)),
        int(rng.choice([8 * int(rng.integers(1, 40)), int(rng.integers(1, 200))])),
    )
    transposed = bool(rng.random() < 0.5)
    of_w = "float32" if rng.random() < 0.3 else dtype
    w = normal(*((columns, width) if transposed else (width, columns)), scale=spread / width**0.5, dtype=of_w)
    arrays = {"x": normal(tokens, width), "w": w}
    arrays |= {} if rng.random() < 0.6 else {"bias": normal(columns)}
    arrays |= {} if rng.random() < 0.6 else {"weights": rng.random(tokens).astype(np.float32)}
    arrays["labels"] = labels(tokens)
    others = {
        "transposed": transposed,
        "reduction": [None, "sum", "mean"][rng.integers(3)],
        "chunk_tokens": maybe(int(rng.integers(1, tokens + 1))),
    }
    return Case(arrays, options, others)


def check(case: Case, rng, draws: int = 1) -> None:
    """Value and gradients are float64's, up to rounding, or about as near as the plain form comes.

    draws: sets of numbers for the same program.
    """

    def value_and_gradients(function, floats, arrays, cotangent):
        out, pull = jax.vjp(lambda floats: function(floats, arrays), floats)
        return {"loss": out, **pull(cotangent.astype(out.dtype))[0]}

    ours, plain = (jax.jit(functools.partial(value_and_gradients, f)) for f in (case.ours, case.plain))
    alone = jax.jit(case.ours)
    floats = {name: x for name, x in case.arrays.items() if name in FLOATS}
    arrays = {name: x for name, x in case.arrays.items() if name not in FLOATS}
    shape = jax.eval_shape(case.ours, floats, arrays).shape
    for _ in range(draws):
        cotangent = rng.standard_normal(shape)
        with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
            wide = {name: np.asarray(x).astype(np.float64) for name, x in floats.items()}
            wanted = {name: np.asarray(x) for name, x in plain(wide, arrays, cotangent).items()}
        narrow = functools.cache(lambda f=floats, a=arrays, c=cotangent: plain(f, a, c.astype(np.float32)))
        found = ours(floats, arrays, cotangent.astype(np.float32))
        # Terms that may cancel: in a loss, logits; in a gradient, a cotangent times an element, once or, for w and
        # bias, for the tokens that share a column.
        size, labels, widened = float(np.max(np.abs(cotangent), initial=0)), arrays["labels"], 1.0
        largest = {name: float(np.max(np.abs(x.astype(np.float32)), initial=0)) for name, x in floats.items()}
        # A cap's tanh is off by an f32 ulp of the cap where logits are rounded to 16 bits.
        cap = case.options.get("logits_soft_cap", 0.0)
        least = {"logits": size, "loss": max(largest.get("logits", 0.0), cap)}
        if case.linear:
            factors = wide.get("weights", np.ones(labels.shape)) * (labels != case.options.get("ignore_index"))
            total = np.sum(factors) if case.others["reduction"] == "mean" else 1
            size *= float(np.max(factors) / (total or 1))
            shared = 1 + (labels.size / wide["w"].shape[0 if case.others["transposed"] else 1]) ** 0.5
            logits = wide["x"] @ (wide["w"].T if case.others["transposed"] else wide["w"])
            least |= {"x": size * largest["w"], "w": size * largest["x"] * shared, "bias": size * shared}
            least |= dict.fromkeys(("loss", "weights"), float(np.max(np.abs(logits))))
            widened = max(1.0, least["loss"] / 64)  # rounded logits change the exponentials by as much
        inner = floats["x" if case.linear else "logits"].dtype  # the logits', to which a product is rounded
        for name, value in {**found, "loss alone": alone(floats, arrays)}.items():
            of = "loss" if name == "loss alone" else name
            rounding = 8.0
            if case.linear:
                rounding = 16 * widened * max(1.0, float(jnp.finfo(inner).eps / jnp.finfo(value.dtype).eps))
            assert_close(value, wanted[of], lambda n=of, p=narrow: p()[n], name, rounding, least.get(of, 0.0))
        floats = {name: rng.permutation(x.ravel()).reshape(x.shape) for name, x in floats.items()}

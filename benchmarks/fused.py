"""A model's training step in plain JAX, as it is and under `jaxops.fuse`: `python -m benchmarks fuse`.

The model is a Llama, spelled as in transformers' Flax code: RMSNorm by a power and a root, attention by einsums with a
causal mask that is added, a gated MLP with three products, a head that is tied to nothing, optax's loss.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import table

import jaxops
from benchmarks import harness, train


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes, and the model as functions on its parameters."""

    sequences: int
    tokens: int
    layers: int = 8
    width: int = 1024
    heads: int = 16
    hidden: int = 2816
    vocabulary: int = 32000
    dtype: Any = jnp.bfloat16

    @property
    def label(self) -> str:
        """Its sizes."""
        return f"Llama: {self.layers} layers, width {self.width}, {self.sequences} x {self.tokens} tokens"

    def parameters(self, key: jax.Array) -> dict[str, Any]:
        """Random matrices, and norms with scale 1."""
        shapes = {
            **dict.fromkeys(("q", "k", "v", "o"), (self.width, self.width)),
            **dict.fromkeys(("gate", "up"), (self.width, self.hidden)),
            "down": (self.hidden, self.width),
        }

        def draw(key, shape):
            return jax.random.normal(key, shape, self.dtype) * 0.02

        def layer(key):
            keys = jax.random.split(key, len(shapes))
            norms = {name: jnp.ones(self.width, self.dtype) for name in ("first", "second")}
            return norms | {name: draw(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

        embed, head, *keys = jax.random.split(key, self.layers + 2)
        return {
            "embed": draw(embed, (self.vocabulary, self.width)),
            "layers": [layer(key) for key in keys],
            "norm": jnp.ones(self.width, self.dtype),
            "head": draw(head, (self.width, self.vocabulary)),
        }

    def _norm(self, scale, x):
        variance = jnp.power(jnp.asarray(x, dtype=jnp.float32), 2).mean(-1, keepdims=True)
        return scale * jnp.asarray(x / jnp.sqrt(variance + 1e-6), dtype=self.dtype)

    def _rotated(self, x):
        depth = x.shape[-1]
        angles = np.arange(self.tokens)[:, None] / 10000 ** (np.arange(0, depth, 2) / depth)
        angles = np.concatenate([angles, angles], -1)[:, None]
        turned = jnp.concatenate([-x[..., depth // 2 :], x[..., : depth // 2]], -1)
        sin, cos = (jnp.asarray(f(angles), jnp.float32) for f in (np.sin, np.cos))
        return jnp.asarray(x * cos + turned * sin, dtype=self.dtype)

    def _attention(self, p, x):
        q, k, v = ((x @ p[name]).reshape(*x.shape[:2], self.heads, -1) for name in "qkv")
        q, k = self._rotated(q), self._rotated(k)
        seen = jnp.tril(jnp.ones((self.tokens, self.tokens), bool))[None, None]
        bias = jnp.where(seen, 0.0, jnp.finfo(self.dtype).min).astype(self.dtype)
        q, k, bias = (jnp.asarray(a, jnp.float32) for a in (q, k, bias))
        scores = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(q.shape[-1]).astype(q.dtype), k) + bias
        weights = jax.nn.softmax(scores).astype(self.dtype)
        return jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape(x.shape) @ p["o"]

    def loss(self, parameters, tokens):
        """The mean loss for each token's successor."""
        x = parameters["embed"][tokens]
        for p in parameters["layers"]:
            x = x + self._attention(p, self._norm(p["first"], x))
            h = self._norm(p["second"], x)
            x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        logits = self._norm(parameters["norm"], x) @ parameters["head"]
        labels = jnp.roll(tokens, -1, 1)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


CASES = (Llama(1, 4096), Llama(4, 1024))
DEEP = (Llama(1, 4096, layers=48),)
SMALL = (Llama(1, 64, layers=2, width=64, heads=2, hidden=128, vocabulary=256),)


def _step(loss: Any) -> Any:
    def step(parameters, tokens):
        value, gradients = jax.value_and_grad(loss)(parameters, tokens)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), parameters, gradients), value

    return jax.jit(step)


def run(settings: harness.Settings) -> bool:
    """Measures plain and fused alternately and prints the table; False if the losses differ."""
    shown = table.Table(title="Steps of a model in plain JAX", title_justify="left")
    for heading in ("model", "plain ms", "fused ms", "times plain", "GiB", "share", "losses"):
        shown.add_column(heading, justify="left" if heading == "model" else "right")
    alike = True
    cases = CASES if jax.default_backend() == "gpu" and not settings.quick else SMALL
    for case in settings.bar(settings.select(cases, lambda case: f"fuse {case.label}"), lambda case: case.label):
        parameters = case.parameters(jax.random.key(0))
        tokens = jax.random.randint(jax.random.key(1), (case.sequences, case.tokens), 0, case.vocabulary)
        reports: list[jaxops.FuseReport] = []
        steps = {
            "plain": _step(case.loss),
            "fused": _step(jaxops.fuse(case.loss, report=reports.append)),
        }
        compiled = harness.compile_all({name: step.lower(parameters, tokens) for name, step in steps.items()})
        losses: dict[str, list[float]] = {}
        for name, step in compiled.items():
            now, losses[name] = parameters, []
            for _ in range(train.CHECKED_STEPS):
                now, loss = step(now, tokens)
                losses[name].append(float(loss))
        pairs = enumerate(zip(losses["fused"], losses["plain"], strict=True))
        alike &= all(abs(a - b) <= (i + 1) * train.LOSS_TOLERANCE * abs(b) for i, (a, b) in pairs)
        clock = harness.WallClock()
        clock.enough = 0.02 if settings.quick else 0.2
        calls = {name: harness.Calls(step, [(parameters, tokens)]) for name, step in compiled.items()}
        seconds = harness.alternate(clock, calls, 20 * settings.seconds, settings.rounds)
        memory = {name: step.memory_analysis().temp_size_in_bytes for name, step in compiled.items()}
        shown.add_row(
            case.label,
            *(f"{1e3 * seconds[name]:.2f}" for name in ("plain", "fused")),
            f"{seconds['plain'] / seconds['fused']:.3f}",
            f"{memory['fused'] / 2**30:.2f}",
            f"{memory['fused'] / max(memory['plain'], 1):.2f}",
            "; ".join(" ".join(f"{x:.4f}" for x in losses[name]) for name in losses),
        )
        settings.console.print(reports[0], markup=False)
    if shown.rows:
        settings.console.print(shown)
    _compile(settings)
    return alike


def _compile(settings: harness.Settings) -> None:
    """Prints how long a deep model's step takes to trace and to compile. It does not run the step."""
    cases = DEEP if jax.default_backend() == "gpu" and not settings.quick else SMALL
    cases = settings.select(cases, lambda case: f"fuse, compiled: {case.label}")
    for case in settings.bar(cases, lambda case: f"compiled: {case.label}"):
        parameters = jax.eval_shape(case.parameters, jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((case.sequences, case.tokens), jnp.int32)
        jax.make_jaxpr(case.loss)(parameters, tokens)  # what JAX does once for all functions

        def plain(parameters, tokens, loss=case.loss):  # a function that JAX has not traced
            return loss(parameters, tokens)

        for name, loss in (("fused", jaxops.fuse(case.loss)), ("plain", plain)):
            times = [time.perf_counter()]
            jax.make_jaxpr(loss)(parameters, tokens)
            times.append(time.perf_counter())
            lowered = _step(loss).lower(parameters, tokens)
            times.append(time.perf_counter())
            lowered.compile()
            times.append(time.perf_counter())
            traced, made, compiled = (f"{b - a:.1f} s" for a, b in itertools.pairwise(times))
            settings.console.print(
                f"{case.label}, {name}: loss traced in {traced}, step traced and lowered in {made}, "
                f"compiled in {compiled}"
            )

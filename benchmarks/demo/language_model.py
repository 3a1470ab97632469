"""A character-level transformer decoder in Flax, trained on plain flax.linen and jax.nn and with jaxops swapped in."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxops


@dataclasses.dataclass(frozen=True)
class Operations:
    """The parts of the model that jaxops replaces. Modules have the same parameters, by name, shape and initial value.

    layer_norm: module with parameters scale and bias. dense_gelu: module of a number of features, with parameters
    kernel and bias: gelu(x kernel + bias). causal_softmax: of logits [..., queries, keys] times a scale, where query i
    sees keys up to i. log_softmax: over the last axis. dot_general: as jax.lax.dot_general.
    """

    layer_norm: Callable[..., nn.Module]
    dense_gelu: Callable[..., nn.Module]
    causal_softmax: Callable[[jax.Array, float], jax.Array]
    log_softmax: Callable[[jax.Array], jax.Array]
    dot_general: Callable[..., jax.Array]


class _PlainDenseGelu(nn.Dense):
    """gelu after Flax's Dense."""

    @nn.compact
    def __call__(self, inputs):
        return nn.gelu(super().__call__(inputs))


def _plain_causal_softmax(logits, scale):
    visible = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(visible, logits * scale, -jnp.inf))


class _LayerNorm(nn.LayerNorm):
    """Flax's LayerNorm on jaxops."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        bias = self.param("bias", self.bias_init, x.shape[-1:], self.param_dtype)
        return jaxops.layer_norm(x, scale, bias, epsilon=self.epsilon, dtype=self.dtype)


class _DenseGelu(nn.Dense):
    """Flax's Dense and gelu as one matmul with bias and activation."""

    @nn.compact
    def __call__(self, inputs):
        kernel = self.param("kernel", self.kernel_init, (inputs.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return jaxops.matmul(inputs, kernel, bias=bias, activation="gelu")


#: The parts of both models, by name.
OPERATIONS = {
    "plain": Operations(
        layer_norm=nn.LayerNorm,
        dense_gelu=_PlainDenseGelu,
        causal_softmax=_plain_causal_softmax,
        log_softmax=jax.nn.log_softmax,
        dot_general=jax.lax.dot_general,
    ),
    "jaxops": Operations(
        layer_norm=_LayerNorm,
        dense_gelu=_DenseGelu,
        causal_softmax=lambda logits, scale: jaxops.softmax(logits, scale=scale, causal=True),
        log_softmax=jaxops.log_softmax,
        dot_general=jaxops.dot_general,
    ),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Model and training. length: characters a sequence; learning_rate: the highest, after a tenth of the steps."""

    steps: int
    seed: int = 0
    width: int = 128
    layers: int = 2
    heads: int = 4
    length: int = 96
    batch: int = 16
    learning_rate: float = 3e-3


class Decoder(nn.Module):
    """Characters [batch, length] to logits of each next one [batch, length, vocabulary]."""

    operations: Operations
    vocabulary: int
    settings: Settings

    def attention(self, x, layer):
        """Causal self-attention with heads, [batch, length, width]."""
        dot_general, settings = self.operations.dot_general, self.settings
        depth = settings.width // settings.heads
        q, k, v = (
            nn.DenseGeneral((settings.heads, depth), dot_general=dot_general, name=f"{name}_{layer}")(x)
            for name in ("query", "key", "value")
        )
        # "bqhd,bkhd->bhqk", "bhqk,bkhd->bhqd"
        weights = self.operations.causal_softmax(dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2)))), depth**-0.5)
        mixed = dot_general(weights, v, (((3,), (1,)), ((0, 1), (0, 2))))
        mixed = jnp.swapaxes(mixed, 1, 2).reshape(x.shape)
        return nn.Dense(settings.width, dot_general=dot_general, name=f"attention_out_{layer}")(mixed)

    @nn.compact
    def __call__(self, characters):
        """The logits."""
        operations, settings = self.operations, self.settings
        x = nn.Embed(self.vocabulary, settings.width, name="character")(characters)
        x = x + nn.Embed(settings.length, settings.width, name="position")(jnp.arange(characters.shape[-1]))
        for layer in range(settings.layers):
            x = x + self.attention(operations.layer_norm(name=f"attention_norm_{layer}")(x), layer)
            hidden = operations.layer_norm(name=f"mlp_norm_{layer}")(x)
            hidden = operations.dense_gelu(4 * settings.width, name=f"mlp_in_{layer}")(hidden)
            x = x + nn.Dense(settings.width, dot_general=operations.dot_general, name=f"mlp_out_{layer}")(hidden)
        x = operations.layer_norm(name="norm")(x)
        return nn.Dense(self.vocabulary, dot_general=operations.dot_general, name="logits")(x)


def read_text() -> str:
    """English text that every CPython carries: the language reference as `help()` shows it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def batches(settings: Settings, text: str) -> tuple[np.ndarray, int]:
    """Sequences as numbers of characters, [steps, batch, length + 1], and the size of the vocabulary."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    alphabet, characters = np.unique(codes, return_inverse=True)
    starts = np.random.default_rng(settings.seed).integers(
        0, len(characters) - settings.length, (settings.steps, settings.batch, 1)
    )
    return characters.astype(np.int32)[starts + np.arange(settings.length + 1)], len(alphabet)


@dataclasses.dataclass
class Run:
    """One training: the model on one set of operations. losses: nats a character, a value a step."""

    step: Callable[..., tuple[Any, Any, jax.Array]]
    parameters: Any
    state: Any
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def seconds_per_step(self) -> float:
        """The median, compilation not included."""
        return statistics.median(self.seconds)

    @property
    def parameter_count(self) -> int:
        """How many numbers are trained."""
        return sum(x.size for x in jax.tree.leaves(self.parameters))

    def advance(self, batches: np.ndarray) -> None:
        """Trains a step on each batch."""
        start = time.perf_counter()
        losses = []
        for characters in batches:
            self.parameters, self.state, loss = self.step(self.parameters, self.state, characters)
            losses.append(loss)
        losses = [float(loss) for loss in losses]
        self.seconds.append((time.perf_counter() - start) / len(batches))
        self.losses += losses


def prepare(operations: Operations, settings: Settings, vocabulary: int) -> Run:
    """The compiled training step, and parameters drawn from the seed."""
    model = Decoder(operations, vocabulary, settings)
    warmup = max(1, settings.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate, warmup, max(settings.steps, warmup + 1))
    # A gradient below Adam's epsilon is noise; with optax's 1e-8 its sign would move a parameter by a whole step.
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, eps=1e-6))

    def mean_loss(parameters, characters):
        logits = model.apply({"params": parameters}, characters[:, :-1])
        log_probabilities = operations.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_probabilities, characters[:, 1:, None], axis=-1))

    def step(parameters, state, characters):
        loss, gradients = jax.value_and_grad(mean_loss)(parameters, characters)
        updates, state = optimiser.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    example = np.zeros((settings.batch, settings.length + 1), np.int32)
    parameters = jax.jit(model.init)(jax.random.key(settings.seed), example[:, :-1])["params"]
    state = optimiser.init(parameters)
    return Run(jax.jit(step).lower(parameters, state, example).compile(), parameters, state)


def train(settings: Settings, text: str, together: int = 10) -> Iterator[dict[str, Run]]:
    """Trains the model on both sets of operations in turn, `together` steps of each; yields after each turn.

    The first yield is before the first step, with both compiled. The batches are the same, and so is the seed.
    """
    data, vocabulary = batches(settings, text)
    runs = {name: prepare(operations, settings, vocabulary) for name, operations in OPERATIONS.items()}
    yield runs
    for first in range(0, settings.steps, together):
        for run in runs.values():
            run.advance(data[first : first + together])
        yield runs


def largest_relative_difference(plain: list[float], jaxops: list[float]) -> float:
    """max |jaxops - plain| / plain over the steps; NaN if a loss is."""
    a, b = np.asarray(plain), np.asarray(jaxops)
    return float(np.max(np.abs(b - a) / np.abs(a)))

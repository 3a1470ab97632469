"""A decoder's training step: tokens a second on plain Flax, swapped by one call, and written with jaxops' layers."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from rich import table

from benchmarks import harness
from jaxops.flax import linen

#: The loss of the n-th step may differ by n times as much, relative: activations are bf16, and Adam's first steps are
#: as large for a gradient that is all rounding error as for any other.
LOSS_TOLERANCE = 5e-3
CHECKED_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder and its batch."""

    layers: int
    width: int
    length: int = 1024
    batch: int = 8
    vocabulary: int = 50304

    @property
    def heads(self) -> int:
        """Of 64 features each."""
        return self.width // 64

    @property
    def label(self) -> str:
        """As in the CSV file."""
        return (
            f"{self.layers} layers, width {self.width}, {self.batch}x{self.length} tokens, vocabulary {self.vocabulary}"
        )


SIZES = (Size(12, 768), Size(12, 1024), Size(2, 4096))
QUICK = (Size(2, 128, length=64, batch=2, vocabulary=512),)
CPU_SIZES = (Size(2, 256, length=256, batch=2, vocabulary=4096),)


class Block(nn.Module):
    """A layer as Flax's users write it: attention and a multi-layer perceptron, each behind a norm."""

    size: Size
    attend: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """`[batch, tokens, width]` to the same."""
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        attention = nn.MultiHeadDotProductAttention(
            self.size.heads, dtype=jnp.bfloat16, attention_fn=self.attend, name="MultiHeadDotProductAttention_0"
        )
        x = x + attention(y, mask=mask)
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        y = nn.gelu(nn.Dense(4 * self.size.width, dtype=jnp.bfloat16)(y))
        return x + nn.Dense(self.size.width, dtype=jnp.bfloat16)(y)


class Decoder(nn.Module):
    """Embeddings, blocks, and logits in bf16."""

    size: Size
    attend: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[batch, tokens]` to `[batch, tokens, vocabulary]`."""
        x = _embed(self.size, tokens)
        mask = nn.make_causal_mask(tokens)
        for i in range(self.size.layers):
            x = Block(self.size, self.attend, name=f"Block_{i}")(x, mask)
        x = nn.LayerNorm(dtype=jnp.bfloat16, name="norm")(x)
        return nn.Dense(self.size.vocabulary, use_bias=False, dtype=jnp.bfloat16, name="logits")(x)


def cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """What Flax's users write to get cuDNN's attention."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def _embed(size: Size, tokens: jax.Array) -> jax.Array:
    embed = functools.partial(nn.Embed, features=size.width, dtype=jnp.bfloat16)
    positions = embed(size.length, name="positions")(jnp.arange(size.length))
    return embed(size.vocabulary, name="tokens")(tokens) + positions


class FusedBlock(nn.Module):
    """The same layer on jaxops' own: sums joined to the norms behind them, gelu to the product, no mask."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """What the layer before computed, and the sum of all before that; the same of this layer."""
        norm = linen.LayerNorm(dtype=jnp.bfloat16, name="LayerNorm_0")
        y, x = (norm(x), x) if residual is None else norm(x, residual=residual)
        attend = functools.partial(linen.dot_product_attention, causal=True)
        y = linen.MultiHeadDotProductAttention(self.size.heads, dtype=jnp.bfloat16, attention_fn=attend)(y)
        y, x = linen.LayerNorm(dtype=jnp.bfloat16, name="LayerNorm_1")(y, residual=x)
        y = linen.Dense(4 * self.size.width, dtype=jnp.bfloat16, activation="gelu")(y)
        return linen.Dense(self.size.width, dtype=jnp.bfloat16)(y), x


class FusedDecoder(nn.Module):
    """The same model, with the same parameters."""

    size: Size

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[batch, tokens]` to `[batch, tokens, vocabulary]`."""
        y, x = _embed(self.size, tokens), None
        for i in range(self.size.layers):
            y, x = FusedBlock(self.size, name=f"Block_{i}")(y, x)
        x, _ = linen.LayerNorm(dtype=jnp.bfloat16, name="norm")(y, residual=x)
        return linen.Dense(self.size.vocabulary, use_bias=False, dtype=jnp.bfloat16, name="logits")(x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all tokens, in f32; the form of which XLA writes neither f32 logits nor a one-hot gradient."""
    logits = logits.astype(jnp.float32)
    here = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(here, logits, 0), axis=-1))


def make_step(model: nn.Module):
    """A jitted step of AdamW (rate 3e-4, decay 0.1).

    (parameters, first moments, second moments, step), tokens -> the same, the loss.
    """

    def step(state, tokens):
        parameters, first, second, count = state

        def loss_of(parameters):
            return cross_entropy(model.apply(parameters, tokens[:, :-1]), tokens[:, 1:])

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, gradients)

        def update(p, m, v):
            m, v = m / (1 - 0.9**count), v / (1 - 0.95**count)
            return p - 3e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p)

        return (jax.tree.map(update, parameters, first, second), first, second, count), loss

    return jax.jit(step)


def draw_parameters(model: nn.Module, tokens: jax.Array) -> Any:
    """The model's parameters, drawn one by one: its own `init` takes XLA half a minute to compile."""
    draw = jax.jit(lambda key, like: 0.02 * jax.random.normal(key, like.shape, like.dtype))
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def parameter(path, shape):
        if path[-1].key in ("scale", "bias"):
            return jnp.full(shape.shape, float(path[-1].key == "scale"), shape.dtype)
        key = jax.random.key(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return draw(key, jnp.zeros(shape.shape, shape.dtype))

    return jax.tree_util.tree_map_with_path(parameter, shapes)


def contenders(size: Size) -> dict[str, nn.Module]:
    """The models by name."""
    plain = Decoder(size)
    cudnn = {"cudnn": Decoder(size, cudnn_attention)} if jax.default_backend() == "gpu" else {}
    return {
        "flax": plain,
        **cudnn,
        "swapped": linen.swap(plain)[0],
        "fused": FusedDecoder(size),
    }


def _measure(size: Size, settings: harness.Settings) -> dict[str, tuple[float, list[float]]]:
    """Seconds a step and the first losses of each model."""
    models = contenders(size)
    tokens = jax.random.randint(jax.random.key(1), (size.batch, size.length + 1), 0, size.vocabulary)
    parameters = draw_parameters(models["flax"], tokens[:, :-1])
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = (parameters, zeros, zeros, jnp.zeros((), jnp.int32))
    lowered = {name: make_step(model).lower(state, tokens) for name, model in models.items()}
    with concurrent.futures.ThreadPoolExecutor() as pool:  # a minute of compilation, one after the other
        steps = dict(zip(lowered, pool.map(lambda step: step.compile(), lowered.values()), strict=True))
    losses: dict[str, list[float]] = {}
    for name, step in steps.items():
        now, losses[name] = state, []
        for _ in range(CHECKED_STEPS):
            now, loss = step(now, tokens)
            losses[name].append(float(loss))
        del now
    for name, found in losses.items():
        for i, (loss, wanted) in enumerate(zip(found, losses["flax"], strict=True)):
            if not abs(loss - wanted) <= (i + 1) * LOSS_TOLERANCE * abs(wanted):
                raise ArithmeticError(f"{name}: losses {found} instead of {losses['flax']}")
    clock = harness.WallClock()
    clock.enough = 0.02 if settings.quick else 0.3  # a round
    calls = {name: harness.Calls(step, [(state, tokens)]) for name, step in steps.items()}
    seconds = harness.alternate(clock, calls, 20 * settings.seconds, settings.rounds)
    return {name: (seconds[name], losses[name]) for name in models}


def run(settings: harness.Settings) -> bool:
    """Measures the sizes, records them in train.csv and prints the table; False if one failed."""
    shown = table.Table(title="Training steps, tokens a second", title_justify="left")
    for heading in ("decoder", "model"):
        shown.add_column(heading)
    for heading in ("ms", "tokens/s", "ratio to Flax", "losses of the first steps"):
        shown.add_column(heading, justify="right")
    failures: list[tuple[Size, Any]] = []
    all_sizes = QUICK if settings.quick else SIZES if jax.default_backend() == "gpu" else CPU_SIZES
    sizes = settings.select(all_sizes, lambda size: f"train {size.label}")
    for size in settings.bar(sizes, lambda size: size.label):
        try:
            measured = _measure(size, settings)
        except (RuntimeError, ArithmeticError) as error:  # of XLA and the device; of the losses
            failures.append((size, error))
            continue
        plain = measured["flax"][0]
        for name, (seconds, losses) in measured.items():
            rate, ratio = size.batch * size.length / seconds, plain / seconds
            curve = " ".join(f"{loss:.4f}" for loss in losses)
            shown.add_row(size.label, name, f"{1e3 * seconds:.2f}", f"{rate:.0f}", f"{ratio:.3f}", curve)
            if name != "flax":
                row = harness.Row.of(
                    op="train",
                    direction=name,
                    shape=size.label,
                    dtype="bfloat16",
                    ours=rate,
                    xla=size.batch * size.length / plain,
                    unit="tokens/s",
                    ceiling=None,
                    ratio=ratio,
                    timing=harness.WallClock.name,
                )
                harness.record(settings.results / "train.csv", row)
    settings.console.print(shown)
    for size, error in failures:
        settings.console.print(f"FAILED {size.label}: {error}", style="red", markup=False)
    return not failures

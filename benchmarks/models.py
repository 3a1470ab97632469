"""The models whose training steps are timed: each as users write it in Flax, and on jaxops' own layers and losses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jaxops
from jaxops.flax import linen

DTYPE = jnp.bfloat16  # of activations
Attention = Callable[..., jax.Array]


@contextlib.contextmanager
def computed_in(dtype: Any) -> Iterator[None]:
    """Models that are traced inside compute in that dtype."""
    global DTYPE
    before, DTYPE = DTYPE, dtype
    try:
        yield
    finally:
        DTYPE = before


class Parts(NamedTuple):
    """How one contender computes a part of a model.

    attention: takes query, key, value `[batch, tokens, heads, depth]`, `causal`, and the `lengths` of padded sequences
    or None; if it is None, Flax's own attention, and jax.nn's if heads share keys. fused: the blocks are written with
    jaxops' layers. token_loss: from hidden states, the kernel `[width, vocabulary]`, labels, which tokens count (None:
    all), and whether the kernel is tied, an embedding table `[vocabulary, width]`, the mean loss. class_loss: from
    logits and labels, the losses.
    """

    attention: Attention | None
    fused: bool
    token_loss: Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None, bool], jax.Array]
    class_loss: Callable[[jax.Array, jax.Array], jax.Array]


def _cudnn_attention(query, key, value, *, causal, lengths):
    batch, tokens = query.shape[:2]
    if tokens % 2:  # cuDNN's backward pass takes only even lengths
        query, key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value))
        lengths = jnp.full(batch, tokens, jnp.int32) if lengths is None else lengths
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn" if jax.default_backend() == "gpu" else "xla",
    )
    return out[:, :tokens]


def _our_attention(query, key, value, *, causal, lengths):
    return jaxops.dot_product_attention(
        query, key, value, is_causal=causal, query_seq_lengths=lengths, key_value_seq_lengths=lengths
    )


def _logits(hidden, kernel):
    return jnp.dot(hidden, kernel.astype(hidden.dtype))


def _best_loss(logits, labels):
    """XLA's best form: it writes neither f32 logits nor a one-hot gradient."""
    logits = logits.astype(jnp.float32)
    here = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(here, logits, 0), axis=-1)


def _optax_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def _of_logits(loss):
    def token_loss(hidden, kernel, labels, seen, tied):
        losses = loss(_logits(hidden, kernel.T if tied else kernel), labels)
        return jnp.mean(losses) if seen is None else jnp.sum(jnp.where(seen, losses, 0)) / jnp.sum(seen)

    return token_loss


def _our_token_loss(hidden, kernel, labels, seen, tied):
    weights = None if seen is None else seen.astype(jnp.float32)
    kernel = kernel.astype(hidden.dtype)  # its gradient is then rounded, as with all other contenders
    return jaxops.linear_cross_entropy(hidden, kernel, labels, weights=weights, reduction="mean", transposed=tied)


_OURS = Parts(_our_attention, False, _our_token_loss, jaxops.softmax_cross_entropy_with_integer_labels)
_PLAIN = Parts(None, False, _of_logits(_optax_loss), _optax_loss)
#: By name; every ratio is to "best XLA". "swapped" is the plain Flax model, swapped by one call, with our loss; "fused"
#: is the plain Flax model's loss after `jaxops.fuse`.
CONTENDERS = {
    "plain Flax": _PLAIN,
    "best XLA": Parts(_cudnn_attention, False, _of_logits(_best_loss), _best_loss),
    "swapped": _OURS._replace(attention=None),
    "fused": _PLAIN,
    "jaxops": _OURS._replace(fused=True),
}
BASELINE, PLAIN = "best XLA", "plain Flax"


@functools.cache
def _text() -> np.ndarray:
    """The sources of Python's standard library, a few million bytes: text that is on every machine."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(source.read_bytes() for source in sources), np.uint8)


class Kernel(nn.Module):
    """The parameter `kernel` of the linear layer whose product the loss computes."""

    shape: tuple[int, int]

    @nn.compact
    def __call__(self) -> jax.Array:
        """`[width, vocabulary]`, f32."""
        return self.param("kernel", nn.initializers.lecun_normal(), self.shape)


class EncoderBlock(nn.Module):
    """Attention and a gelu perceptron; norms before them, or, if `after`, behind the sums."""

    heads: int
    parts: Parts
    causal: bool
    after: bool = False

    def _attention(self, layers: Any, lengths: jax.Array | None) -> Callable[[jax.Array], jax.Array]:
        """Self-attention on `[batch, tokens, width]`."""
        function = self.parts.attention
        if function is None:
            attend = layers.MultiHeadDotProductAttention(self.heads, dtype=DTYPE, name="attention")
            return lambda x: attend(x, mask=self._mask(x, lengths))

        def attention(query, key, value, mask=None, **_):
            del mask
            return function(query, key, value, causal=self.causal, lengths=lengths)

        return layers.MultiHeadDotProductAttention(self.heads, dtype=DTYPE, name="attention", attention_fn=attention)

    def _mask(self, x: jax.Array, lengths: jax.Array | None) -> jax.Array | None:
        if self.causal:
            return nn.make_causal_mask(x[..., 0])
        if lengths is None:
            return None
        seen = jnp.arange(x.shape[1]) < lengths[:, None]
        return nn.make_attention_mask(seen, seen)

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array | None, lengths: jax.Array | None):
        """`[batch, tokens, width]`, and if fused the sum before it; the same."""
        layers = linen if self.parts.fused else nn
        width = x.shape[-1]
        norms = [layers.LayerNorm(dtype=DTYPE, name=f"LayerNorm_{i}") for i in range(2)]
        attend = self._attention(layers, lengths)
        narrow = layers.Dense(width, dtype=DTYPE, name="narrow")

        def perceptron(y):
            if self.parts.fused:
                return narrow(linen.Dense(4 * width, dtype=DTYPE, activation="gelu", name="widen")(y))
            return narrow(nn.gelu(nn.Dense(4 * width, dtype=DTYPE, name="widen")(y)))

        if not self.parts.fused:
            if self.after:
                x = norms[0](x + attend(x))
                return norms[1](x + perceptron(x)), None
            x = x + attend(norms[0](x))
            return x + perceptron(norms[1](x)), None
        if self.after:
            x, _ = norms[0](attend(x), residual=x)
            return norms[1](perceptron(x), residual=x)[0], None
        y, x = (norms[0](x), x) if residual is None else norms[0](x, residual=residual)
        y, x = norms[1](attend(y), residual=x)
        return perceptron(y), x


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its batch. features: a head's size."""

    layers: int
    width: int
    length: int
    batch: int
    vocabulary: int
    features: int = 64

    @property
    def heads(self) -> int:
        """Of the queries."""
        return self.width // self.features

    @property
    def label(self) -> str:
        """As in the results."""
        return (
            f"{self.layers} layers, width {self.width}, {self.batch} x {self.length} tokens, "
            f"vocabulary {self.vocabulary}"
        )


def _embed(size: Size, tokens: jax.Array) -> jax.Array:
    embed = functools.partial(nn.Embed, features=size.width, dtype=DTYPE)
    positions = embed(size.length, name="positions")(jnp.arange(size.length))
    return embed(size.vocabulary, name="tokens")(tokens) + positions


def _last_norm(parts: Parts, x: jax.Array, residual: jax.Array | None) -> jax.Array:
    norm = (linen if parts.fused else nn).LayerNorm(dtype=DTYPE, name="norm")
    return norm(x) if residual is None else norm(x, residual=residual)[0]


class Gpt(nn.Module):
    """A decoder as GPT-2's, its vocabulary not tied."""

    size: Size
    parts: Parts

    @nn.compact
    def __call__(self, tokens: jax.Array):
        """`[batch, tokens]` to hidden states and the vocabulary's kernel."""
        x, residual = _embed(self.size, tokens), None
        for i in range(self.size.layers):
            x, residual = EncoderBlock(self.size.heads, self.parts, True, name=f"block_{i}")(x, residual, None)
        kernel = Kernel((self.size.width, self.size.vocabulary), name="logits")()
        return _last_norm(self.parts, x, residual), kernel

    def loss(self, variables: Any, batch: dict[str, jax.Array]) -> jax.Array:
        """The mean over all tokens."""
        hidden, kernel = self.apply(variables, batch["tokens"][:, :-1])
        return self.parts.token_loss(hidden, kernel, batch["tokens"][:, 1:], None, getattr(self.size, "tied", False))

    def batch(self, key: jax.Array) -> dict[str, jax.Array]:
        """Random tokens."""
        shape = (self.size.batch, self.size.length + 1)
        return {"tokens": jax.random.randint(key, shape, 0, self.size.vocabulary)}

    def text(self, step: int) -> dict[str, jax.Array]:
        """A step's batch of text, whose bytes are the tokens."""
        shape = (self.size.batch, self.size.length + 1)
        places = step * np.prod(shape) + np.arange(np.prod(shape))
        return {"tokens": jnp.asarray(_text().take(places, mode="wrap").reshape(shape), jnp.int32)}

    def example(self, batch: dict[str, jax.Array]) -> tuple:
        """The arguments for `init`."""
        return (batch["tokens"][:, :-1],)


class Bert(Gpt):
    """An encoder for padded sentences, as BERT's, with a loss on all tokens that are not padding."""

    @nn.compact
    def __call__(self, tokens: jax.Array, lengths: jax.Array):
        """`[batch, tokens]` and `[batch]` to hidden states and the vocabulary's kernel."""
        x = _last_norm(self.parts, _embed(self.size, tokens), None)
        for i in range(self.size.layers):
            x, _ = EncoderBlock(self.size.heads, self.parts, False, after=True, name=f"block_{i}")(x, None, lengths)
        return x, Kernel((self.size.width, self.size.vocabulary), name="logits")()

    def loss(self, variables: Any, batch: dict[str, jax.Array]) -> jax.Array:
        """The mean over all tokens that are there."""
        hidden, kernel = self.apply(variables, *self.example(batch))
        seen = jnp.arange(self.size.length) < batch["lengths"][:, None]
        return self.parts.token_loss(hidden, kernel, batch["labels"], seen, False)

    def batch(self, key: jax.Array) -> dict[str, jax.Array]:
        """Random tokens, labels, and lengths from a quarter to the whole."""
        shape = (self.size.batch, self.size.length)
        keys = jax.random.split(key, 3)
        tokens, labels = (jax.random.randint(k, shape, 0, self.size.vocabulary) for k in keys[:2])
        lengths = jax.random.randint(keys[2], shape[:1], self.size.length // 4, self.size.length + 1)
        return {"tokens": tokens, "labels": labels, "lengths": lengths}

    def text(self, step: int) -> dict[str, jax.Array]:
        """A step's batch of text with every seventh byte hidden."""
        labels = super().text(step)["tokens"][:, :-1]
        tokens = jnp.where(jnp.arange(self.size.length) % 7, labels, 0)
        return {**self.batch(jax.random.key(step)), "tokens": tokens, "labels": labels}

    def example(self, batch: dict[str, jax.Array]) -> tuple:
        """The arguments for `init`."""
        return batch["tokens"], batch["lengths"]


class Vit(Gpt):
    """An image classifier as ViT-B/16: `length` patches with 768 numbers each, and a class token."""

    text = None

    @nn.compact
    def __call__(self, patches: jax.Array):
        """`[batch, patches, 768]` to logits."""
        size = self.size
        dense = (linen if self.parts.fused else nn).Dense
        x = dense(size.width, dtype=DTYPE, name="embed")(patches)
        first = self.param("class", nn.initializers.normal(0.02), (1, 1, size.width))
        x = jnp.concatenate([jnp.broadcast_to(first.astype(DTYPE), (len(x), 1, size.width)), x], 1)
        positions = self.param("positions", nn.initializers.normal(0.02), (1, size.length + 1, size.width))
        x, residual = x + positions.astype(DTYPE), None
        for i in range(size.layers):
            x, residual = EncoderBlock(size.heads, self.parts, False, name=f"block_{i}")(x, residual, None)
        x = x[:, 0] if residual is None else x[:, 0] + residual[:, 0]
        x = _last_norm(self.parts, x, None)
        return dense(size.vocabulary, dtype=DTYPE, name="head")(x)

    def loss(self, variables: Any, batch: dict[str, jax.Array]) -> jax.Array:
        """The mean over all images."""
        return jnp.mean(self.parts.class_loss(self.apply(variables, *self.example(batch)), batch["labels"]))

    def batch(self, key: jax.Array) -> dict[str, jax.Array]:
        """Random patches and labels."""
        shape = (self.size.batch, self.size.length, 768)
        return {
            "patches": jax.random.normal(key, shape, DTYPE),
            "labels": jax.random.randint(key, shape[:1], 0, self.size.vocabulary),
        }

    def example(self, batch: dict[str, jax.Array]) -> tuple:
        """The arguments for `init`."""
        return (batch["patches"],)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding for `[batch, tokens, heads, depth]`, halves rotated, computed in f32."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None, :] for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class LlamaSize(Size):
    """key_heads: a quarter of the queries'. inner: the gated perceptron's width."""

    tied: bool = False

    @property
    def inner(self) -> int:
        """3.5 times the width."""
        return self.width * 7 // 2

    @property
    def label(self) -> str:
        """As in the results."""
        return f"Llama: {super().label}{', tied' if self.tied else ''}"


def _by_batch(x: jax.Array) -> jax.Array:
    """In a mesh with an axis `data`, over which sequences are split, hidden states are split as well."""
    if "data" not in jax.sharding.get_abstract_mesh().axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, P("data"))


class LlamaBlock(nn.Module):
    """RMS norms, rotary embedding, four queries a key head, a gated perceptron, no biases."""

    size: LlamaSize
    parts: Parts

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array | None):
        """`[batch, tokens, width]`, and if fused the sum before it; the same."""
        size, parts = self.size, self.parts
        layers = linen if parts.fused else nn
        dense = functools.partial(layers.Dense, use_bias=False, dtype=DTYPE)
        norms = [layers.RMSNorm(dtype=DTYPE, name=f"RMSNorm_{i}") for i in range(2)]

        def attend(y):
            counts = {"query": size.heads, "key": size.heads // 4, "value": size.heads // 4}
            if parts.fused:  # one product for all three: a key head's columns are adjacent, so that heads can be split
                kernels = [
                    Kernel((size.width, n * size.features), name=name)().astype(DTYPE) for name, n in counts.items()
                ]
                groups = (size.width, counts["key"], -1)
                joint = jnp.concatenate([kernel.reshape(groups) for kernel in kernels], 2)
                projected = jaxops.matmul(y, joint.reshape(size.width, -1)).reshape(*y.shape[:2], *joint.shape[1:])
                projected = jnp.split(projected, np.array([4, 5]) * size.features, -1)
            else:
                projected = [dense(n * size.features, name=name)(y) for name, n in counts.items()]
            query, key, value = (x.reshape(*y.shape[:2], -1, size.features) for x in projected)
            query, key = _rotate(query), _rotate(key)
            if parts.attention is None:
                mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
            else:
                mixed = parts.attention(query, key, value, causal=True, lengths=None)
            return dense(size.width, name="out")(mixed.reshape(y.shape))

        def perceptron(y):
            if parts.fused:
                shapes = {
                    "gate": (size.width, size.inner),
                    "up": (size.width, size.inner),
                    "down": (size.inner, size.width),
                }
                return jaxops.gated_mlp(
                    y, *(Kernel(shape, name=name)().astype(DTYPE) for name, shape in shapes.items())
                )
            gate, up = (dense(size.inner, name=name)(y) for name in ("gate", "up"))
            return dense(size.width, name="down")(nn.silu(gate) * up)

        if not parts.fused:
            x = _by_batch(x + attend(norms[0](x)))
            return _by_batch(x + perceptron(norms[1](x))), None
        y, x = (norms[0](x), x) if residual is None else norms[0](x, residual=residual)
        y, x = norms[1](_by_batch(attend(y)), residual=x)
        return _by_batch(perceptron(y)), x


class Llama(Gpt):
    """A decoder as Llama's."""

    @nn.compact
    def __call__(self, tokens: jax.Array):
        """`[batch, tokens]` to hidden states and the vocabulary's kernel."""
        size, parts = self.size, self.parts
        embed = nn.Embed(size.vocabulary, size.width, dtype=DTYPE, name="tokens")
        x, residual = _by_batch(embed(tokens)), None
        for i in range(size.layers):
            x, residual = LlamaBlock(size, parts, name=f"block_{i}")(x, residual)
        norm = (linen if parts.fused else nn).RMSNorm(dtype=DTYPE, name="norm")
        x = norm(x) if residual is None else norm(x, residual=residual)[0]
        return x, embed.embedding if size.tied else Kernel((size.width, size.vocabulary), name="logits")()


class Fused:
    """A module whose loss went through `jaxops.fuse`."""

    def __init__(self, module: Gpt):
        self._module, self.loss = module, jaxops.fuse(module.loss)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Case(NamedTuple):
    """A model class and a size."""

    model: type[Gpt]
    size: Size

    @property
    def label(self) -> str:
        """As in the results."""
        name = self.model.__name__
        return self.size.label if name in ("Gpt", "Llama") else f"{name}: {self.size.label}"

    def contender(self, name: str) -> Any:
        """The module, with that contender's `loss`."""
        module = self.model(self.size, CONTENDERS[name])
        if name == "swapped":
            return linen.swap(module)[0]
        return Fused(module) if name == "fused" else module


CASES = (
    Case(Gpt, Size(12, 768, 1024, 8, 50304)),
    Case(Gpt, Size(12, 1024, 4096, 2, 50304)),
    Case(Gpt, Size(2, 4096, 1024, 8, 50304)),
    Case(Llama, LlamaSize(16, 1024, 4096, 2, 128256, tied=True)),
    Case(Llama, LlamaSize(4, 4096, 4096, 1, 128256, features=128)),
    Case(Vit, Size(12, 768, 196, 256, 1000)),
    Case(Bert, Size(12, 768, 512, 32, 30522)),
)
QUICK = (
    Case(Gpt, Size(2, 128, 64, 2, 512)),
    Case(Llama, LlamaSize(1, 256, 64, 2, 512, tied=True)),
    Case(Vit, Size(1, 128, 16, 2, 64)),
    Case(Bert, Size(1, 128, 64, 2, 512)),
)
CPU = (Case(Gpt, Size(2, 256, 256, 2, 4096)),)


def draw_parameters(module: nn.Module, batch: dict[str, jax.Array]) -> Any:
    """The parameters, drawn one by one: the module's own `init` takes XLA half a minute to compile."""
    draw = jax.jit(lambda key, like: 0.02 * jax.random.normal(key, like.shape, like.dtype))
    shapes = jax.eval_shape(module.init, jax.random.key(0), *module.example(batch))

    def parameter(path, shape):
        if path[-1].key in ("scale", "bias"):
            return jnp.full(shape.shape, float(path[-1].key == "scale"), shape.dtype)
        key = jax.random.key(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return draw(key, jnp.zeros(shape.shape, shape.dtype))

    return jax.tree_util.tree_map_with_path(parameter, shapes)


def exact_loss(case: Case) -> Callable[..., jax.Array]:
    """The plain model's loss, computed in f32."""
    module = case.contender(PLAIN)

    def loss(parameters, batch):
        batch = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, batch)
        with computed_in(jnp.float32), jax.default_matmul_precision("float32"):
            return module.loss(parameters, batch)

    return loss


def make_step(loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A jitted AdamW step (rate 3e-5, decay 0.1) for a loss of parameters and a batch. At ten times the rate, rounding
    errors alone changed the fifth loss by 4 % at width 1024.

    (parameters, first moments, second moments, step), batch -> the same, the loss.
    """

    def step(state, batch):
        parameters, first, second, count = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, gradients)

        def update(p, m, v):
            m, v = m / (1 - 0.9**count), v / (1 - 0.95**count)
            return p - 3e-5 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p)

        return (jax.tree.map(update, parameters, first, second), first, second, count), loss

    return jax.jit(step)


def count(parameters: Any) -> int:
    """How many numbers are trained."""
    return int(sum(np.prod(x.shape) for x in jax.tree.leaves(parameters)))

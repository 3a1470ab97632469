"""What `fuse` finds in models of other libraries, and whether it changes them: the table in docs/fuse.md.

    python tools/coverage.py [NAME ...]

Small models, two layers each, with random parameters. A library that is not installed is left out. Each model's loss
and all gradients are compared, fused with plain, in f32 and in bf16.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxops

LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY, BATCH, TOKENS = 2, 32, 4, 64, 61, 2, 12

#: Of the largest gradient of a parameter, or of this part of the largest of all: some are rounding errors alone.
TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (0.1, 0.1)}

_Loss = Callable[[Any, jax.Array], jax.Array]


class Model(NamedTuple):
    """A library, and a function of a dtype that makes a loss (of parameters and tokens) and parameters."""

    library: str
    make: Callable[[Any], tuple[_Loss, Any]]


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean loss of each token's successor."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def _tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(0), (BATCH, TOKENS), 0, VOCABULARY)


def _of_transformers(name: str, **sizes: Any) -> Callable[[Any], tuple[_Loss, Any]]:
    def make(dtype):
        import transformers

        config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **sizes)
        kind = "MaskedLM" if name == "Bert" else "LMHeadModel" if name == "GPT2" else "CausalLM"
        model = getattr(transformers, f"Flax{name}For{kind}" if name != "GPT2" else "FlaxGPT2LMHeadModel")
        model = model(config, input_shape=(1, TOKENS), seed=0, dtype=dtype)

        def loss(parameters, tokens):
            return next_token_loss(model(tokens, params=parameters).logits, tokens)

        return loss, model.params

    return make


_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": HIDDEN}


def _of_equinox(dtype: Any) -> tuple[_Loss, Any]:
    import equinox as eqx

    keys = iter(jax.random.split(jax.random.key(0), 4 * LAYERS + 2))

    class Block(eqx.Module):
        first: eqx.nn.LayerNorm
        second: eqx.nn.RMSNorm
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __call__(self, x):
            h = jax.vmap(self.first)(x)
            mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
            x = x + self.attention(h, h, h, mask=mask)
            return x + jax.vmap(self.mlp)(jax.vmap(self.second)(x))

    class Model(eqx.Module):
        embedding: eqx.nn.Embedding
        blocks: list
        head: eqx.nn.Linear

        def __call__(self, tokens):
            x = jax.vmap(self.embedding)(tokens)
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.head)(x)

    def block():
        attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=next(keys))
        mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, key=next(keys))
        return Block(eqx.nn.LayerNorm(WIDTH), eqx.nn.RMSNorm(WIDTH), attention, mlp)

    embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=next(keys))
    model = Model(embedding, [block() for _ in range(LAYERS)], eqx.nn.Linear(WIDTH, VOCABULARY, key=next(keys)))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    arrays = jax.tree.map(lambda x: x.astype(dtype), arrays)
    return lambda p, tokens: next_token_loss(jax.vmap(eqx.combine(p, static))(tokens), tokens), arrays


def _of_haiku(dtype: Any) -> tuple[_Loss, Any]:
    import haiku as hk

    def forward(tokens):
        x = hk.Embed(VOCABULARY, WIDTH)(tokens)
        mask = jnp.tril(jnp.ones((1, 1, TOKENS, TOKENS), bool))
        for _ in range(LAYERS):
            h = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=hk.initializers.VarianceScaling())(
                h, h, h, mask=mask
            )
            h = hk.RMSNorm(-1)(x)
            x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(HIDDEN)(h)))
        return hk.Linear(VOCABULARY)(hk.LayerNorm(-1, True, True)(x))

    model = hk.without_apply_rng(hk.transform(forward))
    parameters = jax.tree.map(lambda x: x.astype(dtype), model.init(jax.random.key(0), _tokens()))
    return lambda p, tokens: next_token_loss(model.apply(p, tokens), tokens), parameters


def _of_penzai(dtype: Any) -> tuple[_Loss, Any]:
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as common

    config = common.LlamalikeTransformerConfig(
        num_kv_heads=HEADS // 2,
        query_head_multiplier=2,
        embedding_dim=WIDTH,
        projection_dim=WIDTH // HEADS,
        mlp_hidden_dim=HIDDEN,
        num_decoder_blocks=LAYERS,
        vocab_size=VOCABULARY,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        parameter_dtype=dtype,
        activation_dtype=dtype,
    )
    model = common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
    bare, parameters = pz.unbind_params(model, freeze=True)
    values = {p.label: p.value for p in parameters}

    def loss(values, tokens):
        bound = pz.bind_variables(bare, [pz.ParameterValue(label=k, value=v) for k, v in values.items()])
        named = pz.nx.wrap(tokens, "batch", "seq")
        logits = bound(named, token_positions=pz.nx.arange("seq", TOKENS))
        return next_token_loss(logits.unwrap("batch", "seq", "vocabulary"), tokens)

    return loss, values


def _of_gemma(dtype: Any) -> tuple[_Loss, Any]:
    from gemma import gm
    from gemma.gm.nn import config

    sizes = config.TransformerConfig(
        num_embed=VOCABULARY,
        embed_dim=WIDTH,
        hidden_dim=HIDDEN,
        num_heads=HEADS,
        head_dim=WIDTH // HEADS,
        num_kv_heads=HEADS // 2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(gm.nn.AttentionType.GLOBAL,) * LAYERS,
        use_qk_norm=True,
    )
    model = gm.nn.Transformer(config=sizes, dtype=dtype, tokens="tokens")
    parameters = jax.tree.map(lambda x: x.astype(dtype), model.init(jax.random.key(0), tokens=_tokens()))
    return lambda p, tokens: next_token_loss(model.apply(p, tokens=tokens).logits, tokens), parameters


def _of_keras(dtype: Any) -> tuple[_Loss, Any]:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    keras.config.set_floatx(jnp.dtype(dtype).name)
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(LAYERS):
        h = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        x = x + attention(h, h, use_causal_mask=True)
        h = keras.layers.RMSNormalization()(x)
        x = x + keras.layers.Dense(WIDTH)(keras.layers.Dense(HIDDEN, activation="gelu")(h))
    model = keras.Model(tokens, keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x)))
    parameters = [variable.value for variable in model.trainable_variables]

    def loss(parameters, tokens):
        logits, _ = model.stateless_call(parameters, [v.value for v in model.non_trainable_variables], tokens)
        return next_token_loss(logits, tokens)

    return loss, parameters


MODELS = {
    "transformers' Flax Llama": Model("transformers", _of_transformers("Llama", **_SIZES)),
    "transformers' Flax Gemma": Model(
        "transformers", _of_transformers("Gemma", head_dim=WIDTH // HEADS, num_key_value_heads=HEADS, **_SIZES)
    ),
    "transformers' Flax GPT-2": Model(
        "transformers",
        _of_transformers("GPT2", n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0.0, n_positions=64),
    ),
    "transformers' Flax BERT": Model("transformers", _of_transformers("Bert", **_SIZES)),
    "equinox": Model("equinox", _of_equinox),
    "haiku": Model("dm-haiku", _of_haiku),
    "penzai": Model("penzai", _of_penzai),
    "gemma": Model("gemma", _of_gemma),
    "keras": Model("keras", _of_keras),
}

#: How many products of matrices each op has.
_PRODUCTS = {
    "dot_general": 1,
    "matmul": 1,
    "gated_matmul": 2,
    "gated_mlp": 3,
    "dot_product_attention": 2,
    "linear_cross_entropy": 1,
}

_LOSSES = ("linear_cross_entropy", "softmax_cross_entropy_with_integer_labels")


def shares(report: jaxops.FuseReport) -> dict[str, tuple[int, int]]:
    """Of norms, softmaxes (of attention too), products, attention blocks and losses: found, and of how many."""
    counts = report.counts
    missed = [miss.what for miss in report.near_misses]
    attention = counts.get("dot_product_attention", 0)
    found = {
        "norms": counts.get("layer_norm", 0) + counts.get("rms_norm", 0),
        "softmaxes": counts.get("softmax", 0) + counts.get("log_softmax", 0) + attention,
        "products": sum(n * counts.get(op, 0) for op, n in _PRODUCTS.items()),
        "attention": attention,
        "losses": sum(counts.get(op, 0) for op in _LOSSES),
    }
    near = {"norms": "a norm", "softmaxes": "a softmax", "products": "a product", "attention": "attention"}
    return {name: (n, max(1, n) if name == "losses" else n + missed.count(near[name])) for name, n in found.items()}


def compare(loss: _Loss, parameters: Any, tolerance: float, part: float) -> tuple[jaxops.FuseReport, float, int]:
    """The report, the largest difference of loss and gradients, and how often the fused loss was traced."""
    reports: list[jaxops.FuseReport] = []
    steps = [jax.jit(jax.value_and_grad(f)) for f in (jaxops.fuse(loss, report=reports.append), loss)]
    tokens = _tokens()
    (value, gradients), (wanted, wanted_gradients) = (step(parameters, tokens) for step in steps)
    steps[0](parameters, tokens)
    worst = abs(float(value) - float(wanted)) / abs(float(wanted))
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(wanted_gradients))
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), part * largest))
    if not worst <= tolerance:
        raise ArithmeticError(f"loss or a gradient differs by {worst:.2g} of the largest")
    return reports[0], worst, len(reports)


def main(argv: list[str] | None = None) -> int:
    """Prints the table as Markdown; the number of models that failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="*", help=f"models, all by default: {', '.join(MODELS)}")
    parser.add_argument("--reports", action="store_true", help="print each report too")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.name if name not in MODELS]:
        parser.error(f"there is no model {unknown[0]!r}, only {', '.join(MODELS)}")
    print("| model | dtype | norms | softmaxes | products | attention | losses | largest difference |")
    print("|---|---|---|---|---|---|---|---|")
    failed = 0
    for name in options.name or MODELS:
        model = MODELS[name]
        try:
            version = importlib.metadata.version(model.library)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: {model.library} is not installed", file=sys.stderr)
            continue
        for dtype, tolerances in TOLERANCES.items():
            start = time.perf_counter()
            try:
                loss, parameters = model.make(jnp.dtype(dtype).type)
                report, worst, traced = compare(loss, parameters, *tolerances)
                assert traced == 1
            except Exception as error:  # of a library that this jax does not suit, too
                failed += 1
                print(f"{name} {dtype}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                continue
            if options.reports:
                print(report, file=sys.stderr)
            cells = [f"{found}/{whole}" for found, whole in shares(report).values()]
            print(f"| {name} {version} | {dtype} | {' | '.join(cells)} | {worst:.1g} |", flush=True)
            print(f"{name} {dtype}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))

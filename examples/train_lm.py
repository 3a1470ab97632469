"""Trains a small language model on bytes of text: a plain Flax model, put onto jaxops by one call.

    python examples/train_lm.py                        # tiny, under a minute on a CPU
    python examples/train_lm.py --library nnx
    python examples/train_lm.py --size gpt2-small      # on a GPU; prints tokens a second beside plain Flax

Run again with more `--steps`, it goes on from the last checkpoint in `--out`. There it writes `metrics.csv` and
`loss.png` too. Activations are bfloat16, parameters and the optimiser's state float32.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax import nnx
from matplotlib.figure import Figure
from rich import print, progress

import jaxops.flax.linen
import jaxops.flax.nnx


class Size(NamedTuple):
    """A decoder, and the batches that it is trained on."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    vocabulary: int
    steps: int


SIZES = {
    "tiny": Size(2, 128, 4, length=64, batch=8, vocabulary=256, steps=150),
    "gpt2-small": Size(12, 768, 12, length=1024, batch=8, vocabulary=50304, steps=500),
    "gpt2-medium": Size(24, 1024, 16, length=1024, batch=8, vocabulary=50304, steps=500),
}


# --- the model, in plain linen ---


class LinenBlock(nn.Module):
    """Attention and a multi-layer perceptron, each behind a norm and beside a residual."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """`[batch, tokens, width]` to the same."""
        options = {"dtype": jnp.bfloat16}
        x = x + nn.MultiHeadDotProductAttention(self.size.heads, **options)(nn.LayerNorm(**options)(x), mask=mask)
        y = nn.Dense(4 * self.size.width, **options)(nn.LayerNorm(**options)(x))
        return x + nn.Dense(self.size.width, **options)(nn.gelu(y))


class LinenDecoder(nn.Module):
    """A GPT-2-like decoder."""

    size: Size

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[batch, tokens]` to `[batch, tokens, vocabulary]`."""
        size, options = self.size, {"dtype": jnp.bfloat16}
        x = nn.Embed(size.vocabulary, size.width, **options)(tokens)
        x = x + nn.Embed(size.length, size.width, **options)(jnp.arange(tokens.shape[-1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(size.layers):
            x = LinenBlock(size)(x, mask)
        return nn.Dense(size.vocabulary, use_bias=False, **options)(nn.LayerNorm(**options)(x))


# --- the same in plain nnx ---


class NnxBlock(nnx.Module):
    """Attention and a multi-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        options = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norms = nnx.List([nnx.LayerNorm(size.width, **options) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(size.heads, size.width, decode=False, **options)
        self.widen = nnx.Linear(size.width, 4 * size.width, **options)
        self.narrow = nnx.Linear(4 * size.width, size.width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, tokens, width]` to the same."""
        x = x + self.attention(self.norms[0](x), is_causal=True)
        return x + self.narrow(nnx.gelu(self.widen(self.norms[1](x))))


class NnxDecoder(nnx.Module):
    """A GPT-2-like decoder."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        options = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.tokens = nnx.Embed(size.vocabulary, size.width, **options)
        self.positions = nnx.Embed(size.length, size.width, **options)
        self.blocks = nnx.List([NnxBlock(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, **options)
        self.logits = nnx.Linear(size.width, size.vocabulary, use_bias=False, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[batch, tokens]` to `[batch, tokens, vocabulary]`."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


# --- training ---


def on_host(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function, compiled for and run by the host: for so many random numbers XLA's GPU compiler takes minutes."""

    def call():
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            result = jax.jit(function)()
        return jax.device_put(result, jax.local_devices()[0])

    return call


def make_model(library: str, size: Size, on_jaxops: bool) -> tuple[Callable[[], Any], Callable[..., jax.Array]]:
    """`init() -> parameters` and `apply(parameters, tokens) -> logits`, for either library."""
    if library == "linen":
        model = LinenDecoder(size)
        if on_jaxops:
            model, _ = jaxops.flax.linen.swap(model)  # this is all
        tokens = jnp.zeros((1, size.length), jnp.int32)
        return on_host(lambda: model.init(jax.random.key(0), tokens)), model.apply
    model = nnx.eval_shape(lambda: NnxDecoder(size, nnx.Rngs(0)))
    if on_jaxops:
        model, _ = jaxops.flax.nnx.swap(model)  # this is all
    graph, shapes = nnx.split(model)

    def apply(parameters, tokens):
        state = jax.tree.map(lambda x: x, shapes)
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(graph, state)(tokens)

    return on_host(lambda: nnx.to_pure_dict(nnx.state(NnxDecoder(size, nnx.Rngs(0))))), apply


@dataclasses.dataclass
class State:
    """What a checkpoint holds."""

    step: Any
    parameters: Any
    optimizer: Any


jax.tree_util.register_dataclass(State, ["step", "parameters", "optimizer"], [])


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW with a warm-up and a cosine decay."""
    warm_up = min(max(1, steps // 10), steps - 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, warm_up, steps, end_value=1e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))


def make_step(apply: Callable[..., jax.Array], optimizer: optax.GradientTransformation, on_jaxops: bool):
    """A jitted step: state, tokens `[batch, length + 1]` -> state, metrics."""

    def step(state, tokens):
        def loss(parameters):
            logits = apply(parameters, tokens[:, :-1])
            if on_jaxops:  # in f32, without f32 logits
                return jaxops.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
            return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(state.parameters)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        metrics = {"loss": value, "gradient_norm": optax.tree.norm(gradients)}
        return State(state.step + 1, parameters, optimizer_state), metrics

    return jax.jit(step, donate_argnums=0)


def read_text(path: Path | None) -> np.ndarray:
    """The bytes of a file; by default of the language reference that every CPython carries."""
    if path is not None:
        return np.frombuffer(path.read_bytes(), np.uint8)
    from pydoc_data.topics import topics

    return np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def draw_batch(text: np.ndarray, size: Size, step: int) -> np.ndarray:
    """Step number `step`'s tokens: the same whether training was interrupted before it or not."""
    starts = np.random.default_rng(step).integers(0, len(text) - size.length, (size.batch, 1))
    return text[starts + np.arange(size.length + 1)].astype(np.int32)


def train(size: Size, library: str, on_jaxops: bool, steps: int, text: np.ndarray, out: Path, every: int) -> State:
    """Trains to step `steps`, starting from the last checkpoint if any."""
    init, apply = make_model(library, size, on_jaxops)
    optimizer = make_optimizer(steps)
    step = make_step(apply, optimizer, on_jaxops)
    start = jax.jit(lambda parameters: State(jnp.zeros((), jnp.int32), parameters, optimizer.init(parameters)))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=every, enable_async_checkpointing=False)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[loss]}"),
    )
    with ocp.CheckpointManager(out / f"checkpoints-{library}", options=options) as checkpoints:
        if (last := checkpoints.latest_step()) is None:
            state = start(init())
        else:
            shapes = jax.eval_shape(start, jax.eval_shape(init))
            state = State(**checkpoints.restore(last, args=ocp.args.StandardRestore(vars(shapes))))
            print(f"resumed at step {last}")
        first = int(state.step)
        lines = (out / "metrics.csv").read_text().splitlines()[1 : first + 1] if first else []
        with (out / "metrics.csv").open("w", newline="", buffering=1) as file, progress.Progress(*columns) as bar:
            file.writelines(f"{line}\n" for line in ("step,loss,gradient_norm,tokens_per_second", *lines))
            writer = csv.writer(file)
            task = bar.add_task(
                f"{library}, {'jaxops' if on_jaxops else 'flax'}", total=steps, completed=first, loss=""
            )
            for i in range(first, steps):
                begin = time.perf_counter()
                state, metrics = step(state, draw_batch(text, size, i))
                loss, norm = float(metrics["loss"]), float(metrics["gradient_norm"])
                rate = size.batch * size.length / (time.perf_counter() - begin)
                writer.writerow([i + 1, f"{loss:.5f}", f"{norm:.5f}", f"{rate:.0f}"])
                bar.update(task, advance=1, loss=f"loss {loss:.3f}, {rate:.0f} tokens/s")
                if not np.isfinite(loss):
                    raise FloatingPointError(f"the loss is {loss} at step {i + 1}")
                checkpoints.save(i + 1, args=ocp.args.StandardSave(vars(state)), force=i + 1 == steps)
    return state


def plot(out: Path) -> None:
    """Draws the loss over the steps in metrics.csv."""
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([int(row["step"]) for row in rows], [float(row["loss"]) for row in rows])
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    figure.savefig(out / "loss.png", dpi=150)


def compare(size: Size, library: str, text: np.ndarray, rounds: int = 5, steps: int = 10) -> dict[str, float]:
    """Tokens a second of plain Flax and on jaxops: medians over rounds in which each runs in turn."""
    optimizer = make_optimizer(1000)
    tokens = jnp.asarray(draw_batch(text, size, 0))
    count = steps * size.batch * size.length
    contenders = {}
    for name in ("flax", "jaxops"):
        init, apply = make_model(library, size, name == "jaxops")
        parameters = init()
        state = State(jnp.zeros((), jnp.int32), parameters, optimizer.init(parameters))
        step = make_step(apply, optimizer, name == "jaxops")
        state, _ = step(state, tokens)
        contenders[name] = [step, state]
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (step, state) in contenders.items():
            jax.block_until_ready(state)
            begin = time.perf_counter()
            for _ in range(steps):
                state, metrics = step(state, tokens)
            jax.block_until_ready(metrics)
            rates[name].append(count / (time.perf_counter() - begin))
            contenders[name][1] = state
    return {name: statistics.median(values) for name, values in rates.items()}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains, plots and compares; tokens a second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=("linen", "nnx"), default="linen")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="train up to this step (default: the size's)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this file (default: Python's reference)")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIRECTORY", help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--plain", action="store_true", help="train on plain Flax")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be 1 or more, got {options.steps}")
    size = SIZES[options.size]
    steps = size.steps if options.steps is None else options.steps
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    text = read_text(options.text)
    if len(text) <= size.length:
        parser.error(f"--text must have more than {size.length} bytes, got {len(text)}")
    print(f"{options.size}: {size}, {len(text)} bytes of text, {jax.devices()[0].device_kind}")
    state = train(size, options.library, not options.plain, steps, text, out, options.save_every)
    count = sum(x.size for x in jax.tree.leaves(state.parameters))
    del state
    plot(out)
    rates = compare(size, options.library, text)
    print(f"{count / 1e6:.1f} million parameters; {out / 'metrics.csv'}, {out / 'loss.png'}")
    for name, rate in rates.items():
        print(f"{name:7}{rate:10.0f} tokens/s  {rate / rates['flax']:.3f}")
    return rates


if __name__ == "__main__":
    main()

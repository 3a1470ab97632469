"""Training steps of a model that others wrote, without and with jaxops: `python -m benchmarks upstream`.

The model is transformers' Flax Llama, from the installed package. It learns to predict the bytes of this project's
documentation. All contenders start from the same parameters and see the same batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import table

import jaxops
from benchmarks import harness, train
from jaxops.flax import linen

STEPS = 50
#: How far any step's loss may be from plain transformers' loss, relative. Training amplifies rounding errors. In 50
#: steps of 4 layers with width 256, on a CPU, losses were apart by at most 0.22 %. Two faults in attention showed: a
#: window of half the tokens changed a loss by 1.9 %, heads that read other keys by 14 %.
TOLERANCE = 2 * train.LOSS_TOLERANCE
BATCHES = 7  # so the first and the last step see the same batch
PLAIN, BEST, SWAPPED, FUSED = "transformers", "cuDNN attention", "swapped", "fused"
DOCUMENTATION = Path(__file__).resolve().parents[1] / "docs"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's sizes and a batch's."""

    sequences: int
    tokens: int
    layers: int = 8
    width: int = 1024
    heads: int = 16
    key_heads: int = 4
    hidden: int = 2816
    vocabulary: int = 32000

    @property
    def label(self) -> str:
        """Its sizes."""
        return f"FlaxLlama: {self.layers} layers, width {self.width}, {self.sequences} x {self.tokens} tokens"

    def model(self) -> Any:
        """The model: parameters in f32, activations in bf16."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_flax_llama import FlaxLlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=self.tokens,
        )
        return FlaxLlamaForCausalLM(config, seed=0, dtype=jnp.bfloat16)

    def batches(self) -> jax.Array:
        """Bytes of the documentation, [BATCHES, sequences, tokens]."""
        text = b"".join(page.read_bytes() for page in sorted(DOCUMENTATION.glob("*.md")))
        starts = np.linspace(0, len(text) - self.tokens, BATCHES * self.sequences).astype(int)
        rows = [np.frombuffer(text, np.uint8, self.tokens, start) for start in starts]
        return jnp.asarray(rows, jnp.int32).reshape(BATCHES, self.sequences, self.tokens)


CASES = (Case(1, 4096), Case(4, 1024))
SMALL = (Case(2, 32, layers=2, width=64, heads=4, key_heads=2, hidden=128, vocabulary=256),)


@contextlib.contextmanager
def cudnn_attention() -> Iterator[None]:
    """A scope in which the model's attention is `jax.nn`'s, on a GPU cuDNN's: the change that users make by hand.

    For training alone: it keeps no cache, and reads no mask.
    """
    from transformers.models.llama.modeling_flax_llama import FlaxLlamaAttention

    class Attention(FlaxLlamaAttention):  # flax makes `__call__` of a subclass call `setup`
        def __call__(self, hidden_states, attention_mask, position_ids, *_, **__):
            q = self._split_heads(self.q_proj(hidden_states), self.num_heads)
            k, v = (self._split_heads(f(hidden_states), self.num_key_value_heads) for f in (self.k_proj, self.v_proj))
            k, q = self.rotary_emb(k, q, position_ids)
            implementation = "cudnn" if jax.default_backend() == "gpu" else None
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
            return (self.o_proj(self._merge_heads(out)),)

    with mock.patch.object(FlaxLlamaAttention, "__call__", Attention.__call__):
        yield


def loss_of(module: Any) -> Any:
    """The mean loss of each token's successor, as a function of parameters and tokens."""

    def loss(parameters, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits = module.apply({"params": parameters}, tokens, jnp.ones_like(tokens), positions).logits
        logits = logits[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


OPTIMIZER = optax.adamw(optax.linear_schedule(0.0, 1e-3, 10))  # the rate warms up, as rounding errors grow otherwise


def _step(loss: Any) -> Any:
    def step(state, tokens):
        parameters, moments = state
        value, gradients = jax.value_and_grad(loss)(parameters, tokens)
        updates, moments = OPTIMIZER.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), value

    return jax.jit(step)


def lower(module: Any, state: Any, tokens: jax.Array, reports: dict[str, Any]) -> dict[str, jax.stages.Lowered]:
    """Each contender's training step. `reports` receives the swap's and `fuse`'s reports."""
    swapped, reports[SWAPPED] = linen.swap(module)
    fused = jaxops.fuse(loss_of(module), report=lambda report: reports.update({FUSED: report}))
    steps = {
        PLAIN: _step(loss_of(module)),
        BEST: _step(loss_of(module)),
        SWAPPED: _step(loss_of(swapped)),
        FUSED: _step(fused),
    }
    lowered = {}
    for name, step in steps.items():
        with cudnn_attention() if name == BEST else contextlib.nullcontext():
            lowered[name] = step.lower(state, tokens)
    return lowered


def curves(steps: Mapping[str, Any], state: Any, batches: jax.Array) -> dict[str, list[float]]:
    """The losses of each contender's first steps."""
    found: dict[str, list[float]] = {}
    for name, step in steps.items():
        now, losses = state, []
        for i in range(STEPS):
            now, loss = step(now, batches[i % len(batches)])
            losses.append(loss)
        found[name] = [float(loss) for loss in losses]
    return found


def difference(losses: Sequence[float], wanted: Sequence[float]) -> tuple[float, bool]:
    """The largest relative difference between two curves, and whether every step's is within `TOLERANCE`."""
    found = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    return max(found), all(apart <= TOLERANCE for apart in found)


@dataclasses.dataclass(frozen=True)
class Measured:
    """seconds: a step. memory: the compiled step's temporary bytes. losses: each step's."""

    seconds: dict[str, float]
    memory: dict[str, int]
    losses: dict[str, list[float]]
    reports: dict[str, Any]


def measure(case: Case, settings: harness.Settings) -> Measured:
    """The contenders' figures, and the reports of the swap and of `fuse`."""
    model, batches = case.model(), case.batches()
    state = (model.params, OPTIMIZER.init(model.params))
    reports: dict[str, Any] = {}
    steps = harness.compile_all(lower(model.module, state, batches[0], reports))
    losses = curves(steps, state, batches)
    clock = harness.WallClock()
    clock.enough = 0.02 if settings.quick else 0.2
    calls = {name: harness.Calls(step, [(state, batches[0])]) for name, step in steps.items()}
    seconds = harness.alternate(clock, calls, 20 * settings.seconds, settings.rounds)
    memory = {name: step.memory_analysis().temp_size_in_bytes for name, step in steps.items()}
    return Measured(seconds, memory, losses, reports)


def _show(case: Case, found: Measured, settings: harness.Settings) -> bool:
    """Prints the reports and the table; whether all losses agree."""
    for name, report in found.reports.items():
        text = str(report).splitlines()[0] if name == SWAPPED else report  # which lists every layer
        settings.console.print(f"{name}: {text}", markup=False)
    shown = table.Table(title=case.label, title_justify="left")
    shown.add_column("contender")
    for heading in ("ms", "times cuDNN", "GiB", "share", "first loss", f"loss {STEPS}", "largest difference"):
        shown.add_column(heading, justify="right")
    alike = True
    for name, losses in found.losses.items():
        largest, within = difference(losses, found.losses[PLAIN])
        alike &= within
        shown.add_row(
            name,
            f"{1e3 * found.seconds[name]:.2f}",
            f"{found.seconds[BEST] / found.seconds[name]:.3f}",
            f"{found.memory[name] / 2**30:.2f}",
            f"{found.memory[name] / max(found.memory[BEST], 1):.2f}",
            f"{losses[0]:.4f}",
            f"{losses[-1]:.4f}",
            f"{largest:.1e}",
            style=None if within else "red",
        )
    settings.console.print(shown)
    if alike:
        settings.console.print(f"All losses of the {STEPS} steps agree.")
    else:
        settings.console.print("FAILED: the losses differ.", style="red")
    return alike


def run(settings: harness.Settings) -> bool:
    """Measures the contenders alternately and prints the tables; False if their losses differ."""
    try:
        import transformers.models.llama.modeling_flax_llama  # noqa: F401
    except ImportError as error:
        settings.labels.append("upstream")
        message = f"FAILED upstream: it needs transformers with Flax models, 4.50 to 4.56 ({error})"
        settings.console.print(message, style="red", markup=False)
        return False
    cases = CASES if jax.default_backend() == "gpu" and not settings.quick else SMALL
    cases = settings.select(cases, lambda case: f"upstream {case.label}")
    alike = True
    for case in settings.bar(cases, lambda case: case.label):
        alike &= _show(case, measure(case, settings), settings)
    return alike

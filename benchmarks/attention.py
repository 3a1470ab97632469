"""Attention against cuDNN's through jax.nn: forward and backward, over lengths, depths, groups, masks, and decoding.

If jax.nn does not call cuDNN (on the CPU, or for calls that cuDNN refuses), the reference is jax.nn's plain form, and
the label says so. Rates count the logits that are seen. All cases take two or three minutes with `--seconds 0.1`,
mostly for compilation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxops
from benchmarks import harness
from jaxops.ops._attention_plain import Call, logits_count


@dataclasses.dataclass(frozen=True)
class Case:
    """A call.

    kind: "causal", "full", "window" (1024 keys), "packed" (16 documents a row), "mask" (a causal one, from memory),
    "bias" (for every head), "decoding" (from a full cache).
    """

    batch: int
    queries: int
    heads: int
    depth: int
    kind: str = "causal"
    groups: int = 0  # key heads; 0: as many as heads
    keys: int = 0  # 0: as many as queries

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Keys, key heads, documents a row."""
        return self.keys or self.queries, self.groups or self.heads, 16 if self.kind == "packed" else 1

    def __str__(self) -> str:
        keys, groups, _ = self.sizes
        lengths = str(self.queries) if keys == self.queries else f"{self.queries}:{keys}"
        heads = str(self.heads) if groups == self.heads else f"{self.heads}:{groups}"
        return f"{self.batch}x{lengths}x{heads}x{self.depth} {self.kind}"

    @property
    def logits(self) -> int:
        """How many are seen."""
        keys, _, documents = self.sizes
        window = (1023, -1) if self.kind == "window" else (-1, -1)
        causal = self.kind not in ("full", "bias", "decoding")
        count = logits_count(Call(1.0, causal, window), self.queries // documents, keys // documents)
        return self.batch * self.heads * count * documents

    def options(self) -> dict[str, Any]:
        """Of the call, without arrays."""
        return {
            "is_causal": self.kind in ("causal", "window", "packed"),
            "local_window_size": (1023, 0) if self.kind == "window" else None,
        }

    def operands(self, dtype: str, rng: harness.Generator) -> tuple[jax.Array, ...]:
        """query, key, value, and the case's other operands."""
        keys, groups, documents = self.sizes
        shapes = [(self.queries, self.heads), (keys, groups), (keys, groups)]
        found = [rng.standard_normal((self.batch, *shape, self.depth)).astype(dtype) for shape in shapes]
        if self.kind == "packed":
            ids = jnp.arange(self.queries, dtype=jnp.int32) * documents // self.queries
            found.append(jnp.broadcast_to(ids, (self.batch, self.queries)))
        elif self.kind == "mask":
            found.append(jnp.tril(jnp.ones((1, 1, self.queries, keys), bool)))
        elif self.kind == "bias":
            found.append(rng.standard_normal((1, self.heads, self.queries, keys)).astype(dtype))
        return tuple(found)


def ours(case: Case) -> Callable[..., jax.Array]:
    """jaxops' attention on the case's operands."""
    name = {"packed": "query_segment_ids", "mask": "mask", "bias": "bias"}.get(case.kind)

    def run(query, key, value, *more):
        given = dict(zip([name], more, strict=False))
        return jaxops.dot_product_attention(query, key, value, **given, **case.options())

    return run


def reference(case: Case, implementation: str) -> Callable[..., jax.Array]:
    """jax.nn's, with segments as a mask."""

    def run(query, key, value, *more):
        given = {}
        if case.kind == "packed":
            given["mask"] = more[0][:, None, :, None] == more[0][:, None, None, :]
        elif more:
            given[case.kind] = more[0]
        options = case.options() | {"implementation": implementation}
        return jax.nn.dot_product_attention(query, key, value, **given, **options)

    return run


def _takes(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    try:
        jax.eval_shape(lambda *xs: jax.vjp(function, *xs[:3], *xs[3:])[0], *arguments)
    except Exception:  # many types: shapes, dtypes, devices and cuDNN versions
        return False
    return True


def cases(quick: bool) -> Iterator[Case]:
    """The measured cases."""
    if quick or harness.backend() == "cpu":
        yield from (Case(1, 256, 2, 64), Case(1, 256, 4, 64, "full", groups=2), Case(1, 256, 2, 64, "packed"))
        return
    for depth in (64, 128):
        for batch, tokens in ((8, 512), (8, 1024), (4, 2048), (4, 4096), (1, 16384)):
            yield from (Case(batch, tokens, 16, depth, kind) for kind in ("causal", "full"))
    yield from (Case(1, 32768, 16, 128), Case(8, 1000, 16, 64), Case(4, 4097, 16, 128))
    yield from (Case(4, 4096, 32, 128, groups=8), Case(4, 4096, 32, 64, groups=4))
    yield Case(2, 1024, 16, 128, "full", keys=8192)
    yield from (Case(4, 4096, 16, depth) for depth in (96, 192, 256))
    yield from (Case(4, 4096, 16, depth, kind) for depth in (64, 128) for kind in ("window", "packed", "mask"))
    yield from (Case(4, 2048, 16, 64, "bias"), Case(4, 2048, 16, 128, "bias"))
    for keys in (1024, 8192, 32768, 131072):
        yield Case(max(1, 32768 // keys), 1, 32, 128, "decoding", groups=8, keys=keys)


def _copy(case: Case, dtype: str) -> harness.Calls:
    """Reads and writes as many bytes as the cache has."""
    keys, groups, _ = case.sizes
    x = jnp.ones((case.batch, keys, groups, case.depth), dtype)
    return harness.Calls(harness.compiled(jnp.negative), [(x,)] * harness.copies((x,)))


def tasks(case: Case, dtype: str) -> Iterator[harness.Task]:
    """Both directions; for decoding one."""
    draw = harness.drawing(functools.partial(case.operands, dtype))
    arguments = jax.eval_shape(draw, 0)
    theirs, label = reference(case, "cudnn"), str(case)
    if harness.backend() == "cpu" or not _takes(theirs, arguments):
        theirs, label = reference(case, "xla"), f"{case}, against the plain form"
    keys, groups, _ = case.sizes
    decoding = case.kind == "decoding"
    for direction, products in (("forward", 2), ("backward", 5))[: 1 if decoding else 2]:
        operations = 2 * products * case.logits * case.depth
        cache = 2 * case.batch * keys * groups * case.depth * np.dtype(jnp.dtype(dtype)).itemsize
        yield harness.Task(
            op="attention",
            direction=direction,
            shape=label,
            dtype=dtype,
            ours=ours(case),
            reference=theirs,
            draw=draw,
            work=cache if decoding else operations,
            unit="TB/s" if decoding else "TFLOP/s",
            ceiling=functools.partial(_copy, case, dtype) if decoding else None,
            differentiable=4 if case.kind == "bias" else 3,
        )


def run(clock: harness.Clock, settings: harness.Settings) -> bool:
    """Measures the cases in the 16-bit dtypes asked for, or float32 on the CPU; False if a measurement failed."""
    succeeded = True
    for dtype in settings.dtypes:
        if dtype not in ("bfloat16", "float16") and harness.backend() == "gpu":
            continue
        found = [task for case in cases(settings.quick) for task in tasks(case, dtype)]
        succeeded &= harness.run(f"attention, {dtype}; XLA: cuDNN through jax.nn", found, clock, settings)
    return succeeded

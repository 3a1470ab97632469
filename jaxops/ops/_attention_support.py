"""Which calls the attention kernels take, and the workspaces that they want."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxops._device import local_device

#: The dtypes that have kernels.
DTYPES = ("bfloat16", "float16")

#: Depths are multiples of the first, up to the second.
DEPTH_STEP, MAX_DEPTH = 8, 256

#: The most elements along an axis.
LONGEST = 2**29

#: The compute capability that the kernels are compiled for.
CAPABILITY = "9.0"

#: A kernel splits the keys among blocks up to this many query rows, counting all heads that share a key head.
FEW_ROWS = 64

#: Multiprocessors on the GPU on which the choice of splits was measured.
_MULTIPROCESSORS = 132


def why_not(operands: Mapping[str, Any]) -> str | None:
    """Why a call has no kernel, whatever the device; None: it has one.

    Args:
      operands: arrays or types by name: query [batch, queries, key heads, group, depth], key and value [batch, keys,
        key heads, depth]; and others if they are given.
    """
    query, value = operands["query"], operands["value"]
    if query.dtype.name not in DTYPES:
        return f"there is no attention kernel for {query.dtype}"
    depth, features = query.shape[-1], value.shape[-1]
    if features != depth:
        return f"the attention kernels take values of the keys' depth, got {features} and {depth}"
    if depth % DEPTH_STEP or depth > MAX_DEPTH:
        return f"the attention kernels take multiples of {DEPTH_STEP} up to {MAX_DEPTH} as the depth, got {depth}"
    if any(isinstance(d, int) and d > LONGEST for x in (query, value) for d in x.shape):
        return f"the attention kernels take axes of up to 2^29, got query {query.shape} and value {value.shape}"
    return None


def why_not_here() -> str | None:
    """Why this machine's GPU has no kernel."""
    found = local_device().capability
    return (
        None if found == CAPABILITY else f"the attention kernels are for compute capability {CAPABILITY}, not {found}"
    )


def _blocks(size: Any, block: int) -> Any:
    return -(-size // block)


def _rounded(size: Any) -> Any:
    return 4 * _blocks(size, 4)


def key_splits(batch: Any, key_heads: Any, rows: Any, keys: Any, depth: int) -> int:
    """Into how many parts the kernel for few queries splits the keys; 0: the call is for the other kernel.

    A part costs a block as much as two key blocks before it begins; blocks run in waves.

    Args:
      rows: queries times the heads that share a key head.
    """
    if not all(isinstance(size, int) for size in (batch, key_heads, rows, keys)) or rows > FEW_ROWS:
        return 0
    block = 64 if depth > 128 else 128
    slots = _MULTIPROCESSORS * (2 if depth <= 64 else 1)
    heads, blocks = batch * key_heads, _blocks(keys, block)

    def cost(splits):
        return _blocks(heads * splits, slots) * (_blocks(blocks, splits) + 2)

    return min(range(1, min(blocks, slots) + 1), key=cost)


def _reach(lines: Any, queries: Any) -> Any:
    """Words for the ranges that queries or keys see, each and by 64: two and four numbers."""
    return _rounded(2 * lines * queries) + 4 * lines * _blocks(queries, 64)


def _is_some(lines: Any) -> bool:
    return not isinstance(lines, int) or lines > 0


def forward_workspace(batch: Any, queries: Any, keys: Any, key_heads: Any, group: Any, depth: int, lines: Any) -> Any:
    """How many s32: counters; with segments or a mask, the key ranges that queries see.

    If keys are split, for each part a result and two numbers for each query: their presence tells the handler.

    Args:
      lines: batches, or batches and heads, that may see different keys; 0: there are no segments and no mask.
    """
    total = 4 + (_reach(lines, queries) if _is_some(lines) else 0)
    splits = key_splits(batch, key_heads, queries * group, keys, depth)
    return total + splits * batch * queries * key_heads * group * (depth + 2) if splits else total


def backward_workspace(batch: Any, heads: Any, queries: Any, keys: Any, depth: int, lines: Any) -> Any:
    """How many s32: two numbers a query; with segments or a mask ranges, too.

    Up to depth 128 also the query's gradient in f32 and counters.
    """
    padded, block = (64, 128) if depth <= 64 else (128, 64) if depth <= 128 else (0, 64)
    blocks = _blocks(queries, block)
    total = batch * heads * blocks * block * (padded + 2) + _rounded(2 * batch * heads * blocks) + 4
    if _is_some(lines):
        total = total + _reach(lines, queries) + _reach(lines, keys)
        if depth <= 128:
            total = total + _rounded(2 * lines * blocks) + _rounded(2 * lines * _blocks(keys, 128))
    return total

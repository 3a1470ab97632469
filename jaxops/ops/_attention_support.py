"""Which calls the attention kernels take, and the workspaces that they want."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxops._device import local_device

#: The dtypes that have kernels.
DTYPES = ("bfloat16", "float16")

#: Depths are multiples of the first, up to the second.
DEPTH_STEP, MAX_DEPTH = 8, 128

#: The compute capability that the kernels are compiled for.
CAPABILITY = "9.0"

#: Whether there is a kernel for the gradient of a bias.
BIAS_GRADIENT = False


def why_not(operands: Mapping[str, Any], wants_bias: bool = False) -> str | None:
    """Why a call has no kernel, whatever the device; None: it has one.

    Args:
      operands: arrays or types by name: query [batch, queries, key heads, group, depth], key and value [batch, keys,
        key heads, depth]; others, where there are any.
      wants_bias: whether the gradient of a bias is wanted.
    """
    query, value = operands["query"], operands["value"]
    if query.dtype.name not in DTYPES:
        return f"there is no attention kernel for {query.dtype}"
    depth, features = query.shape[-1], value.shape[-1]
    if features != depth:
        return f"the attention kernels take values of the keys' depth, got {features} and {depth}"
    if depth % DEPTH_STEP or depth > MAX_DEPTH:
        return f"the attention kernels take multiples of {DEPTH_STEP} up to {MAX_DEPTH} as the depth, got {depth}"
    if any(isinstance(d, int) and d >= 2**31 for x in operands.values() for d in x.shape):
        return "the attention kernels take axes below 2^31"
    if wants_bias and not BIAS_GRADIENT:
        return "there is no kernel for the gradient of a bias"
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


def forward_workspace(batch: Any, queries: Any, keys: Any, segments: bool) -> Any:
    """How many s32: two counters; with segments the ranges of blocks of tokens, and of the keys that they see."""
    if not segments:
        return 4
    return 4 + 2 * batch * (_blocks(queries, 16) + _blocks(keys, 16)) + 4 * batch * _blocks(queries, 64)


def backward_workspace(batch: Any, heads: Any, queries: Any, keys: Any, depth: int, segments: bool) -> Any:
    """How many s32: the query's gradient in f32, two numbers a query, counters; with segments ranges, too."""
    padded, block = (64, 128) if depth <= 64 else (128, 64)
    blocks = _blocks(queries, block)
    total = batch * heads * blocks * block * padded + 2 * batch * heads * 128 * _blocks(queries, 128)
    total = total + _rounded(2 * batch * heads * blocks) + 4
    if segments:
        total = total + _rounded(2 * batch * (_blocks(queries, 16) + _blocks(keys, 16)))
        total = total + 4 * batch * (blocks + _blocks(keys, 128) + _blocks(keys, 64))
    return total

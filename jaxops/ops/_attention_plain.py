"""Attention in plain JAX, by tiles of queries and keys: its values, gradients and tangents, without a [T, T] array.

Each pass computes every tile of logits when it needs it, from queries and keys, and the weights from their row's
logsumexp (Dao et al., FlashAttention, 2022). Sums over tiles are linear in the accumulators, except in the forward
pass, through which no derivative goes; each tile is under `jax.checkpoint`. So derivatives of any order keep only a few
numbers a token, too.

Arrays are [batch, queries, key heads, group, depth] and [batch, keys, key heads, depth]; accumulators have the heads
before the tokens. All sums are in f32 (f64 for f64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._rows import accumulator, sum_to
from jaxops._sharding import vary_alike

#: Operands or results by name; None where absent.
Named = dict[str, "jax.Array | None"]


class Call(NamedTuple):
    """The computation of an attention: everything except its operands.

    logits = cap(scale <query, key>) + bias, with cap(x) = soft_cap tanh(x / soft_cap) unless soft_cap is 0. Query i
    sees the keys j that mask, lengths and segments leave it, with j <= i if causal, i - left <= j <= i + right for
    window = (left, right), in which -1 is no limit.

    precision: the precision of f32 products. xla: the caller asked for XLA's operations. unseen_mean: a query that sees
    no key gets the mean of all values, otherwise 0. rounds_bias: the bias's gradient has query's dtype, otherwise the
    accumulator's.
    """

    scale: float
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    soft_cap: float = 0.0
    precision: Any = None
    xla: bool = False
    unseen_mean: bool = False
    rounds_bias: bool = False

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """The first and the last key that a query sees, counted from its own position; None: no limit."""
        left, right = (None if side < 0 else side for side in self.window)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return (None if left is None else -left), right

    @property
    def positional(self) -> bool:
        """Whether positions decide which keys are seen."""
        return self.limits != (None, None)


# Tiles

#: The most tokens whose logits are computed all at once.
WHOLE = 1024


def _block(tokens: int, matrices: Any) -> int:
    """The tile size along an axis with so many tokens."""
    many = matrices if isinstance(matrices, int) else 1
    return min(tokens, 512 if many <= 256 else 256 if many <= 1024 else 128)


class _Tiles:
    """A call's tiles of queries and keys that may be seen."""

    def __init__(self, call: Call, x: Named):
        self.call, self.x = call, x
        self.batch, self.queries, self.heads, self.group, _ = x["query"].shape
        self.keys = x["key"].shape[1]
        sizes = (self.queries, self.keys)
        # Symbolic sizes, as in exported functions, have no tiles.
        whole = any(not isinstance(size, int) for size in sizes) or max(sizes) <= WHOLE
        matrices = self.batch * self.heads * self.group
        self.blocks = sizes if whole else tuple(_block(size, matrices) for size in sizes)
        if not whole and self.queries == self.blocks[0]:  # few queries: longer key tiles
            self.blocks = (self.queries, min(self.keys, 512 * max(1, 512 // max(self.queries, 1))))
        self.wide = accumulator(x["query"].dtype)

    def _of_rows(self, xp: Any, counts: tuple[int, int]) -> tuple[Any, Any]:
        """For each row of tiles, the first tile with a visible key, and how many there are."""
        (rows, columns), (first, last) = self.blocks, self.call.limits
        if self.x.get("query_offset") is not None:
            first = last = None
        start = xp.arange(counts[0]) * rows
        low = start * 0 if first is None else xp.clip((start + first) // columns, 0, counts[1])
        if last is None:
            high = start * 0 + counts[1]
        else:
            end = xp.minimum(start + rows, self.queries) - 1
            high = xp.clip((end + last) // columns + 1, 0, counts[1])
        return low, xp.maximum(high - low, 0)

    def total(self, step: Callable[[Named, _Tile], Named], carry: Named) -> Named:
        """step over all tiles."""
        if 0 in (self.queries, self.keys):
            return carry
        like = self.x["query"]  # inside shard_map the carried values must vary as the added ones do
        carry = {name: vary_alike([value, like])[0] for name, value in carry.items()}
        if self.blocks == (self.queries, self.keys):
            return step(carry, _Tile(self, 0, 0))

        @jax.checkpoint
        def body(carry, pair):
            return step(carry, _Tile(self, *pair)), None

        counts = tuple(-(-size // block) for size, block in zip((self.queries, self.keys), self.blocks, strict=True))
        number = jnp.arange(int(np.sum(self._of_rows(np, counts)[1])))
        # Not from a table: a function lowered through custom_partitioning may have no constants.
        low, many = self._of_rows(jnp, counts)
        ends = jnp.cumsum(many)
        i = jnp.sum(number[:, None] >= ends[None], 1)
        return lax.scan(body, carry, (i, number - (ends - many - low)[i]))[0]

    def zeros(self, name: str) -> jax.Array:
        """An accumulator for a result with an operand's shape, heads first."""
        return jnp.zeros_like(_heads_first(self.x[name]), self.wide)

    def einsum(self, subscripts: str, *operands: jax.Array) -> jax.Array:
        wide = (x.astype(self.wide) for x in operands)
        return jnp.einsum(subscripts, *wide, precision=self.call.precision)


def _heads_first(x: jax.Array) -> jax.Array:
    """[batch, tokens, heads..., depth] with the tokens behind the heads."""
    return jnp.moveaxis(x, 1, -2)


def heads_last(x: jax.Array) -> jax.Array:
    """[batch, heads..., tokens, depth] with the tokens before the heads."""
    return jnp.moveaxis(x, -2, 1)


class _Tile:
    """One tile. An axis' last tiles begin early enough to be whole; entries that another tile covers are not seen in
    them."""

    def __init__(self, tiles: _Tiles, i: Any, j: Any):
        self.tiles, self.x, self.call = tiles, tiles.x, tiles.call
        self._rows, self.own_queries = self._range(i, tiles.queries, tiles.blocks[0])
        self._columns, self.own_keys = self._range(j, tiles.keys, tiles.blocks[1])
        self.valid_queries = self._below(self.own_queries, self._rows, "query_lengths")
        self.valid_keys = self._below(self.own_keys, self._columns, "key_value_lengths")

    def _range(self, number, size, block):
        """The positions [block], and which are this tile's; None: all."""
        if block is size or block == size:
            return jnp.arange(size), None
        start = jnp.minimum(number * block, size - block)
        positions = start + jnp.arange(block)
        return positions, None if size % block == 0 else positions >= number * block

    def _below(self, own, positions, name) -> jax.Array | None:
        """[batch or 1, block]: which positions are this tile's and below the lengths; None: all."""
        own = None if own is None else own[None]
        lengths = self.x.get(name)
        if lengths is None:
            return own
        below = positions[None] < lengths[:, None]
        return below if own is None else below & own

    def _part(self, x, axis, positions, whole):
        if x.shape[axis] != whole or positions.shape[0] == whole:
            return x
        return lax.dynamic_slice_in_dim(x, positions[0], positions.shape[0], axis)

    def queries(self, x: jax.Array, axis: int = 1, clean: bool = True) -> jax.Array:
        """This tile's part of an array along its query axis; 0 beyond the lengths, where operands may hold anything."""
        x = self._part(x, axis, self._rows, self.tiles.queries)
        return _cleaned(x, self.valid_queries, axis) if clean else x

    def keys(self, x: jax.Array, axis: int = 1, clean: bool = True) -> jax.Array:
        """The same along its key axis."""
        x = self._part(x, axis, self._columns, self.tiles.keys)
        return _cleaned(x, self.valid_keys, axis) if clean else x

    def put(self, x: jax.Array, part: jax.Array, axes: dict[int, str]) -> jax.Array:
        """x with its part in this tile replaced; axes: the query and key axes; an axis of size 1 is whole."""
        if x.shape == part.shape:
            return part
        starts = [jnp.int32(0)] * x.ndim
        for axis, kind in axes.items():
            starts[axis] = (self._rows if kind == "queries" else self._columns)[0].astype(np.int32)
        return lax.dynamic_update_slice(x, part, starts)

    def of_logits(self, x: jax.Array) -> jax.Array:
        """The part of an array that broadcasts to [batch, heads, group, queries, keys]."""
        return self.keys(self.queries(x, 3, clean=False), 4, clean=False)

    def visible(self) -> jax.Array | None:
        """Which logits are seen: broadcasts to their shape; None: all."""
        found = []
        if self.valid_queries is not None:
            found.append(self.valid_queries[:, None, None, :, None])
        if self.valid_keys is not None:
            found.append(self.valid_keys[:, None, None, None, :])
        if self.x.get("mask") is not None:
            found.append(self.of_logits(self.x["mask"]))
        if self.x.get("query_segments") is not None:
            query = self.queries(self.x["query_segments"], clean=False)[:, None, None, :, None]
            found.append(query == self.keys(self.x["key_value_segments"], clean=False)[:, None, None, None, :])
        first, last = self.call.limits
        offset = self.x.get("query_offset")
        rows = (self._rows if offset is None else self._rows + offset[0])[None, None, None, :, None]
        columns = self._columns[None, None, None, None, :]
        if first is not None:
            found.append(columns >= rows + first)
        if last is not None:
            found.append(columns <= rows + last)
        if not found:
            return None
        total = found[0]
        for one in found[1:]:
            total = total & one
        return total

    def scores(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """scale <query, key>."""
        return self.tiles.einsum("btkgd,bskd->bkgts", query, key) * self.call.scale

    def logits(self) -> tuple[jax.Array, jax.Array | None]:
        """The logits, -inf where nothing is seen; and their derivative by the capped score, None: 1."""
        x = self.scores(self.queries(self.x["query"]), self.keys(self.x["key"]))
        slope = None
        if cap := self.call.soft_cap:
            x = jnp.tanh(x / cap)
            x, slope = x * cap, 1 - x * x
        if self.x.get("bias") is not None:
            x = x + self.of_logits(self.x["bias"]).astype(x.dtype)
        visible = self.visible()
        return x if visible is None else jnp.where(visible, x, -jnp.inf), slope

    def weights(self) -> tuple[jax.Array, jax.Array | None]:
        """exp(logits - logsumexp), 0 where nothing is seen, and the slope of `logits`."""
        z, slope = self.logits()
        sums = self._of_rows("lse")
        sums = jnp.where(sums == -jnp.inf, 0, sums)
        if "maximum" in self.x:  # the derivative goes through the logsumexp
            z = z - lax.stop_gradient(self._of_rows("maximum")) - lax.stop_gradient(self._of_rows("log_sum"))
            sums = sums - lax.stop_gradient(sums)
        return jnp.exp(jnp.where(z == -jnp.inf, z, z - sums)), slope

    def _of_rows(self, name: str) -> jax.Array:
        return self.queries(self.x[name], 3, clean=False)[..., None]


def _cleaned(x: jax.Array, valid: jax.Array | None, axis: int) -> jax.Array:
    if valid is None:
        return x
    shape = [1] * x.ndim
    shape[0], shape[axis] = valid.shape
    return jnp.where(valid.reshape(shape), x, jnp.zeros((), x.dtype))


def _added(tile: _Tile, total: jax.Array, part: jax.Array, kind: str) -> jax.Array:
    """The accumulator, heads first, plus this tile's part."""
    axis = total.ndim - 2
    old = (tile.queries if kind == "queries" else tile.keys)(total, axis, clean=False)
    return tile.put(total, old + part, {axis: kind})


# Queries that see no key


def within(lengths: jax.Array, count: int) -> jax.Array:
    """Which of `count` positions are within each sequence's length, [batch, count]."""
    return jnp.arange(count)[None] < lengths[:, None]


def _unseen(x: Named, sums: jax.Array) -> jax.Array:
    """The queries within the lengths that see no key, [batch, queries, key heads, group, 1]."""
    nothing = sums == -jnp.inf
    if x.get("query_lengths") is not None:
        nothing = nothing & within(x["query_lengths"], sums.shape[-1])[:, None, None, :]
    return jnp.moveaxis(nothing, -1, 1)[..., None]


def mean_of_values(value: jax.Array) -> jax.Array:
    """The mean over the keys, [batch, keys, key heads, features] to [batch, 1, key heads, 1, features]."""
    mean = jnp.mean(value, 1, keepdims=True, dtype=accumulator(value.dtype)).astype(value.dtype)
    return mean[:, :, :, None]


# The forward pass


def forward(call: Call, x: Named) -> dict[str, jax.Array]:
    """The result "out" [batch, queries, key heads, group, features]; for each row of logits the logsumexp "lse" and its
    parts, "maximum" and "log_sum", all [batch, key heads, group, queries].
    """
    tiles = _Tiles(call, x)
    wide = tiles.wide
    rows = (tiles.batch, tiles.heads, tiles.group, tiles.queries)
    features = x["value"].shape[-1]
    if x.get("sinks") is None:
        largest, total = jnp.full(rows, -jnp.inf, wide), jnp.zeros(rows, wide)
    else:  # one more logit for each row, without a value
        largest = jnp.broadcast_to(x["sinks"].astype(wide)[..., None], rows)
        total = jnp.where(largest == -jnp.inf, 0, jnp.ones(rows, wide))
    carry = {"max": largest, "sum": total, "out": jnp.zeros((*rows, features), wide)}

    def step(carry, tile):
        z, _ = tile.logits()
        value = tile.keys(x["value"])
        old = {
            "max": tile.queries(carry["max"], 3, clean=False),
            "sum": tile.queries(carry["sum"], 3, clean=False),
            "out": tile.queries(carry["out"], 3, clean=False),
        }
        largest = jnp.maximum(old["max"], jnp.max(z, -1))
        finite = jnp.where(largest == -jnp.inf, 0, largest)
        weights = jnp.exp(z - finite[..., None])
        kept = jnp.exp(old["max"] - finite)
        new = {
            "max": largest,
            "sum": old["sum"] * kept + jnp.sum(weights, -1),
            "out": old["out"] * kept[..., None] + tiles.einsum("bkgts,bske->bkgte", weights, value),
        }
        return {name: tile.put(carry[name], new[name], {3: "queries"}) for name in carry}

    carry = tiles.total(step, carry)
    nothing = carry["sum"] == 0
    if x.get("query_lengths") is not None:
        nothing = nothing | ~within(x["query_lengths"], tiles.queries)[:, None, None, :]
    total = jnp.where(nothing, 1, carry["sum"])
    maximum, log_sum = jnp.where(nothing, 0, carry["max"]), jnp.log(total)
    lse = jnp.where(nothing, -jnp.inf, maximum + log_sum)
    out = heads_last(carry["out"] / total[..., None]).astype(x["query"].dtype)
    if call.unseen_mean:
        out = jnp.where(_unseen(x, lse), mean_of_values(x["value"]), out)
    return {
        "out": out,
        "lse": lse,
        "maximum": maximum,
        "log_sum": log_sum,
    }


# Its derivatives


def backward(call: Call, x: Named, wants_bias: bool) -> list[jax.Array]:
    """The gradients for query, key, value and, if wanted, bias.

    From the operands of `forward`, its results "out" and "lse" (beside a bias also the parts), and their cotangents
    "dout" and "dlse" (or None): ds = p (<dout, value> - <dout, out> + dlse), p = exp(logits - lse).
    """
    tiles = _Tiles(call, x)
    wide = tiles.wide
    delta = jnp.einsum("btkge,btkge->bkgt", x["out"].astype(wide), x["dout"].astype(wide))
    delta = delta if x.get("dlse") is None else delta - x["dlse"].astype(wide)
    carry = {"dquery": tiles.zeros("query"), "dkey": tiles.zeros("key"), "dvalue": tiles.zeros("value")}
    if wants_bias:
        carry["dbias"] = jnp.zeros(x["bias"].shape, wide)

    def step(carry, tile):
        p, slope = tile.weights()
        dout, value = tile.queries(x["dout"]), tile.keys(x["value"])
        dp = tiles.einsum("btkge,bske->bkgts", dout, value)
        ds = jnp.where(p == 0, 0, p * (dp - tile.queries(delta, 3)[..., None]))
        new = {}
        if wants_bias:
            part = sum_to(ds, tile.of_logits(x["bias"]).shape)
            new["dbias"] = tile.put(carry["dbias"], tile.of_logits(carry["dbias"]) + part, {3: "queries", 4: "keys"})
        ds = ds * call.scale if slope is None else ds * slope * call.scale
        query, key = tile.queries(x["query"]), tile.keys(x["key"])
        new["dquery"] = _added(tile, carry["dquery"], tiles.einsum("bkgts,bskd->bkgtd", ds, key), "queries")
        new["dkey"] = _added(tile, carry["dkey"], tiles.einsum("bkgts,btkgd->bksd", ds, query), "keys")
        new["dvalue"] = _added(tile, carry["dvalue"], tiles.einsum("bkgts,btkge->bkse", p, dout), "keys")
        return {name: new[name] for name in carry}

    carry = tiles.total(step, carry)
    if call.unseen_mean:
        dmean = jnp.sum(x["dout"], (1, 3), wide, where=_unseen(x, x["lse"]))
        carry["dvalue"] = carry["dvalue"] + dmean[:, :, None] / tiles.keys
    names = {"dquery": "query", "dkey": "key", "dvalue": "value"}
    found = [heads_last(carry[name]).astype(x[of].dtype) for name, of in names.items()]
    if not wants_bias:
        return found
    return [*found, carry["dbias"].astype(x["query"].dtype) if call.rounds_bias else carry["dbias"]]


def tangent(call: Call, x: Named) -> tuple[jax.Array, jax.Array]:
    """The tangents of `forward`'s results, from its operands and results and the tangents "dquery", "dkey", ....

    dlse = sum(p ds), dout = sum(p ds value) + sum(p dvalue) - out dlse, in which a sink is a key without a value.
    """
    if x.get("bias") is not None:  # the parts again: a GPU kernel's have another unit and other roundings
        found = forward(call, jax.tree.map(lax.stop_gradient, x))
        x = x | {name: found[name] for name in ("maximum", "log_sum")}
    tiles = _Tiles(call, x)
    wide = tiles.wide
    sums = x["lse"].astype(wide)
    carry = {"dlse": jnp.zeros(sums.shape, wide), "dout": tiles.zeros("out")}

    def step(carry, tile):
        p, slope = tile.weights()
        query, key, value = tile.queries(x["query"]), tile.keys(x["key"]), tile.keys(x["value"])
        terms = []
        if x.get("dquery") is not None:
            terms.append(tile.scores(tile.queries(x["dquery"]), key))
        if x.get("dkey") is not None:
            terms.append(tile.scores(query, tile.keys(x["dkey"])))
        ds = sum(terms) if terms else None
        ds = ds if ds is None or slope is None else ds * slope
        if x.get("dbias") is not None:
            dbias = tile.of_logits(x["dbias"]).astype(wide)
            ds = dbias if ds is None else ds + dbias
        dlse, dout = carry["dlse"], carry["dout"]
        if ds is not None:
            ds = jnp.where(p == 0, 0, p * ds)
            old = tile.queries(dlse, 3, clean=False)
            dlse = tile.put(dlse, old + jnp.sum(ds, -1), {3: "queries"})
            dout = _added(tile, dout, tiles.einsum("bkgts,bske->bkgte", ds, value), "queries")
        if x.get("dvalue") is not None:
            dvalue = tile.keys(x["dvalue"])
            dout = _added(tile, dout, tiles.einsum("bkgts,bske->bkgte", p, dvalue), "queries")
        return {"dlse": dlse, "dout": dout}

    carry = tiles.total(step, carry)
    dlse = carry["dlse"]
    if x.get("dsinks") is not None:
        dlse = dlse + sink_weights(x["sinks"], sums) * x["dsinks"].astype(wide)[..., None]
    out = heads_last(carry["dout"]) - x["out"].astype(wide) * jnp.moveaxis(dlse, -1, 1)[..., None]
    if call.unseen_mean:
        mean = 0 if x.get("dvalue") is None else mean_of_values(x["dvalue"]).astype(wide)
        out = jnp.where(_unseen(x, sums), mean, out)
    return out.astype(x["out"].dtype), dlse


def sink_weights(sinks: jax.Array, sums: jax.Array) -> jax.Array:
    """The sinks' share of each row [batch, heads, group, queries]; sinks are [batch or 1, heads, group]."""
    z = sinks.astype(sums.dtype)[..., None] - jnp.where(sums == -jnp.inf, 0, sums)
    return jnp.where(sums == -jnp.inf, 0, jnp.exp(z))


def sink_gradient(x: Named) -> jax.Array:
    """The sinks' gradient, from the operands of `backward`: sum(p_sink (dlse - <dout, out>))."""
    wide = x["lse"].dtype
    inner = jnp.einsum("btkge,btkge->bkgt", x["out"].astype(wide), x["dout"].astype(wide))
    moved = -inner if x.get("dlse") is None else x["dlse"] - inner
    if x.get("query_lengths") is not None:
        moved = jnp.where(within(x["query_lengths"], moved.shape[-1])[:, None, None, :], moved, 0)
    total = jnp.sum(sink_weights(x["sinks"], x["lse"]) * moved, -1)
    return sum_to(total, x["sinks"].shape)


def logits_count(call: Call, queries: int, keys: int) -> int:
    """How many of a head's logits positions leave visible."""
    first, last = call.limits
    rows = np.arange(queries)
    low = 0 if first is None else np.clip(rows + first, 0, keys)
    high = keys if last is None else np.clip(rows + last + 1, 0, keys)
    return int(np.sum(np.maximum(high - low, 0) * np.ones(queries, np.int64)))

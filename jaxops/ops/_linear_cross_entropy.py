"""The kernels of linear_cross_entropy: a chunk of tokens at a time, from hidden states to values and gradients."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad

from jaxops._device import local_device
from jaxops._kernel import Kernel, jvp_of_linear, why_no_handler
from jaxops._rows import accumulator
from jaxops._sharding import Layout
from jaxops.ops import _cross_entropy as kernels
from jaxops.ops import _matmul_choice as choices
from jaxops.ops._matmul_kernel import has_algorithm

#: A chunk's logits: at most so many tokens and so many bytes, unless they replace w's f32 sums (see `_run`). Each chunk
#: reads and writes w's f32 gradient once. On an H200, 8192 tokens of width 4096 and 128256 columns take 43.4 ms in
#: chunks of 1664 tokens, 41.5 in chunks of 2048, and 41.3 in chunks of 2736.
CHUNK_TOKENS, CHUNK_BYTES = 2048, 512 << 20

#: Sizes of chunks, but the first one's, are multiples of this many tokens where they can be, which suits products'
#: tiles.
TOKEN_STEP = 256

#: On these platforms, logits have a multiple of this many columns. Else XLA pads each chunk's logits, and takes the
#: padding off again, around each product: for BERT's vocabulary of 30522 this took as long as half a product.
PADDED_ON, COLUMN_STEP = ("cuda",), 8

#: From so many tokens on, one kernel on Hopper's tensor cores multiplies and reduces the logits in a forward pass that
#: computes no gradients. Fewer tokens leave most of its tiles empty.
LEAST_TOKENS_AT_ONCE = 128


VALUES = ("origin", "total", "picked", "sum")


class Spec(NamedTuple):
    """The parameters of a kernel's call.

    has: the optional operands that are given. results: the optional results that are wanted. transposed: w is
    [vocabulary, width]. tokens: a chunk's most tokens; None: as CHUNK_TOKENS and CHUNK_BYTES say. padded: logits have a
    multiple of COLUMN_STEP columns. on_gpu: Hopper's kernel may run. The lowering sets both. columns: the vocabulary
    before w's rows were padded, if that kernel runs; otherwise 0. rounded: the product that is w's gradient is rounded
    to x's dtype, as nothing is added to it.
    """

    has: tuple[str, ...]
    results: tuple[str, ...]
    transposed: bool
    cap: float
    z_loss: float
    tokens: int | None
    precision: Any
    padded: bool = False
    on_gpu: bool = False
    columns: int = 0
    rounded: bool = False


def _chunk_sizes(tokens: int, columns: int, itemsize: int, wanted: int | None) -> tuple[int, int]:
    """The tokens in the first chunk and in each other one."""
    if not isinstance(tokens, int):  # symbolic
        return tokens, tokens
    fitting = CHUNK_BYTES // max(columns * itemsize, 1) if isinstance(columns, int) else CHUNK_TOKENS
    most = wanted or max(TOKEN_STEP, min(CHUNK_TOKENS, fitting // TOKEN_STEP * TOKEN_STEP))
    count = math.ceil(tokens / most)
    if count <= 1:
        return tokens, tokens
    # Two chunks would be a loop with one step, which XLA unrolls. It then holds both chunks' logits at once, and adds
    # their gradients of w in a third array: 3.0 GiB instead of 1.4 for 4096 tokens of width 4096 and 128256 columns.
    count = 3 if count == 2 and tokens > 2 else count
    for step in (TOKEN_STEP >> i for i in range(TOKEN_STEP.bit_length())):
        size = math.ceil(math.ceil(tokens / count) / step) * step
        first = tokens - (count - 1) * size
        # A few chunks have about the same size; among many, a small first one costs little.
        if size <= most and first > 0 and (count > 8 or step == 1 or 2 * first >= size):
            return first, size
    return 2, 1  # four tokens in three chunks


def _over_chunks(body, arrays, first: int, size: int):
    """body(*chunks) -> (results that are summed over the chunks in their order, results with a row a token), for all
    tokens.

    The first chunk begins the sums, so that nothing is added to zeros.
    """
    tokens = arrays[0].shape[0]
    sums, rows = body(*(x[:first] for x in arrays))
    if first == tokens:
        return sums, rows
    rows = [jnp.pad(x, [(0, tokens - first), *[(0, 0)] * (x.ndim - 1)]) for x in rows]

    def step(carry, start):
        more, new = body(*(lax.dynamic_slice_in_dim(x, start, size) for x in arrays))
        sums, rows = carry
        sums = [a + b for a, b in zip(sums, more, strict=True)]
        rows = [lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(rows, new, strict=True)]
        return (sums, rows), None

    starts = first + size * lax.iota(np.int32, (tokens - first) // size)
    return lax.scan(step, (sums, rows), starts)[0]


class _Linear(Kernel):
    """A kernel: its operands and results, and the computation on a chunk of tokens.

    Slots have a kind: "x", hidden states [tokens..., width]; "w", the weights; "bias", [vocabulary]; "token", one value
    a token. `?` marks optional ones.
    """

    split_by_local = True
    handler = "cross_entropy_fwd"
    linear: tuple[str, ...] = ()
    pads = True  # whether `chunk` can leave out columns
    in_place = False  # whether the logits' gradient takes their place

    def __init__(self, name: str, slots: str, **options: Any):
        super().__init__(name, **{"target": False, **options})
        operands, results = ([part.split(":") for part in side.split()] for side in slots.split("->"))
        self.operands = [(name, kind.strip("?"), "?" in kind) for name, kind in operands]
        self.results = [(name, kind.strip("?"), "?" in kind) for name, kind in results]

    def __call__(self, named: dict[str, Any], spec: Spec) -> dict[str, jax.Array]:
        """From the operands by name to the results by name."""
        given = [named.get(name) for name, _, _ in self.operands]
        has = tuple(n for (n, _, optional), x in zip(self.operands, given, strict=True) if optional and x is not None)
        spec = spec._replace(has=has, results=tuple(n for n, _, o in self.results if o and n in spec.results))
        out = self.bind(*(x for x in given if x is not None), spec=spec)
        return dict(zip(self._there(spec)[1], out, strict=True))

    def _there(self, spec: Spec) -> tuple[dict[str, str], dict[str, str]]:
        """The operands and the results that are there, with their kinds."""
        operands = {name: kind for name, kind, optional in self.operands if not optional or name in spec.has}
        return operands, {name: kind for name, kind, optional in self.results if not optional or name in spec.results}

    def _named(self, operands, spec: Spec) -> dict[str, Any]:
        given = dict(zip(self._there(spec)[0], operands, strict=True))
        return {name: given.get(name) for name, _, _ in self.operands}

    def abstract(self, *operands, spec: Spec) -> list[ShapedArray]:
        named = self._named(operands, spec)
        x, w, bias = named["x"], named["w"], named["bias"]
        types = {"x": x, "w": w, "bias": bias}
        token = ShapedArray(x.shape[:-1], accumulator(x.dtype))
        return [
            token if kind == "token" else ShapedArray(types[kind].shape, types[kind].dtype)
            for kind in self._there(spec)[1].values()
        ]

    def layout(self, *operands, spec: Spec) -> Layout:
        tokens = [f"t{i}" for i in range(operands[0].ndim - 1)]
        matrix = ["v", "d"] if spec.transposed else ["d", "v"]
        names = {"x": [*tokens, "d"], "w": matrix, "bias": ["v"], "token": tokens}
        return Layout.of(*([names[kind] for kind in side.values()] for side in self._there(spec)))

    def chunk(self, how, over, named: dict[str, Any], spec: Spec):
        """For a chunk of tokens: sums by name, and the tokens' values by name."""
        raise NotImplementedError

    def at_once(self, how, x, w, spec: Spec) -> bool:
        """Whether one kernel multiplies and reduces tokens x [tokens, width], without logits in memory."""
        del how, x, w, spec
        return False

    def _run(self, how: str | None, shards: dict[str, tuple[str, ...]], operands, spec: Spec) -> list[jax.Array]:
        """In one device's program; shards: see `partitioned`. how: see `kernels._Kernel.call`."""
        named, (there, results) = self._named(operands, spec), self._there(spec)
        over, over_width = shards.get("v", ()), shards.get("d", ())
        over_tokens = tuple(axis for name, axes in shards.items() if name.startswith("t") for axis in axes)
        width_axis = {"x": -1, "w": 1 if spec.transposed else 0}
        if over_width:  # logits are not summed over devices: the width is gathered
            for name, kind in there.items():
                if kind in width_axis:
                    axis = width_axis[kind] % named[name].ndim
                    named[name] = lax.all_gather(named[name], over_width, axis=axis, tiled=True)
        x, w, shape = named["x"], named["w"], named["x"].shape[:-1]
        tokens = math.prod(shape) if all(isinstance(d, int) for d in shape) else x.reshape(-1, x.shape[-1]).shape[0]
        columns = w.shape[0 if spec.transposed else 1]
        sizes = _chunk_sizes(tokens, columns, x.dtype.itemsize, spec.tokens)
        wide = accumulator(x.dtype)
        static = isinstance(tokens, int) and isinstance(x.shape[-1], int)
        if "dw" in spec.results and w.dtype == x.dtype != wide and not over_tokens and static:
            # Few tokens' logits and their gradient take no more memory than w's f32 sums beside its 16-bit gradient.
            arrays = 1 if self.in_place and not over else 2
            if spec.tokens is None and arrays * tokens * x.dtype.itemsize <= x.shape[-1] * wide.itemsize:
                sizes = tokens, tokens
            spec = spec._replace(rounded=sizes[0] == tokens)
        by_token = {"x": lambda x: x.reshape(tokens, x.shape[-1]), "token": lambda x: x.reshape(tokens, 1)}
        flat = {n: by_token[kind](named[n]) for n, kind in there.items() if kind in by_token}
        shared = {n: x for n, x in named.items() if n not in flat}
        for name, kind in there.items():  # products are x's dtype's
            if kind == "w":
                shared[name] = shared[name].astype(x.dtype)
        if self.at_once(how, flat["x"], shared["w"], spec):
            spec = spec._replace(columns=columns)
            # A chunk's summaries take no more memory than its logits would elsewhere.
            most = CHUNK_BYTES // (4 * len(VALUES) * -(-columns // choices.LINEAR_LOSS_TILE.columns))
            sizes = _chunk_sizes(tokens, columns, x.dtype.itemsize, spec.tokens or max(TOKEN_STEP, most))
            if columns % COLUMN_STEP and not spec.transposed:  # rows of whole 16 bytes
                shared["w"] = jnp.pad(shared["w"], [(0, 0), (0, -columns % COLUMN_STEP)])
        elif spec.padded and not over and isinstance(columns, int) and columns % COLUMN_STEP:
            shared |= _padded(shared, columns, spec)
            labels = kernels.from_first(flat["labels"], columns)
            flat["labels"] = jnp.where((labels >= 0) & (labels < columns), labels, kernels.NO_LABEL)
        order: list[list[str]] = []

        def body(*chunks):
            sums, rows = self.chunk(how, over, {**shared, **dict(zip(flat, chunks, strict=True))}, spec)
            order[:] = [*sums], [*rows]
            return [*sums.values()], [*rows.values()]

        if how is None:  # derivatives of this body keep no chunk's logits
            body = jax.checkpoint(body)
        sums, rows = _over_chunks(body, [*flat.values()], *sizes)
        sums = lax.psum(sums, over_tokens) if over_tokens and sums else sums
        found = dict(zip(order[0], sums, strict=True)) | dict(zip(order[1], rows, strict=True))
        out = []
        given = [x for x in named.values() if x is not None]
        for (name, kind), like in zip(results.items(), self.abstract(*given, spec=spec), strict=True):
            value = found[name]
            if kind == "x" and over:
                value = lax.psum(value, over)
            if kind in ("w", "bias"):
                axis = 0 if kind == "bias" or spec.transposed else 1
                value = lax.slice_in_dim(value, 0, columns, axis=axis)
            value = value.reshape(like.shape).astype(like.dtype)
            if over_width and kind in width_axis:
                axis = width_axis[kind] % value.ndim
                part = value.shape[axis] // lax.psum(1, over_width)
                value = lax.dynamic_slice_in_dim(value, lax.axis_index(over_width) * part, part, axis)
            out.append(value)
        return out

    def _lower(self, platform: str, *operands, spec: Spec):
        spec = spec._replace(padded=self.pads and platform in PADDED_ON, on_gpu=platform == "cuda")
        return super()._lower(platform, *operands, spec=spec)

    def plain(self, *operands, spec: Spec) -> list[jax.Array]:
        return self._run(None, {}, operands, spec)

    def call_target(self, *operands, spec: Spec) -> list[jax.Array]:
        return self._run("call_target", {}, operands, spec)

    def local(self, run, shards, scatter, *operands, spec: Spec) -> list[jax.Array]:
        del scatter
        return self._run(run.__name__, shards, operands, spec)

    def flops(self, x, w, *_, spec: Spec) -> int:
        products = {"linear_cross_entropy_fwd": 1, "linear_cross_entropy_jvp": 2}.get(self.name, 3)
        return 2 * products * (x.size // x.shape[-1]) * w.size

    def batch(self, operands, dims, *, spec: Spec):
        """Another axis of tokens if no weights are mapped and their gradients are no results; else one call after the
        other."""
        there, results = self._there(spec)
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        shared = [kind in ("w", "bias") for kind in there.values()]
        moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
        if not any(s and d is not None for s, d in zip(shared, dims, strict=True)) and not (
            {"w", "bias"} & {*results.values()}
        ):
            moved = [
                x if s or d is not None else jnp.broadcast_to(x, (size, *x.shape))
                for x, s, d in zip(moved, shared, dims, strict=True)
            ]
            out = self.bind(*moved, spec=spec)
        else:
            mapped = [i for i, d in enumerate(dims) if d is not None]

            def one(values):
                given = dict(zip(mapped, values, strict=True))
                return self.bind(*(given.get(i, x) for i, x in enumerate(moved)), spec=spec)

            out = lax.map(one, [moved[i] for i in mapped])
        return out, [0] * len(out)

    def jvp(self, primals, tangents, *, spec: Spec):
        linear = [name in self.linear for name in self._there(spec)[0]]
        return jvp_of_linear(self, linear, primals, tangents, spec=spec)

    def _moving(self, values, spec: Spec) -> dict[str, Any]:
        """Tangents or cotangents by name, None for zero."""
        return {n: None if isinstance(t, ad.Zero) else t for n, t in zip(self._there(spec)[0], values, strict=True)}


def _padded(shared: dict[str, Any], columns: int, spec: Spec) -> dict[str, Any]:
    """The weights and the bias with columns of zeros, and "where", which leaves these out."""
    more = -columns % COLUMN_STEP
    found = {"where": (lax.iota(np.int32, columns + more) < columns)[None]}
    found["w"] = jnp.pad(shared["w"], [(0, more), (0, 0)] if spec.transposed else [(0, 0), (0, more)])
    return found | ({} if shared.get("bias") is None else {"bias": jnp.pad(shared["bias"], (0, more))})


def _product(x, w, spec: Spec, bias=None):
    """Logits in x's dtype."""
    contracted = 1 if spec.transposed else 0
    z = lax.dot_general(x, w, (((1,), (contracted,)), ((), ())), spec.precision, x.dtype)
    return z if bias is None else z + bias.astype(z.dtype)


def _gradients(dz, named, over, spec: Spec):
    """The chunk's terms of dw and dbias, if they are wanted, and its dx, from dz."""
    x, w, wide = named["x"], named["w"], accumulator(named["x"].dtype)
    sums, rows = {}, {}
    if "dx" in spec.results:
        contracted = 0 if spec.transposed else 1
        dtype = wide if over else x.dtype  # which is summed over devices
        rows["dx"] = lax.dot_general(dz, w, (((1,), (contracted,)), ((), ())), spec.precision, dtype)
    if "dw" in spec.results:
        pair = (dz, x) if spec.transposed else (x, dz)
        dtype = x.dtype if spec.rounded else wide
        sums["dw"] = lax.dot_general(*pair, (((0,), (0,)), ((), ())), spec.precision, dtype)
    if "dbias" in spec.results:
        sums["dbias"] = jnp.sum(dz.astype(wide), 0)
    return sums, rows


def _values(values) -> dict[str, jax.Array]:
    return {name: x for name, x in zip(VALUES, values, strict=True) if x is not None}


class _Chunk:
    """The arguments for a chunk's kernels."""

    def __init__(self, how, over, named, spec: Spec):
        self.how = how
        columns = named["w"].shape[0 if spec.transposed else 1]
        self.parts = kernels.Parts(named["labels"], columns, over) if over else None
        self.labels = self.parts.labels if over else named["labels"]
        self.logits, self.where = _product(named["x"], named["w"], spec, named["bias"]), named.get("where")
        self.params = {"axes": (1,), "cap": spec.cap}

    def forward(self, results):
        wide = accumulator(self.logits.dtype)
        wanted = ("sum",) if "sum" in results else ()
        values = kernels.forward.call(
            self.how, self.logits, self.labels, self.where, results=wanted, dtype=wide, **self.params
        )
        return self.parts.join(*values) if self.parts else values

    def backward(self, origin, dtotal, dpicked, dsum):
        operands = (self.logits, self.labels, self.where, origin, dtotal, dpicked, dsum)
        return kernels.backward.call(self.how, *operands, dtype=self.logits.dtype, **self.params)[0]

    def both(self, dlog, dpicked, dsum, z_loss):
        """dz, in the place of the logits, and the values."""
        if self.parts:
            values = self.forward(("sum",) if dsum is not None else ())
            dtotal = kernels.total_cotangent(dlog, *values[:2], z_loss)
            return self.backward(values[0], dtotal, dpicked, dsum), values
        dz, *values = kernels.forward_backward.call(
            self.how,
            *(self.logits, self.labels, self.where, dlog, dpicked, dsum),
            dtype=self.logits.dtype,
            z_loss=z_loss,
            in_place=self.how is not None,
            **self.params,
        )
        return dz, values


class _Forward(_Linear):
    """On a Hopper GPU one kernel, which reduces the product's tiles; else a product and the forward kernel a chunk."""

    def at_once(self, how, x, w, spec):
        return how == "call_target" and spec.on_gpu and self._fits(x, w, spec)

    def _fits(self, x, w, spec: Spec) -> bool:
        """Whether Hopper's kernel takes the operands, and is there."""
        tokens, width = x.shape
        columns = w.shape[0 if spec.transposed else 1]
        if not all(isinstance(size, int) for size in (tokens, width, columns)):
            return False
        there = why_no_handler(self.name, "cuda") is None and local_device().why_not_hopper() is None
        plain = x.dtype.itemsize == 2 and not has_algorithm(spec.precision)
        aligned = width % COLUMN_STEP == 0
        many = min(tokens, spec.tokens or tokens) >= LEAST_TOKENS_AT_ONCE
        return there and plain and aligned and many and max(tokens, width, columns) <= choices.MAX_MATRIX_SIZE

    def chunk(self, how, over, named, spec):
        if not spec.columns:
            return {}, _values(_Chunk(how, over, named, spec).forward(spec.results))
        x, w, labels, bias = (named[name] for name in ("x", "w", "labels", "bias"))
        columns = spec.columns
        x, w = lax.optimization_barrier((x, w))  # XLA copies a slice, which the copy engine might not take
        parts = kernels.Parts(labels, columns, over) if over else None
        labels = parts.labels if parts else labels
        tile, tokens, wanted = choices.LINEAR_LOSS_TILE, x.shape[0], "sum" in spec.results
        token = ShapedArray((tokens,), np.dtype(np.float32))
        summaries = token.update(shape=(3 if wanted else 2, -(-columns // tile.columns), tokens))
        *values, _ = self.ffi_call(
            [token] * (4 if wanted else 3) + [summaries],
            *(x, w, labels.reshape(tokens), *([] if bias is None else [bias.astype(x.dtype)])),
            transposed=spec.transposed,
            columns=np.int64(columns),
            has_bias=bias is not None,
            has_sum=wanted,
            cap=np.float64(spec.cap),
            band=np.int32(choices.band(choices.Product(tokens, columns, x.shape[1], "16bit"), tile)),
        )
        values = [value.reshape(tokens, 1) for value in values] + [None] * (not wanted)
        return {}, _values(parts.join(*values) if parts else values)

    def is_chosen(self, *_, **__) -> bool:
        return True

    def is_composed(self, platform, x, w, *_, spec) -> bool:
        x = ShapedArray((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
        return platform != "cuda" or not self._fits(x, w, spec)

    def explain(self, *_, **__) -> str:
        tile = choices.LINEAR_LOSS_TILE
        return f"on a GPU wgmma: the product's tiles, {tile.rows}x{tile.columns}, are reduced in registers"

    def jvp(self, primals, tangents, *, spec):
        out = self.bind(*primals, spec=spec)
        names = self._there(spec)[1]
        moving = {"d" + n: t for n, t in self._moving(tangents, spec).items() if t is not None}
        zeros = [ad.Zero(jax.typeof(x)) for x in out]
        if not moving:
            return out, zeros
        named = self._named(primals, spec) | {"origin": out[0]} | moving
        moved = tangent(named, spec._replace(results=tuple("d" + n for n in spec.results)))
        return out, [moved.get("d" + name, zero) for name, zero in zip(names, zeros, strict=True)]


class _Tangent(_Linear):
    """The tangents of `total`, `picked` and `sum`; its transpose is the backward kernel."""

    linear = ("dx", "dw", "dbias")
    pads = False

    def chunk(self, how, over, named, spec):
        chunk = _Chunk(how, over, named, spec)
        terms = []
        if named["dx"] is not None:
            terms.append(_product(named["dx"].astype(named["x"].dtype), named["w"], spec))
        if named["dw"] is not None:
            terms.append(_product(named["x"], named["dw"].astype(named["x"].dtype), spec))
        dz = functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(chunk.logits)
        dz = dz if named["dbias"] is None else dz + named["dbias"].astype(dz.dtype)
        origin, wanted = named["origin"], "dsum" in spec.results
        moved = kernels.plain_tangent(chunk.logits, chunk.labels, origin, dz, spec.cap)
        if over:
            moved = lax.psum(moved, over)
        total, picked, sum = moved
        return {}, {"dtotal": total, "dpicked": picked} | ({"dsum": sum} if wanted else {})

    def transpose(self, cotangents, *operands, spec):
        named = self._named(operands, spec)
        wanted = tuple(n for n in self.linear if named[n] is not None and ad.is_undefined_primal(named[n]))
        given = {n: x for n, x in named.items() if n not in self.linear}
        moving = dict(zip(self._there(spec)[1], cotangents, strict=True))
        given |= {n: jnp.zeros_like(given["origin"]) if isinstance(t, ad.Zero) else t for n, t in moving.items()}
        found = backward(given, spec._replace(results=wanted))
        return [found.get(name) for name in self._there(spec)[0]]


class _Backward(_Linear):
    """The product again, the backward kernel and the gradients' products."""

    linear = ("dtotal", "dpicked", "dsum")

    def chunk(self, how, over, named, spec):
        dz = _Chunk(how, over, named, spec).backward(*(named[n] for n in ("origin", *self.linear)))
        return _gradients(dz, named, over, spec)

    def transpose(self, cotangents, *operands, spec):
        named = self._named(operands, spec)
        given = {n: x for n, x in named.items() if n not in self.linear}
        moving = dict(zip(self._there(spec)[1], cotangents, strict=True))
        given |= {n: t for n, t in moving.items() if not isinstance(t, ad.Zero)}
        wanted = ("dsum",) if named["dsum"] is not None else ()
        found = tangent(given, spec._replace(results=wanted))
        return [found.get(name) for name in self._there(spec)[0]]


class _Both(_Linear):
    """The values, and the gradients for cotangents that are known before: three products in all."""

    in_place = True

    def chunk(self, how, over, named, spec):
        chunk = _Chunk(how, over, named, spec)
        dz, values = chunk.both(named["dlog"], named["dpicked"], named["dsum"], spec.z_loss)
        sums, rows = _gradients(dz, named, over, spec)
        return sums, rows | _values(values)

    def jvp(self, primals, tangents, *, spec):
        """The rule of the two passes that it combines."""
        named = self._named(primals, spec)
        moving = {n: t for n, t in self._moving(tangents, spec).items() if t is not None}

        def passes(*values):
            given = named | dict(zip(moving, values, strict=True))
            out = forward(given, spec)
            dtotal = kernels.total_cotangent(given["dlog"], out["origin"], out["total"], spec.z_loss)
            given |= {"origin": out["origin"], "dtotal": dtotal}
            out |= backward(given, spec)
            return [out[name] for name in self._there(spec)[1]]

        return jax.jvp(passes, [named[n] for n in moving], [*moving.values()])


_OPERANDS = "x:x w:w labels:token bias:bias?"
_GRADIENTS = "dx:x? dw:w? dbias:bias?"
forward = _Forward(
    "linear_cross_entropy_fwd",
    f"{_OPERANDS} -> origin:token total:token picked:token sum:token?",
    target=True,
    plain_on=("cpu",),
)
tangent = _Tangent(
    "linear_cross_entropy_jvp",
    f"{_OPERANDS} origin:token {_GRADIENTS} -> dtotal:token dpicked:token dsum:token?",
)
backward = _Backward(
    "linear_cross_entropy_bwd",
    f"{_OPERANDS} origin:token dtotal:token dpicked:token dsum:token? -> {_GRADIENTS}",
)
both = _Both(
    "linear_cross_entropy_fwd_bwd",
    f"{_OPERANDS} dlog:token dpicked:token dsum:token? "
    f"-> origin:token total:token picked:token sum:token? {_GRADIENTS}",
)

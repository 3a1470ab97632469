"""The attention kernels: their operands' shapes and axes, and their rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.interpreters import ad

from jaxops._kernel import Kernel, jvp_of_linear
from jaxops._rows import accumulator
from jaxops._sharding import Layout, reshard_like
from jaxops._warnings import warn_fallback
from jaxops.ops import _attention_plain as plain
from jaxops.ops import _attention_support as support
from jaxops.ops._attention_plain import Call, Named

#: The operands' and results' axes: batch, queries t, keys s, key heads h, group g (the query heads that share a key
#: head), depth d, features e, n: a joint array's query, key and value. "?": the axis' size or 1, along which the array
#: is constant (a result: summed). "joint": query, key and value in one array, consecutive for each head.
_OPTIONS = {
    "bias": ("b?", "h?", "g?", "t?", "s"),
    "mask": ("b?", "h?", "g?", "t?", "s"),
    "query_lengths": ("b",),
    "key_value_lengths": ("b",),
    "query_segments": ("b", "t"),
    "key_value_segments": ("b", "s"),
    "sinks": ("b?", "h", "g"),
    "query_offset": ("",),
}
_MAIN = {
    "joint": ("b", "t", "h", "n", "d"),
    "query": ("b", "t", "h", "g", "d"),
    "key": ("b", "s", "h", "d"),
    "value": ("b", "s", "h", "e"),
    "out": ("b", "t", "h", "g", "e"),
    "lse": ("b", "h", "g", "t"),
}
#: The logsumexp's parts, beside a bias: the largest logit, and the logarithm of the sum of exp(logit - largest). If the
#: largest is -1e9, the sum of both has lost the logarithm. GPU kernels give them in units of log 2.
PARTS = ("maximum", "log_sum")
AXES = {**_MAIN, **_OPTIONS, **dict.fromkeys(PARTS, _MAIN["lse"])}
AXES |= {f"d{name}": AXES[name] for name in (*_MAIN, "bias", "sinks")}

#: In the order in which kernels take them.
_ORDER = tuple(AXES)

#: The axes that every device needs whole, whatever else is split.
_WHOLE = ("s", "d", "e", "n")

#: The operands that a joint operand stands for, and the gradients.
_SEPARATE, _GRADIENTS = ("query", "key", "value"), ("dquery", "dkey", "dvalue")

#: The gradients that are summed over query heads if these are taken apart; the keys of a block in the backward kernel,
#: and fewer blocks than this are few: four for each of an H200's multiprocessors.
_APART, _BLOCK_KEYS, _FEW_BLOCKS = ("dkey", "dvalue"), 128, 4 * 132

#: The residuals' names, for jax.checkpoint's policies.
OUT_NAME, LSE_NAME = "jaxops_attention_out", "jaxops_attention_lse"


class _AttentionKernel(Kernel):
    """A function of attention's operands, which go by name.

    A call's parameters: `names`, the operands; `wanted`, the results; `call`.
    """

    #: The operands in which it is linear.
    linear: frozenset[str] = frozenset()

    def __init__(self, name: str, compute: Callable[[Call, Named, Sequence[str]], list[jax.Array]], **options: Any):
        super().__init__(name, plain_on=("cpu",), **options)
        self._compute = compute

    def __call__(self, call: Call, operands: Named, wanted: Sequence[str]) -> dict[str, jax.Array]:
        """The wanted results."""
        given = {name: operands[name] for name in _ORDER if operands.get(name) is not None}
        out = self.bind(*given.values(), names=tuple(given), wanted=tuple(wanted), call=call)
        return dict(zip(wanted, out, strict=True))

    def abstract(self, *avals, names, wanted, call) -> list[ShapedArray]:
        x = dict(zip(names, avals, strict=True))
        sizes = _sizes(x)
        for name, aval in x.items():
            axes = AXES[name]
            fits = len(axes) == aval.ndim and all(
                d == sizes.get(axis.removesuffix("?"), 1) or (d == 1 and axis.endswith("?"))
                for d, axis in zip(aval.shape, axes, strict=True)
            )
            if not fits:
                raise TypeError(f"{self.name}: {name} has shape {aval.shape}, which does not fit {sizes}")

        def result(name):
            of = name.removeprefix("d")
            shape = x[of].shape if of in x else tuple(sizes[axis] for axis in AXES[name])
            dtype = next(iter(x.values())).dtype  # the query's
            wide = of in ("lse", *PARTS) or (of == "bias" and not call.rounds_bias)
            return ShapedArray(shape, accumulator(dtype) if wide else dtype)

        return [result(name) for name in wanted]

    def layout(self, *operands, names, wanted, call) -> Layout:
        x = dict(zip(names, operands, strict=True))
        sizes = _sizes(x)

        def axes(name, shape):
            return [
                axis.removesuffix("?") if d == sizes.get(axis.removesuffix("?")) else ""
                for d, axis in zip(shape, AXES[name], strict=True)
            ]

        results = self.abstract(*operands, names=names, wanted=wanted, call=call)
        return Layout.of(
            [axes(name, value.shape) for name, value in x.items()],
            [axes(name, value.shape) for name, value in zip(wanted, results, strict=True)],
            whole=_WHOLE,
        )

    def plain(self, *operands, names, wanted, call) -> list[jax.Array]:
        if "joint" not in names:
            return self._compute(call, dict(zip(names, operands, strict=True)), wanted)
        separated = _separated(dict(zip(names, operands, strict=True)))
        return _joined(wanted, self._compute(call, separated, _separate_names(wanted)))

    def local(self, run, shards, scatter, *operands, names, wanted, call) -> list[jax.Array]:
        """On a part of the queries; the first one's position comes at run time; sums over split axes are summed."""
        x = dict(zip(names, operands, strict=True))
        layout = self.layout(*operands, names=names, wanted=wanted, call=call)
        over = shards.get("t")
        if over and "joint" in x:
            return self._local_of_joint(run, shards, scatter, x, wanted, call)
        if over:
            first = lax.axis_index(over) * x["query"].shape[1]
            if "query_lengths" in x:
                x["query_lengths"] = x["query_lengths"] - first.astype(np.int32)
            if call.positional:
                x["query_offset"] = first.astype(np.int32)[None]
        x = {name: x[name] for name in _ORDER if name in x}
        sums = [
            [axis for name, split in shards.items() if name not in axes for axis in split] for axes in layout.results
        ]
        here = call
        if call.rounds_bias and any(over for name, over in zip(wanted, sums, strict=True) if name == "dbias"):
            here = call._replace(rounds_bias=False)  # sums are rounded once
        out = run(*x.values(), names=tuple(x), wanted=wanted, call=here)
        out = [lax.psum(value, over) if over else value for value, over in zip(out, sums, strict=True)]
        types = self.abstract(*operands, names=names, wanted=wanted, call=call)
        return [value.astype(like.dtype) for value, like in zip(out, types, strict=True)]

    def _local_of_joint(self, run, shards, scatter, x, wanted, call) -> list[jax.Array]:
        """It does the same for a joint operand: from other devices it needs only keys and values."""
        over = shards["t"]
        joint = x.pop("joint")
        rest = lax.all_gather(joint[..., 1:, :], over, axis=1, tiled=True)
        x |= {"query": joint[..., :1, :], "key": rest[..., 0, :], "value": rest[..., 1, :]}
        x = {name: x[name] for name in _ORDER if name in x}
        separate = _separate_names(wanted)
        out = self.local(run, shards, scatter, *x.values(), names=tuple(x), wanted=tuple(separate), call=call)
        first = lax.axis_index(over) * joint.shape[1]
        for i, name in enumerate(separate):
            if name in ("dkey", "dvalue"):
                out[i] = lax.dynamic_slice_in_dim(out[i], first, joint.shape[1], 1)
        return _joined(wanted, out)

    def batch(self, operands, dims, *, names, wanted, call):
        """The mapped axis becomes one with the batch; or, if all keys are the same, with a group's heads."""
        x = dict(zip(names, operands, strict=True))
        mapped = {name: dim for name, dim in zip(names, dims, strict=True) if dim is not None}
        size = next(x[name].shape[dim] for name, dim in mapped.items())
        forward = all(name in ("out", "lse", *PARTS) for name in wanted)
        grouped = "joint" not in x and all("g" in "".join(AXES[name]) for name in mapped)
        into = "g" if forward and grouped else "b"
        sizes = _sizes({name: _without(x[name], mapped.get(name)) for name in names})
        # A sum over the batch is a sum for each mapped entry.
        keep = [name.removeprefix("d") for name in wanted if AXES[name][0] == "b?"]
        moved = [
            _fold(value, mapped.get(name), AXES[name], into, size, sizes, spread=name in keep)
            for name, value in x.items()
        ]
        wide = call._replace(rounds_bias=False)  # whose sums are rounded once
        out = self.bind(*moved, names=names, wanted=wanted, call=wide)
        found, positions = [], []
        for name, value in zip(wanted, out, strict=True):
            position = [axis.removesuffix("?") for axis in AXES[name]].index(into)
            value = value.reshape(*value.shape[:position], size, sizes[into], *value.shape[position + 1 :])
            of = name.removeprefix("d")
            if name in ("dbias", "dsinks") and _without(x[of], mapped.get(of)).shape[0] == 1:
                value = jnp.sum(value, position + 1, keepdims=True)
            if name == "dbias" and call.rounds_bias:
                value = value.astype(x["query" if "query" in x else "joint"].dtype)
            found.append(value)
            positions.append(position)
        return found, positions

    def why_not(self, operands: Mapping[str, Any], call: Call) -> str | None:
        """Why a call runs on XLA's operations."""
        if call.xla:
            return "implementation='xla' was asked for"
        return support.why_not(_separated_types(operands)) or support.why_not_here()

    def is_chosen(self, *operands, names, wanted, call) -> bool:
        return self.why_not(dict(zip(names, operands, strict=True)), call) is None

    def flops(self, *operands, names, wanted, call) -> int:
        """The products' operations, for the keys that positions leave visible."""
        x = dict(zip(names, operands, strict=True))
        sizes = _sizes(x)
        if not all(isinstance(d, int) for d in sizes.values()):
            return 0
        logits = plain.logits_count(call, sizes["t"], sizes["s"])
        depth = sizes["d"] + sizes["e"]
        products = depth + (depth // 2 * 3 if {"dquery", "djoint"} & {*wanted} else 0)
        return 2 * sizes["b"] * sizes["h"] * sizes["g"] * logits * products

    def explain(self, *operands, names, wanted, call) -> str:
        x = dict(zip(names, operands, strict=True))
        why = self.why_not(x, call)
        said = [f"on a GPU {'jaxops' if why is None else f'XLA: {why}'}"]
        said += ["causal"] * call.causal
        said += [f"window={call.window}"] if call.window != (-1, -1) else []
        said += [f"soft_cap={call.soft_cap}"] if call.soft_cap else []
        said += [f"with {name}" for name in names if name in _OPTIONS]
        said += ["query, key and value in one array"] if "joint" in names else []
        return ", ".join(said)

    def jvp(self, primals, tangents, *, names, **params):
        linear = [name in self.linear for name in names]
        return jvp_of_linear(self, linear, primals, tangents, names=names, **params)

    def _split(self, operands: Sequence[Any], names: Sequence[str]) -> tuple[Named, dict[str, ShapedArray]]:
        """The operands in which it is not linear; the types of the operands whose cotangents a transpose computes."""
        undefined = {n: x.aval for n, x in zip(names, operands, strict=True) if ad.is_undefined_primal(x)}
        if not set(undefined) <= self.linear:
            raise NotImplementedError(f"{self.name} cannot be transposed in {', '.join(undefined)}; use jax.vjp")
        return {n: x for n, x in zip(names, operands, strict=True) if n not in self.linear}, undefined

    def transpose(self, cotangents, *operands, names, wanted, call):
        del cotangents, wanted, call
        self._split(operands, names)
        raise NotImplementedError(self.name)

    def call_target(self, *operands, names, wanted, call) -> list[jax.Array]:
        x = dict(zip(names, operands, strict=True))
        why = self.why_not(x, call)
        if why is not None:
            if not call.xla and operands[0].dtype.name in support.DTYPES:
                warn_fallback(self.name, why)
            return self.plain(*operands, names=names, wanted=wanted, call=call)
        given = _for_handlers(x)
        results = self.abstract(*operands, names=names, wanted=wanted, call=call)
        sizes = _sizes(x)
        apart = self._takes_heads_apart(sizes)

        def for_handler(name, value):
            if name == "dbias":  # rounded, unless heads are summed after it
                summed = value.shape[1:3] not in ((1, 1), (sizes["h"], sizes["g"]))
                return ShapedArray(given["bias"].shape, np.dtype("float32") if summed else value.dtype)
            if apart and name in _APART:
                batch, keys, heads, depth = value.shape
                return ShapedArray((batch, keys, heads * sizes["g"], depth), np.dtype("float32"))
            return ShapedArray(_with_heads(name, value.shape), value.dtype)

        shapes = [for_handler(name, value) for name, value in zip(wanted, results, strict=True)]
        workspace = ShapedArray((self._workspace(sizes, _reach_lines(given, sizes)),), np.dtype("int32"))
        left, right = call.window
        options = {f"has_{name}": name in x for name in _OPTIONS if not name.endswith("segments")}
        *out, _ = self.ffi_call(
            [*shapes, workspace],
            *given.values(),
            scale=np.float32(call.scale),
            causal=call.causal,
            causal_offset=np.int64(0),
            window_left=np.int64(left),
            window_right=np.int64(right),
            soft_cap=np.float32(call.soft_cap),
            has_segments="query_segments" in x,
            has_parts="maximum" in x or "maximum" in wanted,
            unseen_mean=call.unseen_mean,
            **options,
            **self._attributes(x, wanted),
        )

        def of_handler(name, value, result):
            if name == "dbias":
                return _bias_gradient(value, result.shape, sizes).astype(result.dtype)
            if apart and name in _APART:
                batch, keys, heads, depth = result.shape
                value = jnp.sum(value.reshape(batch, keys, heads, sizes["g"], depth), 3).astype(result.dtype)
            return value.reshape(result.shape)

        return [of_handler(*found) for found in zip(wanted, out, results, strict=True)]

    def _takes_heads_apart(self, sizes: Mapping[str, Any]) -> bool:
        """Whether keys and values have gradients for each query head, which are then summed."""
        del sizes
        return False

    def _workspace(self, sizes: Mapping[str, Any], lines: Any) -> Any:
        return support.forward_workspace(*(sizes[axis] for axis in "btshgd"), lines)

    def _attributes(self, x: Named, wanted: Sequence[str]) -> dict[str, Any]:
        """The attributes beside the ones that both handlers share."""
        del x, wanted
        return {}


def _with_heads(name: str, shape: Sequence[Any]) -> tuple[Any, ...]:
    """The shape with key heads and group as one axis."""
    axes = [axis.removesuffix("?") for axis in AXES[name]]
    if "g" not in axes:
        return tuple(shape)
    group = axes.index("g")
    return (*shape[: group - 1], shape[group - 1] * shape[group], *shape[group + 1 :])


def _bias_gradient(value: jax.Array, shape: tuple[int, ...], sizes: Mapping[str, Any]) -> jax.Array:
    """The handler's in the bias's shape: summed over heads over which `_for_handlers` had to broadcast the bias."""
    heads = (sizes["h"], sizes["g"])
    if shape[1:3] not in ((1, 1), heads):
        value = value.reshape(value.shape[0], *heads, *value.shape[2:])
        value = jnp.sum(value, [axis for axis in (1, 2) if shape[axis] == 1], keepdims=True)
    return value.reshape(shape)


def _for_handlers(x: Named) -> Named:
    """The operands in the handlers' order and shapes."""
    sizes = _sizes(x)
    found = {}
    if "joint" in x:
        x = x | dict.fromkeys(_SEPARATE, x["joint"])
    for name in (*_MAIN, "dout", "dlse", *_OPTIONS, *PARTS):
        if name == "joint" or (value := x.get(name)) is None:
            continue
        if name in ("bias", "mask") and value.shape[1:3] not in ((1, 1), (sizes["h"], sizes["g"])):
            value = jnp.broadcast_to(value, (value.shape[0], sizes["h"], sizes["g"], *value.shape[3:]))
        joint = "joint" in x and name in _SEPARATE
        found[name] = value if joint else value.reshape(_with_heads(name, value.shape))
    return found


def _separated(x: Named) -> Named:
    """With a joint operand's parts, and its tangent's parts, in its place."""
    found = {}
    for name, value in x.items():
        prefix = name.removesuffix("joint")
        if prefix == name:
            found[name] = value
        else:
            query, key, value = (lax.index_in_dim(value, i, -2, keepdims=False) for i in range(3))
            found |= {f"{prefix}query": jnp.expand_dims(query, 3), f"{prefix}key": key, f"{prefix}value": value}
    return found


def _separate_names(wanted: Sequence[str]) -> list[str]:
    """The results for separate operands."""
    return [n for name in wanted for n in (_GRADIENTS if name == "djoint" else (name,))]


def _joined(wanted: Sequence[str], out: Sequence[jax.Array]) -> list[jax.Array]:
    """The results `_separate_names(wanted)` as `wanted`."""
    if "djoint" not in wanted:
        return list(out)
    query, key, value, *more = out  # the gradients are always first
    return [jnp.stack([query.reshape(key.shape), key, value], -2), *more]


def _separated_types(x: Mapping[str, Any]) -> Mapping[str, Any]:
    """The types of query and value, which may be parts of a joint operand."""
    if "joint" not in x:
        return x
    b, s, h, _, d = x["joint"].shape
    dtype = x["joint"].dtype
    return {"query": jax.ShapeDtypeStruct((b, s, h, 1, d), dtype), "value": jax.ShapeDtypeStruct((b, s, h, d), dtype)}


def _reach_lines(given: Named, sizes: Mapping[str, Any]) -> Any:
    """How many batches, or batches and heads, segments or the mask may treat differently; 0: neither is given.

    given: in the handlers' shapes. They find no ranges from masks for single heads that share a key head.
    """
    if "query_segments" in given:
        return sizes["b"]
    if "mask" not in given or (given["mask"].shape[1] != 1 and sizes["g"] != 1):
        return 0
    return given["mask"].shape[0] * given["mask"].shape[1]


def _sizes(x: Mapping[str, Any]) -> dict[str, Any]:
    """Of the named axes."""
    x = _separated_types(x)
    b, t, h, g, d = x["query"].shape
    _, s, _, e = x["value"].shape
    return {"b": b, "t": t, "h": h, "g": g, "s": s, "d": d, "e": e, "n": 3}


def _without(x: Any, dim: int | None) -> ShapedArray:
    shape = x.shape if dim is None else (*x.shape[:dim], *x.shape[dim + 1 :])
    return ShapedArray(shape, x.dtype)


def _fold(x, dim, axes, into, size, sizes, spread) -> jax.Array:
    """x with the mapped axis, at `dim`, in front of the axis `into` and one with it.

    spread: also if x is the same along that axis.
    """
    position = next((i for i, axis in enumerate(axes) if axis.removesuffix("?") == into), None)
    if position is None:
        return x
    if dim is None:
        if x.shape[position] == 1 and axes[position].endswith("?") and not spread:
            return x
        x = jnp.expand_dims(x, position)
    else:
        x = jnp.moveaxis(x, dim, position)
    shape = (*x.shape[:position], size, sizes[into], *x.shape[position + 2 :])
    x = jnp.broadcast_to(x, shape)
    return x.reshape(*shape[:position], size * sizes[into], *shape[position + 2 :])


class _Forward(_AttentionKernel):
    """The result, the logsumexp, and its parts if they are wanted."""

    def as_dot_general(self, *operands, names, **_):
        """The product of weights and values, with a batch for every head."""
        x = _separated_types(dict(zip(names, operands, strict=True)))
        *batch, queries, heads, _ = x["query"].shape
        *_, keys, _, features = x["value"].shape
        weights, value = ((*batch, heads, queries, keys), (*batch, heads, keys, features))
        each, last = tuple(range(len(batch) + 1)), len(weights) - 1
        options = {"precision": None, "preferred_element_type": None, "out_sharding": None}
        sides = [ShapedArray(shape, x["value"].dtype) for shape in (weights, value)]
        return sides, {"dimension_numbers": (((last,), (last - 1,)), (each, each)), **options}

    def jvp(self, primals, tangents, *, names, wanted, call):
        found = self.bind(*primals, names=names, wanted=wanted, call=call)
        found = [checkpoint_name(x, OUT_NAME if n == "out" else LSE_NAME) for n, x in zip(wanted, found, strict=True)]
        moved = {f"d{n}": t for n, t in zip(names, tangents, strict=True) if not isinstance(t, ad.Zero)}
        # The parts have no tangents: what uses them takes the logsumexp's.
        dfound = {f"d{n}": ad.Zero(jax.typeof(x)) for n, x in zip(wanted, found, strict=True)}
        if moved:
            operands = dict(zip(names, primals, strict=True)) | dict(zip(wanted, found, strict=True)) | moved
            dfound |= _tangent(call, operands, ("dout", "dlse"))
        return found, list(dfound.values())


class _Tangent(_AttentionKernel):
    """The tangents of both, linear in the operands' tangents."""

    linear = frozenset((*_GRADIENTS, "djoint", "dbias", "dsinks"))

    def transpose(self, cotangents, *operands, names, wanted, call):
        x, undefined = self._split(operands, names)
        dout, dlse = cotangents
        if isinstance(dout, ad.Zero):
            dout = reshard_like(jnp.zeros(dout.aval.shape, dout.aval.dtype), dout.aval)
        x |= {"dout": dout} | ({} if isinstance(dlse, ad.Zero) else {"dlse": dlse})
        found: dict[str, jax.Array] = {}
        if "dsinks" in undefined:
            found["dsinks"] = plain.sink_gradient(x).astype(undefined["dsinks"].dtype)
        if set(undefined) - {"dsinks"}:
            bias = ("dbias",) if "dbias" in undefined else ()
            dtypes = {x[name].dtype for name in ("query", "joint", "bias") if name in x}
            call = call._replace(rounds_bias=bool(bias) and dtypes == {undefined["dbias"].dtype})
            found |= _backward(call, x, (*(("djoint",) if "joint" in x else _GRADIENTS), *bias))
        if "dbias" in undefined:
            found["dbias"] = found["dbias"].astype(undefined["dbias"].dtype)
        return [found.get(name) if name in undefined else None for name in names]


class _Backward(_AttentionKernel):
    """The operands' gradients, linear in the results' cotangents."""

    linear = frozenset(("dout", "dlse"))

    def _takes_heads_apart(self, sizes: Mapping[str, Any]) -> bool:
        # A block visits all query heads of its keys, one after the other. If blocks are few, the longest of them, or
        # the order in which they add to dquery, decides: on an H200 2 x 4096 tokens with 16 query heads (depth 64) took
        # 424 us with 16 key heads, 553 us with 4, and 463 us with the 4 taken apart; 1 x 4096 with 32 (depth 128), 728
        # us with 32 key heads, 997 us with 8, 794 us with the 8 taken apart. These gradients had 16 bits; in f32, which
        # keeps each head's from being rounded before their sum, 4 x 4096 with 32 query and 4 key heads (depth 64) take
        # 8 % longer. Deeper heads take other kernels.
        b, t, s, h, g = (sizes[axis] for axis in "btshg")
        if not all(isinstance(size, int) for size in (b, t, s, h, g)):
            return False
        return g > 1 and sizes["d"] <= 128 and 4 * t >= s and b * h * -(-s // _BLOCK_KEYS) < _FEW_BLOCKS

    def _workspace(self, sizes: Mapping[str, Any], lines: Any) -> Any:
        b, t, s = sizes["b"], sizes["t"], sizes["s"]
        return support.backward_workspace(b, sizes["h"] * sizes["g"], t, s, sizes["d"], lines)

    def _attributes(self, x: Named, wanted: Sequence[str]) -> dict[str, Any]:
        return {"has_dlse": "dlse" in x, "wants_dbias": "dbias" in wanted}

    def transpose(self, cotangents, *operands, names, wanted, call):
        x, undefined = self._split(operands, names)
        x |= {n: c for n, c in zip(wanted, cotangents, strict=True) if not isinstance(c, ad.Zero)}
        found = _tangent(call, x, ("dout", "dlse"))
        return [found[name] if name in undefined else None for name in names]


def _compute_forward(call: Call, x: Named, wanted: Sequence[str]) -> list[jax.Array]:
    found = plain.forward(call, x)
    return [found[name] for name in wanted]


def _compute_tangent(call: Call, x: Named, wanted: Sequence[str]) -> list[jax.Array]:
    del wanted
    return list(plain.tangent(call, x))


def _compute_backward(call: Call, x: Named, wanted: Sequence[str]) -> list[jax.Array]:
    return plain.backward(call, x, "dbias" in wanted)


forward = _Forward("attention_fwd", _compute_forward)
_backward = _Backward("attention_bwd", _compute_backward)
_tangent = _Tangent("attention_jvp", _compute_tangent, target=False)

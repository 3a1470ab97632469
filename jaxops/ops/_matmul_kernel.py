"""The kernel of matmul and dot_general: a product's shapes, dtypes and arithmetic, and its rules."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad
from jax.lax import dot_general as jax_dot_general
from jax.numpy import matmul as jax_matmul

from jaxops._device import local_device
from jaxops._kernel import Kernel
from jaxops._limits import MAX_BATCH_AXES
from jaxops._rows import accumulator, promoted, sum_to
from jaxops._sharding import Layout
from jaxops.ops import _matmul_choice as choices
from jaxops.ops._epilogue import ACTIVATIONS, activation_index, epilogue_jvp


class Spec(NamedTuple):
    """A matmul's parameters.

    lhs is [..., m, k], or [..., k, m] if transposed; rhs is [..., k, n], or [..., n, k] if transposed. m, n and k each
    stand for any number of axes, and every axis can be sharded; the handlers get one axis for each.

    triangle: the part of the product that may be skipped, if m, n and k have one axis each. "result": above the
    diagonal (columns beyond the row) the result is not used and may be anything; its cotangent there is 0. "lhs": lhs
    as stored is 0 above the diagonal, and its cotangent there is not used.
    """

    lhs_transposed: bool
    rhs_transposed: bool
    dtype: np.dtype  # the result's dtype
    activation: str | None = None
    precision: Any = None  # a result of `precision_of`
    counts: tuple[int, int, int] = (1, 1, 1)  # how many axes m, n and k have
    scaled: bool = False  # the third operand is a scale
    triangle: str | None = None

    def sizes(self, lhs, rhs) -> tuple[tuple[int, ...], ...]:
        """The sizes of the result's batch axes, lhs's m and k axes, and rhs's k and n axes."""
        m, n, k = self.counts
        batch = lhs.ndim - m - k

        def groups(x, count, transposed):
            first, second = x.shape[batch : batch + count], x.shape[batch + count :]
            return (second, first) if transposed else (first, second)

        left = groups(lhs, k if self.lhs_transposed else m, self.lhs_transposed)
        right = groups(rhs, n if self.rhs_transposed else k, self.rhs_transposed)
        return jnp.broadcast_shapes(lhs.shape[:batch], rhs.shape[:batch]), *left, *right


_PRECISIONS = {
    **dict.fromkeys(("default", "fastest", "bfloat16"), lax.Precision.DEFAULT),
    **dict.fromkeys(("high", "bfloat16_3x", "tensorfloat32"), lax.Precision.HIGH),
    **dict.fromkeys(("highest", "float32"), lax.Precision.HIGHEST),
}


def precision_of(precision):
    """Resolves a valid `precision` under `jax.default_matmul_precision`: one for each operand, or an algorithm."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    if isinstance(precision, str):
        precision = _PRECISIONS.get(precision) or lax.DotAlgorithmPreset[precision]
    if precision is None:
        precision = lax.Precision.DEFAULT
    if has_algorithm(precision):
        if precision != lax.DotAlgorithmPreset.DEFAULT:
            return precision
        precision = lax.Precision.DEFAULT
    pair = precision if isinstance(precision, tuple | list) else (precision, precision)
    return tuple(_PRECISIONS[p] if isinstance(p, str) else p for p in pair)


def has_algorithm(precision) -> bool:
    """Whether a resolved precision is an algorithm, not one precision for each operand."""
    return isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)


EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")

#: The kernels' arithmetic, by operand dtype and dot algorithm.
_ALGORITHMS = {
    "bfloat16": {"BF16_BF16_F32": "16bit"},
    "float16": {"F16_F16_F32": "16bit"},
    "float32": {"TF32_TF32_F32": "tf32", "TF32_TF32_F32_X3": "f32", "F32_F32_F32": "f32"},
    "8 bits": {"ANY_F8_ANY_F8_F32": "f8", "ANY_F8_ANY_F8_F32_FAST_ACCUM": "f8 fast"},
}


def arithmetic_of(lhs, rhs, precision) -> str | None:
    """The kernels' arithmetic for operands of these dtypes and this precision; None if there is no kernel.

    As in XLA, f32 operands are rounded to TF32 unless the precision is the highest.
    """
    names = {np.dtype(lhs).name, np.dtype(rhs).name}
    kind = "8 bits" if names <= set(EIGHT_BITS) else names.pop() if len(names) == 1 else None
    if kind not in _ALGORITHMS:
        return None
    if isinstance(precision, lax.DotAlgorithmPreset):
        return _ALGORITHMS[kind].get(precision.name)
    if isinstance(precision, lax.DotAlgorithm):
        return None
    highest = lax.Precision.HIGHEST in precision
    return {"float32": "f32" if highest else "tf32", "8 bits": "f8" if highest else "f8 fast"}.get(kind, "16bit")


def plain_precision(lhs, rhs, precision):
    """The precision with which XLA's dot does the same, because not every platform has dot algorithms."""
    if not has_algorithm(precision) or (arithmetic := arithmetic_of(lhs, rhs, precision)) is None:
        return precision
    return precision_of(lax.Precision.HIGHEST if arithmetic in ("f32", "f8") else lax.Precision.DEFAULT)


def joined_axes(batch: Sequence[Any], *operands: Sequence[Any]) -> int:
    """How many axes a batch has after joining neighbours along which the same operands broadcast."""
    kinds = [tuple(d == 1 for d in sizes) for size, *sizes in zip(batch, *operands, strict=True) if size != 1]
    return sum(kind != before for kind, before in zip(kinds, [None, *kinds], strict=False))


class _MatmulKernel(Kernel):
    """activation(scale lhs @ rhs + bias), with the preactivation as an optional second result.

    Operands: lhs, rhs, the scale if `spec.scaled`, and the bias if one operand is left. All have the result's rank.
    Along a batch axis, each has the result's size or 1. The scale has size 1 along all other axes; the bias may have
    size 1 along any axis. On the CPU XLA's own dot runs.
    """

    def __call__(self, lhs, rhs, scale, bias, spec: Spec, preactivation: bool = False) -> list[jax.Array]:
        operands = [x for x in (lhs, rhs, scale, bias) if x is not None]
        return self.bind(*operands, spec=spec._replace(scaled=scale is not None), preactivation=preactivation)

    @staticmethod
    def _named(operands, spec):
        """lhs, rhs, scale and bias; None for a missing one."""
        lhs, rhs, *rest = operands
        scale = rest.pop(0) if spec.scaled else None
        return lhs, rhs, scale, rest[0] if rest else None

    def abstract(self, *operands, spec, preactivation) -> list[ShapedArray]:
        lhs, rhs, scale, bias = self._named(operands, spec)
        batch, m, k, k2, n = spec.sizes(lhs, rhs)
        if k != k2 or rhs.ndim != len(batch) + len(k2) + len(n):
            raise TypeError(f"matmul: lhs {lhs.shape} and rhs {rhs.shape} do not fit together")
        shape = (*batch, *m, *n)
        if bias is not None and jnp.broadcast_shapes(bias.shape, shape) != shape:
            raise TypeError(f"matmul: bias {bias.shape} does not broadcast to the result's shape {shape}")
        each = (*batch, *(1 for _ in (*m, *n)))
        if scale is not None and jnp.broadcast_shapes(scale.shape, each) != each:
            raise TypeError(f"matmul: scale {scale.shape} does not broadcast to {each}")
        return [ShapedArray(shape, spec.dtype)] * (2 if preactivation else 1)

    def layout(self, lhs, rhs, *rest, spec, preactivation) -> Layout:
        batch, m, k, _, n = spec.sizes(lhs, rhs)
        b, m, n, k = (
            [f"{name}{i}" for i in range(len(x))]
            for name, x in zip(("batch", "m", "n", "k"), (batch, m, n, k), strict=True)
        )
        result = [*b, *m, *n]

        def batch_of(x):
            return [name if d == size else "" for name, d, size in zip(b, x.shape, batch, strict=False)]

        operands = [
            [*batch_of(lhs), *([*k, *m] if spec.lhs_transposed else [*m, *k])],
            [*batch_of(rhs), *([*n, *k] if spec.rhs_transposed else [*k, *n])],
        ]
        sizes = self.abstract(lhs, rhs, spec=spec._replace(scaled=False), preactivation=False)[0].shape
        operands += [[name if d == s else "" for name, d, s in zip(result, x.shape, sizes, strict=True)] for x in rest]
        return Layout.of(operands, [result] * (2 if preactivation else 1), k)

    def _flat(self, *operands, spec):
        """The operands and spec with one axis each for m, n and k, and a function that restores the results' axes.

        If one matrix serves the whole batch, batch axes join the rows: [..., m, k] @ [k, n] -> [... m, k] @ [k, n].
        """
        lhs, rhs, scale, bias = self._named(operands, spec)
        batch, m, k, _, n = spec.sizes(lhs, rhs)
        rows, columns, contracted = map(math.prod, (m, n, k))
        left, right = (rows, contracted), (contracted, columns)
        lhs = lhs.reshape(*lhs.shape[: len(batch)], *left[:: -1 if spec.lhs_transposed else 1])
        rhs = rhs.reshape(*rhs.shape[: len(batch)], *right[:: -1 if spec.rhs_transposed else 1])
        rest = []
        if scale is not None:
            rest.append(scale.reshape(*scale.shape[: len(batch)], 1, 1))
        if bias is not None:
            given, end = bias.shape, len(batch) + len(m)
            parts = [
                part if all(d == 1 for d in part) else whole
                for part, whole in ((given[len(batch) : end], m), (given[end:], n))
            ]
            wide = jnp.broadcast_to(bias, (*given[: len(batch)], *parts[0], *parts[1]))
            rest.append(wide.reshape(*given[: len(batch)], *map(math.prod, parts)))
        one_matrix = batch and all(d == 1 for d in rhs.shape[:-2]) and not (spec.lhs_transposed or spec.triangle)
        if one_matrix and all(d == 1 for x in rest for d in x.shape[:-1]):
            lhs, rhs = lhs.reshape(math.prod(batch) * rows, contracted), rhs.reshape(rhs.shape[-2:])
            rest = [x.reshape(1, x.shape[-1]) for x in rest]
        shape = (*batch, *m, *n)
        return [lhs, rhs, *rest], spec._replace(counts=(1, 1, 1)), lambda out: [x.reshape(shape) for x in out]

    def _lower(self, platform, lhs, rhs, *rest, spec, preactivation):
        if platform == "cpu" and lhs.dtype == rhs.dtype == jnp.bfloat16:
            # XLA:CPU converts bf16 itself, except for products that it reshapes. Those fail at run time ("Unsupported
            # element type for DotThunk::Execute: BF16 x BF16 = F32", jaxlib 0.11.2).
            spec = spec._replace(precision=plain_precision(lhs.dtype, rhs.dtype, spec.precision))
            lhs, rhs = lhs.astype(np.float32), rhs.astype(np.float32)
        return super()._lower(platform, lhs, rhs, *rest, spec=spec, preactivation=preactivation)

    def plain(self, *operands, spec, preactivation) -> list[jax.Array]:
        return self._on_xla(*operands, spec=spec, preactivation=preactivation)

    def _on_xla(
        self, *operands, spec, preactivation, sums: np.dtype | None = None, padded: bool = False
    ) -> list[jax.Array]:
        """XLA's own dot. `sums`: the dot's result dtype; by default the epilogue's dtype.

        padded: pad k = 1 to 2 with zeros.
        """
        flat, spec, restore = self._flat(*operands, spec=spec)
        lhs, rhs, scale, bias = self._named(flat, spec)
        rank = lhs.ndim
        if padded:
            lhs, rhs = (x.reshape(*x.shape[:-2], 1, math.prod(x.shape[-2:])) for x in (lhs, rhs))
            lhs, rhs = (jnp.pad(x, [*[(0, 0)] * (rank - 2), (0, 1), (0, 0)]) for x in (lhs, rhs))
            spec = spec._replace(lhs_transposed=True, rhs_transposed=False)
        precision = plain_precision(lhs.dtype, rhs.dtype, spec.precision)
        wide = sums or accumulator(lhs.dtype, spec.dtype)
        # jnp.matmul defines no promotion of different 8-bit floats. On GPUs, XLA multiplies the elements of small 8-bit
        # matrices as f16, where 448 * 448 is infinite: fewer than 100 in both, by jaxlib 0.11.2's default. For so few
        # as here, conversions cost nothing. Symbolic sizes count as small, which is right for any.
        sizes = [size for size in (lhs.size, rhs.size) if isinstance(size, int)]
        small = jnp.issubdtype(lhs.dtype, jnp.floating) and lhs.dtype.itemsize == 1 and sum(sizes) < 4096
        if lhs.dtype != rhs.dtype or small:
            lhs, rhs = (x.astype(accumulator(spec.dtype)) for x in (lhs, rhs))
        batch = jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
        shared = [a for a in range(rank - 2) if lhs.shape[a] == rhs.shape[a]]
        if len(shared) < rank - 2:  # operands that broadcast along a batch axis: let jnp.matmul arrange it
            lhs = jnp.swapaxes(lhs, -1, -2) if spec.lhs_transposed else lhs
            rhs = jnp.swapaxes(rhs, -1, -2) if spec.rhs_transposed else rhs
            z = jax_matmul(lhs, rhs, precision=precision, preferred_element_type=wide)
        else:
            contract = (
                (rank - 2 if spec.lhs_transposed else rank - 1,),
                (rank - 1 if spec.rhs_transposed else rank - 2,),
            )
            axes = tuple(range(len(batch)))
            z = jax_dot_general(lhs, rhs, (contract, (axes, axes)), precision=precision, preferred_element_type=wide)
        return restore(_finished(z, scale, bias, spec, preactivation))

    def choice(self, *operands, spec, preactivation=False) -> choices.Choice:
        """Which kernel computes the product on this machine's GPU, or on an H200 without a GPU."""
        lhs, rhs, scale, bias = self._named(operands, spec)
        arithmetic = arithmetic_of(lhs.dtype, rhs.dtype, spec.precision)
        if arithmetic is None:
            return choices.Choice("xla", f"no kernel is as fast for {lhs.dtype}")
        out, *_ = self.abstract(*operands, spec=spec, preactivation=preactivation)
        if joined_axes(out.shape[:-2], *(x.shape[:-2] for x in operands)) > MAX_BATCH_AXES:
            return choices.Choice("xla", f"more than {MAX_BATCH_AXES} batch axes that do not join")
        product = choices.Product(
            *out.shape[-2:],
            lhs.shape[-2 if spec.lhs_transposed else -1],
            arithmetic,
            spec.lhs_transposed,
            spec.rhs_transposed,
            math.prod(out.shape[:-2]),
            out.dtype.itemsize,
            spec.triangle,
        )
        scaled = scale is not None and lhs.dtype.itemsize > 1  # scales of 8-bit floats cost nothing
        biased = scaled or bias is not None
        return choices.choose(product, local_device(), spec.activation is not None, biased)

    def _choice_of_call(self, *operands, spec, preactivation) -> choices.Choice:
        flat = jax.eval_shape(lambda *arrays: self._flat(*arrays, spec=spec)[0], *operands)
        return self.choice(*flat, spec=spec._replace(counts=(1, 1, 1)), preactivation=preactivation)

    def is_chosen(self, *operands, **params) -> bool:
        return self._choice_of_call(*operands, **params).kernel != "xla"

    def as_dot_general(self, lhs, rhs, *rest, spec, **params):
        """Along a batch axis an operand may have size 1; there it has no batch axis."""
        layout = self.layout(lhs, rhs, *rest, spec=spec, **params)
        sides, names = [], []
        for x, given in zip((lhs, rhs), layout.operands[:2], strict=True):
            kept = [a for a, name in enumerate(given) if not name.startswith("own")]
            names.append([given[a] for a in kept])
            sides.append(ShapedArray([x.shape[a] for a in kept], x.dtype))

        def shared(kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
            both = [name for name in names[0] if name in names[1] and name.startswith(kind)]
            return tuple(map(names[0].index, both)), tuple(map(names[1].index, both))

        numbers = (shared("k"), shared("batch"))
        options = {"precision": spec.precision, "preferred_element_type": spec.dtype, "out_sharding": None}
        return sides, {"dimension_numbers": numbers, **options}

    def defined(self, *, spec, **params) -> dict[str, Any]:
        return {**params, "spec": spec._replace(triangle=None) if spec.triangle == "result" else spec}

    def flops(self, lhs, rhs, *rest, spec, preactivation) -> int:
        del rest, preactivation
        batch, m, k, _, n = spec.sizes(lhs, rhs)
        all_terms = math.prod((*batch, *m, *k, *n))
        if spec.triangle is None:
            return 2 * all_terms
        rows, columns = (*m, *n) if spec.triangle == "result" else (*k, *m) if spec.lhs_transposed else (*m, *k)
        lower = sum(min(row + 1, columns) for row in range(rows))  # entries not above the diagonal
        return 2 * (all_terms // (rows * columns)) * lower if lower else 0

    def explain(self, *operands, spec, preactivation) -> str:
        choice = self._choice_of_call(*operands, spec=spec, preactivation=preactivation)
        done = ["scaled"] * spec.scaled + [spec.activation or ""] + ["keeps the preactivation"] * preactivation
        done += [f"of the {spec.triangle} the lower triangle alone"] * (spec.triangle is not None)
        return "; ".join([f"on a GPU {choice}", *filter(None, [", ".join(filter(None, done))])])

    def call_target(self, *operands, spec, preactivation) -> list[jax.Array]:
        operands, spec, restore = self._flat(*operands, spec=spec)
        lhs, rhs, *_ = operands
        choice = self.choice(*operands, spec=spec, preactivation=preactivation)
        if choice.kernel == "xla":
            # Alone in the result's dtype, as jax.numpy asks for it: else XLA writes f32 sums and rounds them in a pass.
            sums = spec.dtype if len(operands) == 2 and spec.activation is None else None
            if spec.lhs_transposed:
                # The gradients of several matrices that multiply the same x are products with x. XLA would make one
                # product of them, and for it copy all cotangents into one array: 55 us for two of 8192 x 3584.
                operands = lax.optimization_barrier(operands)
            how = {"sums": sums, "padded": choice.padded}
            return restore(self._on_xla(*operands, spec=spec, preactivation=preactivation, **how))
        results = self.abstract(*operands, spec=spec, preactivation=preactivation)
        count, out = len(results), results[0]
        arithmetic = choices.ARITHMETICS.get(arithmetic_of(lhs.dtype, rhs.dtype, spec.precision))
        in_parts = choice.tile is not None and arithmetic.in_parts
        scales = []
        for x, copy in ((lhs, choice.lhs_copy), (rhs, choice.rhs_copy)):
            if copy:
                matrices, (rows, columns) = math.prod(x.shape[:-2]), x.shape[-2:][:: -1 if copy == 2 else 1]
                depth = arithmetic.depth
                tiles = math.ceil(columns / depth)
                results.append(ShapedArray((matrices * (3 if in_parts else 1), rows, tiles * depth), x.dtype))
                scales.append(ShapedArray((matrices, math.ceil(rows / depth), tiles), np.dtype("float32")))
        if choice.partials:
            shape = (choice.splits, math.prod(out.shape[:-2]), *out.shape[-2:])
            results.append(ShapedArray(shape, np.dtype("float32")))
        if in_parts:  # a flag, one for each k tile, and two exponents
            results += [*scales, ShapedArray((3 + scales[0].shape[2],), np.dtype("int32"))]
        tile = choice.tile or choices.Tile(0, 0, False, 0)
        out = self.ffi_call(
            results,
            *operands,
            lhs_transposed=spec.lhs_transposed,
            rhs_transposed=spec.rhs_transposed,
            activation=activation_index(spec.activation),
            triangle=np.int32(choices.TRIANGLES.index(spec.triangle)),
            has_scale=spec.scaled,
            has_preactivation=preactivation,
            tile_rows=np.int32(choices.rows_in_calls(tile)),
            tile_columns=np.int32(tile.columns),
            ping_pong=tile.ping_pong,
            band=np.int32(choice.band),
            in_parts=in_parts,
            shared=np.int32(choices.SHARED_OPERANDS.index(choice.shared)),
            splits=np.int32(choice.splits),
            promote=np.int32(choice.promote),
            lhs_copy=np.int32(choice.lhs_copy),
            rhs_copy=np.int32(choice.rhs_copy),
            has_partials=choice.partials,
        )
        return restore(out[:count])

    def local(self, run, shards, scatter, *operands, spec, preactivation) -> list[jax.Array]:
        """If k is split over devices, sums the partial products before bias and activation."""
        lhs, rhs, scale, bias = self._named(operands, spec)
        layout = self.layout(*operands, spec=spec, preactivation=preactivation)
        over = [axis for name in layout.summed for axis in shards.get(name, ())]
        if any(name.startswith(("m", "n", "k")) for name in shards):  # a shard of a triangle is not a triangle
            spec = spec._replace(triangle=None)
        if not over:
            return run(*operands, spec=spec, preactivation=preactivation)
        scales = [] if scale is None else [scale]
        (z,) = run(lhs, rhs, *scales, spec=spec._replace(activation=None), preactivation=False)
        for name, axes in scatter.items():
            dimension = layout.results[0].index(name)
            z = lax.psum_scatter(z, axes, scatter_dimension=dimension, tiled=True)
            over = [axis for axis in over if axis not in axes]
            size = z.shape[dimension]
            if bias is not None and bias.shape[dimension] != 1:
                bias = lax.dynamic_slice_in_dim(bias, lax.axis_index(axes) * size, size, dimension)
        z = lax.psum(z, over) if over else z
        return _finished(z.astype(accumulator(lhs.dtype, spec.dtype)), None, bias, spec, preactivation)

    def batch(self, operands, dims, *, spec, preactivation):
        """The mapped axis becomes a batch axis, or, if rhs is one unmapped matrix, an m axis: still one product.

        If neither lhs nor rhs is mapped, the product is computed once, and each entry's scale and bias follow.
        """
        moved = [
            jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(operands, dims, strict=True)
        ]
        if dims[0] is dims[1] is None:
            sums = spec._replace(dtype=accumulator(operands[0].dtype, spec.dtype), activation=None)
            (z,) = self(*operands[:2], None, None, sums)
            _, _, scale, bias = self._named(moved, spec)
            out = _finished(z[None], scale, bias, spec, preactivation)
            return out, [0] * len(out)
        m, n, k = spec.counts
        one_scale = not spec.scaled or dims[2] is None
        one_matrix = dims[1] is None and operands[1].ndim == n + k and not (spec.lhs_transposed or spec.triangle)
        if one_matrix and one_scale:
            moved[1] = operands[1]
            spec = spec._replace(counts=(m + 1, n, k))
        out = self.bind(*moved, spec=spec, preactivation=preactivation)
        return out, [0] * len(out)

    def jvp(self, primals, tangents, *, spec, preactivation):
        lhs, rhs, scale, _ = self._named(primals, spec)
        dlhs, drhs, dscale, dbias = (None if isinstance(t, ad.Zero) else t for t in self._named(tangents, spec))
        out = self.bind(*primals, spec=spec, preactivation=preactivation or spec.activation is not None)
        linear = spec._replace(activation=None)
        pairs = [pair for pair in ((dlhs, rhs), (lhs, drhs)) if all(x is not None for x in pair)]
        found = [self(*pair, scale, None, linear)[0] for pair in pairs]
        if dscale is not None:
            (z,) = self(lhs, rhs, None, None, linear._replace(dtype=np.dtype(scale.dtype)))
            found.append((dscale * z).astype(spec.dtype))
        like = jax.typeof(out[0])
        dz = functools.reduce(operator.add, found) if found else None
        if preactivation:
            dz, dbias = epilogue_jvp(None, like, None, dz, dbias), None
        moved = epilogue_jvp(spec.activation, like, out[-1], dz, dbias)
        return (out, [moved, dz]) if preactivation else (out[:1], [moved])

    def transpose(self, cotangents, *operands, spec, preactivation):
        """The cotangents of the bias and of lhs, rhs or scale."""
        lhs, rhs, scale, bias = self._named(operands, spec)
        wanted = [ad.is_undefined_primal(x) for x in (lhs, rhs, scale)]
        if spec.activation or preactivation or sum(wanted) > 1:
            raise NotImplementedError("matmul is not linear: with an activation, or in several factors at once")
        (dz,) = cotangents
        found = dict.fromkeys(("lhs", "rhs", "scale", "bias"))
        if ad.is_undefined_primal(bias):
            found["bias"] = sum_to(dz.astype(bias.aval.dtype), bias.aval.shape)
        if wanted[2]:
            (z,) = self(lhs, rhs, None, None, spec._replace(dtype=accumulator(spec.dtype)))
            found["scale"] = sum_to(dz.astype(z.dtype) * z, scale.aval.shape).astype(scale.aval.dtype)
        elif any(wanted):
            found["rhs" if wanted[1] else "lhs"] = self._transpose_factor(dz, lhs, rhs, scale, spec)
        return [found[name] for name, x in zip(found, (lhs, rhs, scale, bias), strict=True) if x is not None]

    def _transpose_factor(self, dz, lhs, rhs, scale, spec):
        """The cotangent of lhs or rhs, whichever is undefined."""
        m, n, k = spec.counts
        # The kernel skips triangles on the left; a triangle on the right is multiplied in full.
        if ad.is_undefined_primal(lhs):
            triangle = {"result": None if spec.lhs_transposed else "lhs", "lhs": "result"}.get(spec.triangle)
            left = (
                (rhs, spec.rhs_transposed, dz, True, (k, m, n))
                if spec.lhs_transposed
                else (dz, False, rhs, not spec.rhs_transposed, (m, k, n))
            )
            return _product(spec, scale, lhs.aval, *left, triangle)
        triangle = "lhs" if spec.triangle == ("result" if spec.rhs_transposed else "lhs") else None
        right = (
            (dz, True, lhs, spec.lhs_transposed, (n, k, m))
            if spec.rhs_transposed
            else (lhs, not spec.lhs_transposed, dz, False, (k, n, m))
        )
        return _product(spec, scale, rhs.aval, *right, triangle)


def _finished(z, scale, bias, spec, preactivation) -> list[jax.Array]:
    """The results from sums z; scale and bias are applied in z's dtype."""
    z = z if scale is None else z * scale.astype(z.dtype)
    z = z if bias is None else z + bias.astype(z.dtype)
    out = ACTIVATIONS[spec.activation](z.astype(accumulator(z.dtype))).astype(spec.dtype)
    return [out, z.astype(spec.dtype)] if preactivation else [out]


kernel = _MatmulKernel("matmul", plain_on=("cpu",))


def _product(spec, scale, like, lhs, lhs_transposed, rhs, rhs_transposed, counts, triangle):
    """scale lhs @ rhs as the cotangent of `like`: in its dtype, and summed over axes along which it broadcasts."""
    if lhs.dtype != rhs.dtype:
        algorithm = has_algorithm(spec.precision)
        if algorithm and like.dtype.itemsize == 2:
            wide = like.dtype  # the algorithm rounds the cotangent to it, as in XLA's dot
        else:
            wide = promoted(*(x.dtype for x in (lhs, rhs) if x.dtype.itemsize > 1))
            if algorithm:  # 8 bits cannot hold a cotangent; TF32 keeps all bits of bf16
                spec = spec._replace(precision=precision_of(lax.Precision.DEFAULT))
        lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    product = Spec(lhs_transposed, rhs_transposed, np.dtype(lhs.dtype), None, spec.precision, counts, triangle=triangle)
    batch, *_ = product.sizes(lhs, rhs)
    if like.dtype != lhs.dtype or any(a != b for a, b in zip(batch, like.shape, strict=False)):
        product = product._replace(dtype=accumulator(lhs.dtype))
    if scale is not None:
        scale = scale.reshape(*scale.shape[: len(batch)], *(1 for _ in range(counts[0] + counts[1])))
    (out,) = kernel(lhs, rhs, scale, None, product)
    return sum_to(out, like.shape).astype(like.dtype)

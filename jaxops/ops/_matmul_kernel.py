"""The kernel of matmul and dot_general: shapes, dtypes and arithmetic of a product, and its rules."""

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

from jaxops._device import local_device
from jaxops._kernel import Kernel
from jaxops._limits import MAX_BATCH_AXES
from jaxops._rows import accumulator, promoted, sum_to
from jaxops._sharding import Layout
from jaxops.ops import _matmul_choice as choices
from jaxops.ops._epilogue import ACTIVATIONS, activation_index, epilogue_jvp


class Spec(NamedTuple):
    """What a matmul does, apart from its operands.

    lhs is [..., m, k], or [..., k, m] if transposed; rhs is [..., k, n], or [..., n, k] if transposed. m, n and k stand
    for any number of axes each: the handlers get them as one, and before that every axis can be sharded.

    triangle: what need not be multiplied, where m, n and k have one axis each. "result": above the diagonal (columns
    beyond the row) the result may be anything, as nobody looks at it; its cotangent there is 0. "lhs": above the
    diagonal lhs, as it lies, is 0, and nobody looks at its cotangent there.
    """

    lhs_transposed: bool
    rhs_transposed: bool
    dtype: np.dtype  # of the result
    activation: str | None = None
    precision: Any = None  # as `precision_of` gives it
    counts: tuple[int, int, int] = (1, 1, 1)  # of the axes of m, n and k
    scaled: bool = False  # the third operand is a scale
    triangle: str | None = None

    def sizes(self, lhs, rhs) -> tuple[tuple[int, ...], ...]:
        """Of the axes of the result's batch, of m and k of lhs, of k and n of rhs."""
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
    """What a valid `precision` means under `jax.default_matmul_precision`: one for each operand, or an algorithm."""
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
    """Whether what `precision_of` gives is an algorithm, not one precision for each operand."""
    return isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)


EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")

#: The arithmetic of the kernels for each kind of operands under the dot algorithms that name one.
_ALGORITHMS = {
    "bfloat16": {"BF16_BF16_F32": "16bit"},
    "float16": {"F16_F16_F32": "16bit"},
    "float32": {"TF32_TF32_F32": "tf32", "TF32_TF32_F32_X3": "f32", "F32_F32_F32": "f32"},
    "8 bits": {"ANY_F8_ANY_F8_F32": "f8", "ANY_F8_ANY_F8_F32_FAST_ACCUM": "f8 fast"},
}


def arithmetic_of(lhs, rhs, precision) -> str | None:
    """How the kernels multiply operands of these dtypes with such a precision; None: they do not.

    As XLA does: f32 is rounded to TF32 unless the highest precision is asked for.
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


def _plain_precision(lhs, rhs, precision):
    """That with which XLA's dot does what the kernels do, as `precision_of`: not every platform has dot algorithms."""
    if not has_algorithm(precision) or (arithmetic := arithmetic_of(lhs, rhs, precision)) is None:
        return precision
    return precision_of(lax.Precision.HIGHEST if arithmetic in ("f32", "f8") else lax.Precision.DEFAULT)


def joined_axes(batch: Sequence[Any], *operands: Sequence[Any]) -> int:
    """How many axes a batch has if neighbours along which the same operands broadcast are one."""
    kinds = [tuple(d == 1 for d in sizes) for size, *sizes in zip(batch, *operands, strict=True) if size != 1]
    return sum(kind != before for kind, before in zip(kinds, [None, *kinds], strict=False))


class _MatmulKernel(Kernel):
    """activation(scale lhs @ rhs + bias), with the preactivation as a second result on request.

    Operands: lhs, rhs, the scale if the spec says so, the bias if there is one more. All have the result's rank; along
    a batch axis each has the result's size or 1; the scale has size 1 along all others, the bias may along any. On the
    CPU the kernel is XLA's own dot.
    """

    def __call__(self, lhs, rhs, scale, bias, spec: Spec, preactivation: bool = False) -> list[jax.Array]:
        operands = [x for x in (lhs, rhs, scale, bias) if x is not None]
        return self.bind(*operands, spec=spec._replace(scaled=scale is not None), preactivation=preactivation)

    @staticmethod
    def _named(operands, spec):
        """lhs, rhs, scale and bias; None where there is none."""
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
        """The operands and the spec with m, n and k one axis each, and a function that undoes it for the results.

        One matrix for the whole batch: the batch is folded into the rows, [..., m, k] @ [k, n] -> [... m, k] @ [k, n].
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
            # XLA:CPU does so itself, but forgets it for products that it reshapes, which then fail when they run
            # ("Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32", jaxlib 0.11.2).
            spec = spec._replace(precision=_plain_precision(lhs.dtype, rhs.dtype, spec.precision))
            lhs, rhs = lhs.astype(np.float32), rhs.astype(np.float32)
        return super()._lower(platform, lhs, rhs, *rest, spec=spec, preactivation=preactivation)

    def plain(self, *operands, spec, preactivation) -> list[jax.Array]:
        return self._on_xla(*operands, spec=spec, preactivation=preactivation)

    def _on_xla(
        self, *operands, spec, preactivation, sums: np.dtype | None = None, padded: bool = False
    ) -> list[jax.Array]:
        """XLA's own dot; `sums`: its result's dtype, by default that in which the epilogue is computed.

        padded: k = 1 to 2, with zeros.
        """
        flat, spec, restore = self._flat(*operands, spec=spec)
        lhs, rhs, scale, bias = self._named(flat, spec)
        rank = lhs.ndim
        if padded:
            lhs, rhs = (x.reshape(*x.shape[:-2], 1, math.prod(x.shape[-2:])) for x in (lhs, rhs))
            lhs, rhs = (jnp.pad(x, [*[(0, 0)] * (rank - 2), (0, 1), (0, 0)]) for x in (lhs, rhs))
            spec = spec._replace(lhs_transposed=True, rhs_transposed=False)
        precision = _plain_precision(lhs.dtype, rhs.dtype, spec.precision)
        wide = sums or accumulator(lhs.dtype, spec.dtype)
        if lhs.dtype != rhs.dtype:  # 8-bit floats, for which jnp.matmul defines no promotion
            lhs, rhs = (x.astype(accumulator(spec.dtype)) for x in (lhs, rhs))
        batch = jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
        shared = [a for a in range(rank - 2) if lhs.shape[a] == rhs.shape[a]]
        if len(shared) < rank - 2:  # operands that broadcast along a batch axis: let jnp.matmul arrange it
            lhs = jnp.swapaxes(lhs, -1, -2) if spec.lhs_transposed else lhs
            rhs = jnp.swapaxes(rhs, -1, -2) if spec.rhs_transposed else rhs
            z = jnp.matmul(lhs, rhs, precision=precision, preferred_element_type=wide)
        else:
            contract = (
                (rank - 2 if spec.lhs_transposed else rank - 1,),
                (rank - 1 if spec.rhs_transposed else rank - 2,),
            )
            axes = tuple(range(len(batch)))
            z = lax.dot_general(lhs, rhs, (contract, (axes, axes)), precision=precision, preferred_element_type=wide)
        return restore(_finished(z, scale, bias, spec, preactivation))

    def choice(self, *operands, spec, preactivation=False) -> choices.Choice:
        """Which kernel computes the product on this machine's GPU, or on an H200 if there is none."""
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
        """Where k is split, the partial products are summed, then come bias and activation."""
        lhs, rhs, scale, bias = self._named(operands, spec)
        layout = self.layout(*operands, spec=spec, preactivation=preactivation)
        over = [axis for name in layout.summed for axis in shards.get(name, ())]
        if any(name.startswith(("m", "n", "k")) for name in shards):  # a part of a triangle is none
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
        """A batch axis; where rhs is not mapped and there is no other, an axis of m instead: still one product.

        With neither lhs nor rhs mapped, the product is taken once, and finished with each entry's scale and bias.
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
        """With respect to the bias and one of lhs, rhs and scale."""
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
        # Triangles on the left are the kernel's; one on the right is multiplied as a whole.
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
    """The results of sums z, in whose dtype they are scaled and biased."""
    z = z if scale is None else z * scale.astype(z.dtype)
    z = z if bias is None else z + bias.astype(z.dtype)
    out = ACTIVATIONS[spec.activation](z.astype(accumulator(z.dtype))).astype(spec.dtype)
    return [out, z.astype(spec.dtype)] if preactivation else [out]


kernel = _MatmulKernel("matmul", plain_on=("cpu",))


def _product(spec, scale, like, lhs, lhs_transposed, rhs, rhs_transposed, counts, triangle):
    """scale lhs @ rhs as the cotangent of `like`: of its dtype, summed over batch axes along which it broadcasts."""
    if lhs.dtype != rhs.dtype:
        algorithm = has_algorithm(spec.precision)
        if algorithm and like.dtype.itemsize == 2:
            wide = like.dtype  # to which the algorithm rounds the cotangent, as XLA's dot would
        else:
            wide = promoted(*(x.dtype for x in (lhs, rhs) if x.dtype.itemsize > 1))
            if algorithm:  # of 8 bits, which hold no cotangent. TF32 keeps as many bits as bf16 has.
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

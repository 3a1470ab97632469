"""matmul and dot_general."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad

from jaxops import _arguments as arguments
from jaxops._kernel import Kernel, jvp_of_linear, warn_fallback
from jaxops._rows import accumulator, expand_rank, sum_to
from jaxops._sharding import Layout
from jaxops.ops import _matmul_choice as choices


def _gelu(z):
    return jax.nn.gelu(z, approximate=True)


def _gelu_exact(z):
    return jax.nn.gelu(z, approximate=False)


#: The activations by name; the handlers number them in this order.
_ACTIVATIONS = {None: lambda z: z, "relu": jax.nn.relu, "gelu": _gelu, "gelu_exact": _gelu_exact, "silu": jax.nn.silu}


class _Spec(NamedTuple):
    """What a matmul does, apart from its operands.

    lhs is [..., m, k], or [..., k, m] if transposed; rhs is [..., k, n], or [..., n, k] if transposed. m, n and k stand
    for any number of axes each: the handlers get them as one, and before that every axis can be sharded.
    """

    lhs_transposed: bool
    rhs_transposed: bool
    dtype: np.dtype  # of the result
    activation: str | None = None
    precision: Any = None  # as `_precision` gives it
    counts: tuple[int, int, int] = (1, 1, 1)  # of the axes of m, n and k

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


def _precision(precision):
    """What a valid `precision` means under `jax.default_matmul_precision`: one for each operand, or an algorithm."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    if isinstance(precision, str):
        precision = _PRECISIONS.get(precision) or lax.DotAlgorithmPreset[precision]
    if precision is None:
        precision = lax.Precision.DEFAULT
    if isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return lax.Precision.DEFAULT if precision == lax.DotAlgorithmPreset.DEFAULT else precision
    pair = precision if isinstance(precision, tuple | list) else (precision, precision)
    return tuple(_PRECISIONS[p] if isinstance(p, str) else p for p in pair)


_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")

#: The arithmetic of the kernels for each kind of operands under the dot algorithms that name one.
_ALGORITHMS = {
    "bfloat16": {"BF16_BF16_F32": "16bit"},
    "float16": {"F16_F16_F32": "16bit"},
    "float32": {"TF32_TF32_F32": "tf32", "TF32_TF32_F32_X3": "f32", "F32_F32_F32": "f32"},
    "8 bits": {"ANY_F8_ANY_F8_F32": "f8", "ANY_F8_ANY_F8_F32_FAST_ACCUM": "f8 fast"},
}


def _arithmetic(lhs, rhs, precision) -> str | None:
    """How the kernels multiply operands of these dtypes with a `_precision`; None: they do not.

    As XLA does: f32 is rounded to TF32 unless the highest precision is asked for.
    """
    names = {np.dtype(lhs).name, np.dtype(rhs).name}
    kind = "8 bits" if names <= set(_EIGHT_BITS) else names.pop() if len(names) == 1 else None
    if kind not in _ALGORITHMS:
        return None
    if isinstance(precision, lax.DotAlgorithmPreset):
        return _ALGORITHMS[kind].get(precision.name)
    if isinstance(precision, lax.DotAlgorithm):
        return None
    highest = lax.Precision.HIGHEST in precision
    return {"float32": "f32" if highest else "tf32", "8 bits": "f8" if highest else "f8 fast"}.get(kind, "16bit")


def _plain_precision(lhs, rhs, precision):
    """The precision with which XLA's dot does what the kernels do; not every platform has dot algorithms."""
    if isinstance(precision, tuple) or (arithmetic := _arithmetic(lhs, rhs, precision)) is None:
        return precision
    return lax.Precision.HIGHEST if arithmetic in ("f32", "f8") else lax.Precision.DEFAULT


class _MatmulKernel(Kernel):
    """activation(lhs @ rhs + bias), with the preactivation as a second result on request.

    All operands have the result's rank; along a batch axis each has the result's size or 1; the bias may have size 1
    along any axis. On the CPU the kernel is XLA's own dot.
    """

    def __call__(self, lhs, rhs, bias, spec: _Spec, preactivation: bool = False) -> list[jax.Array]:
        operands = [lhs, rhs] if bias is None else [lhs, rhs, bias]
        return self.bind(*operands, spec=spec, preactivation=preactivation)

    def abstract(self, lhs, rhs, *bias, spec, preactivation) -> list[ShapedArray]:
        batch, m, k, k2, n = spec.sizes(lhs, rhs)
        if k != k2 or rhs.ndim != len(batch) + len(k2) + len(n):
            raise TypeError(f"matmul: lhs {lhs.shape} and rhs {rhs.shape} do not fit together")
        shape = (*batch, *m, *n)
        if bias and jnp.broadcast_shapes(bias[0].shape, shape) != shape:
            raise TypeError(f"matmul: bias {bias[0].shape} does not broadcast to the result's shape {shape}")
        return [ShapedArray(shape, spec.dtype)] * (2 if preactivation else 1)

    def layout(self, lhs, rhs, *bias, spec, preactivation) -> Layout:
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
        sizes = self.abstract(lhs, rhs, spec=spec, preactivation=False)[0].shape
        operands += [[name if d == s else "" for name, d, s in zip(result, x.shape, sizes, strict=True)] for x in bias]
        return Layout.of(operands, [result] * (2 if preactivation else 1), k)

    def _flat(self, lhs, rhs, *bias, spec):
        """The operands and the spec with m, n and k one axis each, and a function that undoes it for the results.

        One matrix for the whole batch: the batch is folded into the rows, [..., m, k] @ [k, n] -> [... m, k] @ [k, n].
        """
        batch, m, k, _, n = spec.sizes(lhs, rhs)
        rows, columns, contracted = map(math.prod, (m, n, k))
        left, right = (rows, contracted), (contracted, columns)
        lhs = lhs.reshape(*lhs.shape[: len(batch)], *left[:: -1 if spec.lhs_transposed else 1])
        rhs = rhs.reshape(*rhs.shape[: len(batch)], *right[:: -1 if spec.rhs_transposed else 1])
        if bias:
            given, end = bias[0].shape, len(batch) + len(m)
            parts = [
                part if all(d == 1 for d in part) else whole
                for part, whole in ((given[len(batch) : end], m), (given[end:], n))
            ]
            wide = jnp.broadcast_to(bias[0], (*given[: len(batch)], *parts[0], *parts[1]))
            bias = [wide.reshape(*given[: len(batch)], *map(math.prod, parts))]
        one_matrix = batch and all(d == 1 for d in rhs.shape[:-2]) and not spec.lhs_transposed
        if one_matrix and all(d == 1 for x in bias for d in x.shape[:-1]):
            lhs, rhs = lhs.reshape(math.prod(batch) * rows, contracted), rhs.reshape(rhs.shape[-2:])
            bias = [x.reshape(1, x.shape[-1]) for x in bias]
        shape = (*batch, *m, *n)
        return [lhs, rhs, *bias], spec._replace(counts=(1, 1, 1)), lambda out: [x.reshape(shape) for x in out]

    def plain(self, *operands, spec, preactivation) -> list[jax.Array]:
        return self._on_xla(*operands, spec=spec, preactivation=preactivation)

    def _on_xla(self, *operands, spec, preactivation, sums: np.dtype | None = None) -> list[jax.Array]:
        """XLA's own dot; `sums`: its result's dtype, by default that in which bias and activation are applied."""
        (lhs, rhs, *bias), spec, restore = self._flat(*operands, spec=spec)
        rank = lhs.ndim
        precision = _plain_precision(lhs.dtype, rhs.dtype, spec.precision)
        wide = sums or accumulator(lhs.dtype, spec.dtype)
        if lhs.dtype != rhs.dtype:  # 8-bit floats, for which jnp.matmul defines no promotion
            lhs, rhs = (x.astype(accumulator(spec.dtype)) for x in (lhs, rhs))
        batch = np.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
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
        z = z + bias[0].astype(wide) if bias else z
        out = _ACTIVATIONS[spec.activation](z).astype(spec.dtype)
        return restore([out, z.astype(spec.dtype)] if preactivation else [out])

    def choice(self, lhs, rhs, *bias, spec, preactivation=False) -> choices.Choice:
        """Which kernel computes the product on this machine's GPU, or on an H200 if there is none."""
        arithmetic = _arithmetic(lhs.dtype, rhs.dtype, spec.precision)
        if arithmetic is None:
            return choices.Choice("xla", f"no kernel is as fast for {lhs.dtype}")
        out, *_ = self.abstract(lhs, rhs, *bias, spec=spec, preactivation=preactivation)
        product = choices.Product(
            *out.shape[-2:],
            lhs.shape[-2 if spec.lhs_transposed else -1],
            arithmetic,
            spec.lhs_transposed,
            spec.rhs_transposed,
            math.prod(out.shape[:-2]),
            out.dtype.itemsize,
        )
        return choices.choose(product, choices.local_device(), bool(bias) or spec.activation is not None)

    def _choice_of_call(self, *operands, spec, preactivation) -> choices.Choice:
        flat = jax.eval_shape(lambda *arrays: self._flat(*arrays, spec=spec)[0], *operands)
        return self.choice(*flat, spec=spec._replace(counts=(1, 1, 1)), preactivation=preactivation)

    def is_chosen(self, *operands, **params) -> bool:
        return self._choice_of_call(*operands, **params).kernel != "xla"

    def flops(self, lhs, rhs, *bias, spec, preactivation) -> int:
        del bias, preactivation
        batch, m, k, _, n = spec.sizes(lhs, rhs)
        return 2 * math.prod((*batch, *m, *k, *n))

    def explain(self, *operands, spec, preactivation) -> str:
        choice = self._choice_of_call(*operands, spec=spec, preactivation=preactivation)
        done = ", ".join(part for part in (spec.activation, "keeps the preactivation" if preactivation else "") if part)
        return f"on a GPU {choice}" + (f"; {done}" if done else "")

    def call_target(self, *operands, spec, preactivation) -> list[jax.Array]:
        operands, spec, restore = self._flat(*operands, spec=spec)
        lhs, rhs, *_ = operands
        choice = self.choice(*operands, spec=spec, preactivation=preactivation)
        if choice.kernel == "xla":
            # A product alone is asked for in its own dtype, as jax.numpy asks for it.
            alone = len(operands) == 2 and spec.activation is None
            sums = spec.dtype if alone else None
            return restore(self._on_xla(*operands, spec=spec, preactivation=preactivation, sums=sums))
        results = self.abstract(*operands, spec=spec, preactivation=preactivation)
        count, out = len(results), results[0]
        arithmetic = choices.ARITHMETICS.get(_arithmetic(lhs.dtype, rhs.dtype, spec.precision))
        terms = arithmetic.terms if choice.tile else 1
        for x, copy in ((lhs, choice.lhs_copy), (rhs, choice.rhs_copy)):
            if copy:
                rows, columns = x.shape[-2:][:: -1 if copy == 2 else 1]
                line = 128 // x.dtype.itemsize
                parts = 2 if terms == 3 else 1
                padded = math.ceil(columns / line) * line
                results.append(ShapedArray((math.prod(x.shape[:-2]) * parts, rows, padded), x.dtype))
        if choice.partials:
            shape = (choice.splits, math.prod(out.shape[:-2]), *out.shape[-2:])
            results.append(ShapedArray(shape, np.dtype("float32")))
        if terms == 3:
            results.append(ShapedArray((1,), np.dtype("int32")))
        tile = choice.tile or choices.Tile(0, 0, False, 0)
        out = self.ffi_call(
            results,
            *operands,
            lhs_transposed=spec.lhs_transposed,
            rhs_transposed=spec.rhs_transposed,
            activation=np.int32(list(_ACTIVATIONS).index(spec.activation)),
            has_preactivation=preactivation,
            tile_rows=np.int32(tile.rows),
            tile_columns=np.int32(tile.columns),
            ping_pong=tile.ping_pong,
            band=np.int32(tile.band),
            terms=np.int32(terms),
            splits=np.int32(choice.splits),
            promote=np.int32(choice.promote),
            lhs_copy=np.int32(choice.lhs_copy),
            rhs_copy=np.int32(choice.rhs_copy),
            has_partials=choice.partials,
        )
        return restore(out[:count])

    def local(self, run, shards, scatter, *operands, spec, preactivation) -> list[jax.Array]:
        """Where k is split, the partial products are summed, then come bias and activation."""
        lhs, rhs, *bias = operands
        layout = self.layout(*operands, spec=spec, preactivation=preactivation)
        over = [axis for name in layout.summed for axis in shards.get(name, ())]
        if not over:
            return run(*operands, spec=spec, preactivation=preactivation)
        (z,) = run(lhs, rhs, spec=spec._replace(activation=None), preactivation=False)
        for name, axes in scatter.items():
            dimension = layout.results[0].index(name)
            z = lax.psum_scatter(z, axes, scatter_dimension=dimension, tiled=True)
            over = [axis for axis in over if axis not in axes]
            size = z.shape[dimension]
            bias = [
                lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dimension)
                if x.shape[dimension] != 1
                else x
                for x in bias
            ]
        z = lax.psum(z, over) if over else z
        wide = accumulator(lhs.dtype, spec.dtype)
        z = z.astype(wide) + bias[0].astype(wide) if bias else z.astype(wide)
        out = _ACTIVATIONS[spec.activation](z).astype(spec.dtype)
        return [out, z.astype(spec.dtype)] if preactivation else [out]

    def batch(self, operands, dims, *, spec, preactivation):
        """A batch axis; where rhs is not mapped and there is no other, an axis of m instead: still one product."""
        moved = [
            jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(operands, dims, strict=True)
        ]
        if dims[0] is dims[1] is None:  # a bias for each entry, of one product
            moved[0] = jnp.broadcast_to(moved[0], (operands[2].shape[dims[2]], *operands[0].shape))
        m, n, k = spec.counts
        if dims[1] is None and operands[1].ndim == n + k and not spec.lhs_transposed:
            moved[1] = operands[1]
            spec = spec._replace(counts=(m + 1, n, k))
        out = self.bind(*moved, spec=spec, preactivation=preactivation)
        return out, [0] * len(out)

    def jvp(self, primals, tangents, *, spec, preactivation):
        lhs, rhs, *bias = primals
        out = self.bind(*primals, spec=spec, preactivation=preactivation or spec.activation is not None)
        linear = spec._replace(activation=None)
        dz = ad.Zero(jax.typeof(out[0]))
        for i, other in ((0, rhs), (1, lhs)):
            if not isinstance(tangents[i], ad.Zero):
                pair = (tangents[i], other) if i == 0 else (other, tangents[i])
                dz = ad.add_tangents(dz, self.bind(*pair, spec=linear, preactivation=False)[0])
        if bias and not isinstance(tangents[2], ad.Zero):  # in the accumulator's dtype, in which its gradient is summed
            dz = ad.instantiate_zeros(dz)
            dz = dz.astype(tangents[2].dtype) + tangents[2]
        moved = [dz.astype(spec.dtype)]
        if spec.activation is not None:
            wide = dz.astype(accumulator(spec.dtype))
            moved.insert(0, _activation_jvp.bind(out[1], wide, activation=spec.activation, dtype=spec.dtype)[0])
        count = 2 if preactivation else 1
        return out[:count], moved[:count]

    def transpose(self, cotangents, lhs, rhs, *, spec, preactivation):
        """Of the product alone, with respect to one operand."""
        del preactivation
        (dz,) = cotangents
        m, n, k = spec.counts
        if ad.is_undefined_primal(lhs):
            left = (
                (rhs, spec.rhs_transposed, dz, True, (k, m, n))
                if spec.lhs_transposed
                else (dz, False, rhs, not spec.rhs_transposed, (m, k, n))
            )
            return [_product(spec, lhs.aval, *left), None]
        right = (
            (dz, True, lhs, spec.lhs_transposed, (n, k, m))
            if spec.rhs_transposed
            else (lhs, not spec.lhs_transposed, dz, False, (k, n, m))
        )
        return [None, _product(spec, rhs.aval, *right)]


_kernel = _MatmulKernel("matmul", plain_on=("cpu",))


class _ActivationJvp(Kernel):
    """dy = f'(z) dz, elementwise: what keeps the backward pass starting from the preactivation z, not from f'(z)."""

    def abstract(self, z, dz, *, activation, dtype) -> list[ShapedArray]:
        del dz, activation
        return [ShapedArray(z.shape, dtype)]

    def layout(self, z, dz, **_) -> Layout:
        del dz
        names = [f"x{a}" for a in range(z.ndim)]
        return Layout.of([names] * 2, [names])

    def plain(self, z, dz, *, activation, dtype) -> list[jax.Array]:
        wide = accumulator(z.dtype)
        (dy,) = jax.vjp(_ACTIVATIONS[activation], z.astype(wide))[1](dz.astype(wide))
        return [dy.astype(dtype)]

    def batch(self, operands, dims, **params):
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        moved = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        return self.bind(*moved, **params), [0]

    def jvp(self, primals, tangents, **params):
        return jvp_of_linear(self, [False, True], primals, tangents, **params)

    def transpose(self, cotangents, z, dz, *, activation, dtype):
        del dtype
        return [None, *self.bind(z, cotangents[0], activation=activation, dtype=dz.aval.dtype)]


_activation_jvp = _ActivationJvp("activation_jvp", target=False)


def _product(spec, like, lhs, lhs_transposed, rhs, rhs_transposed, counts):
    """lhs @ rhs as the cotangent of `like`: of its dtype, summed over the batch axes along which it broadcasts."""
    if lhs.dtype != rhs.dtype:
        eight_bits = [x.dtype.itemsize == 1 for x in (lhs, rhs)]
        wide = jnp.result_type(*(x for x, eight in zip((lhs, rhs), eight_bits, strict=True) if not eight))
        lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    product = _Spec(lhs_transposed, rhs_transposed, np.dtype(lhs.dtype), None, spec.precision, counts)
    batch, *_ = product.sizes(lhs, rhs)
    if like.dtype != lhs.dtype or any(a != b for a, b in zip(batch, like.shape, strict=False)):
        product = product._replace(dtype=accumulator(lhs.dtype))
    (out,) = _kernel(lhs, rhs, None, product)
    return sum_to(out, like.shape).astype(like.dtype)


@functools.lru_cache(maxsize=1024)
def _reference_shape(function, a, b, x64):
    """The result's shape and dtype as the reference has it, and the reference's own errors for bad operands."""
    del x64  # part of the cache's key: dtypes promote differently under it
    return jax.eval_shape(function, a, b)


@dataclasses.dataclass(frozen=True)
class _Reference:
    """jnp.matmul or lax.dot_general with its options: hashable, so that `_reference_shape` can cache."""

    dimension_numbers: Any
    precision: Any
    preferred: Any

    def __call__(self, a, b, **options):
        options |= {"precision": self.precision, "preferred_element_type": self.preferred}
        if self.dimension_numbers is None:
            return jnp.matmul(a, b, **options)
        return lax.dot_general(a, b, self.dimension_numbers, **options)


def _plan(op, a, b, precision, preferred, out_sharding, dimension_numbers=None):
    """The reference, its result's shape and dtype, the dtypes of the kernels' operands or None, the `_precision`."""
    try:
        preferred = None if preferred is None else np.dtype(preferred)
    except TypeError as error:
        raise TypeError(f"{op}: preferred_element_type must be a dtype or None, got {preferred!r}") from error
    precision = tuple(precision) if isinstance(precision, list) else precision
    reference = _Reference(dimension_numbers, precision, preferred)
    avals = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b))
    out = _reference_shape(reference, *avals, jax.config.jax_enable_x64)
    dtypes, names = (a.dtype, b.dtype), {a.dtype.name, b.dtype.name}
    wanted = _precision(precision)
    if names <= set(_EIGHT_BITS):
        fits = out.dtype in (np.float32, jnp.bfloat16)
    else:
        try:
            common = np.dtype(jnp.result_type(*dtypes))
        except ValueError:  # no promotion is defined, as from 8-bit floats
            common = None
        fits = common is not None and common.name in arguments.FLOATS and out.dtype in (common, accumulator(common))
        dtypes = (common, common)
    why = None
    if out_sharding is not None:
        why = "out_sharding is left to XLA's dot"
    elif not fits:
        why = f"there is no kernel for {a.dtype} and {b.dtype} with a result of {out.dtype}"
    elif not isinstance(wanted, tuple) and _arithmetic(*dtypes, wanted) is None:
        why = f"there is no kernel for the dot algorithm {getattr(wanted, 'name', wanted)} of {a.dtype} and {b.dtype}"
    if why:
        warn_fallback(op, why)
        dtypes = None
    return reference, out, dtypes, wanted


def matmul(
    a: jax.typing.ArrayLike,
    b: jax.typing.ArrayLike,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    bias: jax.typing.ArrayLike | None = None,
    activation: str | None = None,
) -> jax.Array:
    r"""Matrix product with the semantics of :func:`jax.numpy.matmul`: :math:`\mathrm{activation}(a b + bias)`.

    Sums are kept in f32 (f64 for f64); bias and activation are applied to them before the result is rounded. On a GPU
    f32 operands are rounded to TF32 unless the highest precision is asked for, as XLA's are; then the error is that of
    f32 arithmetic. Which kernel a GPU runs follows from shapes, dtypes and the device by a table of measured rates;
    where XLA's own dot is faster, it is chosen, and :func:`jaxops.explain` says so. On the CPU, and for dtypes or
    options without a kernel (with a :class:`jaxops.FallbackWarning`), the product is XLA's own dot.

    Args:
      a: array of 1 or more dimensions, `[..., m, k]`; 1-D as in numpy.
      b: array of 1 or more dimensions, `[..., k, n]`; 1-D as in numpy. Leading axes broadcast.
      precision: as in jax.numpy.matmul; see above.
      preferred_element_type: dtype of the result; by default the one to which `a` and `b` promote.
      out_sharding: as in jax.numpy.matmul.
      bias: array that broadcasts to the result's shape; added in f32 (f64).
      activation: None, "relu", "gelu" (the tanh form), "gelu_exact" (with erf) or "silu".

    Returns:
      The product, of the shape that numpy gives it.

    Raises:
      TypeError: an operand is a list, or the contracted axes differ.
      ValueError: an operand is a scalar, `activation` is unknown, or `bias` does not broadcast.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.matmul(jnp.eye(2), jnp.array([[1.0, -2.0], [3.0, 4.0]]), bias=jnp.array([0.0, 1.0]), activation="relu")
      Array([[1., 0.],
             [3., 5.]], dtype=float32)
    """
    a, b = arguments.array("matmul", "a", a), arguments.array("matmul", "b", b)
    if not isinstance(activation, str | None) or activation not in _ACTIVATIONS:
        accepted = ", ".join(map(repr, _ACTIVATIONS))
        raise ValueError(f"matmul: activation must be one of {accepted}, got {activation!r}")
    reference, out, dtypes, wanted = _plan("matmul", a, b, precision, preferred_element_type, out_sharding)
    if bias is not None:
        bias = arguments.real_array("matmul", "bias", bias)
        if arguments.joint_shape("matmul", result=out.shape, bias=bias.shape) != out.shape:
            raise ValueError(f"matmul: bias must broadcast to the result's shape {out.shape}, got {bias.shape}")
    if dtypes is None:
        return _compose_epilogue(reference(a, b, out_sharding=out_sharding), bias, activation, out.dtype)

    rank = max(a.ndim, b.ndim, 2)
    lhs = (a[None, :] if a.ndim == 1 else a).astype(dtypes[0])
    rhs = (b[:, None] if b.ndim == 1 else b).astype(dtypes[1])
    if bias is not None:
        bias = expand_rank(bias.astype(accumulator(*dtypes)), len(out.shape))
        bias = jnp.expand_dims(bias, [axis for axis, x in ((-2, a), (-1, b)) if x.ndim == 1])
        bias = expand_rank(bias, rank)
    # With one matrix for the whole batch, the batch axes are rows.
    one_matrix = all(d == 1 for d in rhs.shape[:-2]) and (bias is None or all(d == 1 for d in bias.shape[:-1]))
    lhs = expand_rank(lhs, rank)
    rhs = rhs.reshape(rhs.shape[-2:]) if one_matrix else expand_rank(rhs, rank)
    counts = (rank - 1, 1, 1) if one_matrix else (1, 1, 1)
    spec = _Spec(False, False, np.dtype(out.dtype), activation, wanted, counts)
    return _kernel(lhs, rhs, bias, spec)[0].reshape(out.shape)


def _compose_epilogue(out, bias, activation, dtype):
    """Bias and activation around XLA's dot, for what has no kernel."""
    if bias is not None:
        out = out + bias
    return _ACTIVATIONS[activation](out).astype(dtype)


def _ordered(x, batch, first, second):
    """x with its axes in the order batch, first, second; or batch, second, first (True), if they already lie so."""
    straight, swapped = (*batch, *first, *second), (*batch, *second, *first)
    if swapped == tuple(range(x.ndim)) and straight != swapped:
        return x, True
    return (x if straight == tuple(range(x.ndim)) else jnp.transpose(x, straight)), False


def dot_general(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """General contraction with the semantics of :func:`jax.lax.dot_general`, on the kernels of :func:`jaxops.matmul`.

    Fits wherever a dot_general can be injected: `flax.linen.Dense(dot_general=jaxops.dot_general)`,
    `jax.numpy.einsum(..., _dot_general=jaxops.dot_general)`.

    Args:
      lhs: array.
      rhs: array; dtypes may differ, both are then promoted.
      dimension_numbers: `((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))`, axes of each operand.
      precision: as in jax.lax.dot_general; see :func:`jaxops.matmul`.
      preferred_element_type: dtype of the result; by default the one to which the operands promote.
      out_sharding: as in jax.lax.dot_general.

    Returns:
      The contraction: batch axes first, then the free axes of `lhs`, then those of `rhs`.

    Raises:
      TypeError, ValueError: as jax.lax.dot_general, for axes that do not exist or do not match.

    Example:
      >>> import jax.numpy as jnp, jaxops
      >>> jaxops.dot_general(jnp.ones((2, 3)), jnp.ones((4, 3)), (((1,), (1,)), ((), ()))).shape
      (2, 4)
    """
    lhs, rhs = arguments.array("dot_general", "lhs", lhs), arguments.array("dot_general", "rhs", rhs)
    try:
        numbers = tuple(
            tuple(tuple(map(operator.index, axes)) for axes in (lhs_axes, rhs_axes))
            for lhs_axes, rhs_axes in dimension_numbers
        )
        _, _ = numbers
    except (TypeError, ValueError) as error:
        raise TypeError(
            "dot_general: dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), "
            f"sequences of ints, got {dimension_numbers!r}"
        ) from error
    reference, out, dtypes, wanted = _plan(
        "dot_general", lhs, rhs, precision, preferred_element_type, out_sharding, numbers
    )
    if dtypes is None:
        return reference(lhs, rhs, out_sharding=out_sharding)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    order = np.argsort(lhs_contract)
    lhs_contract, rhs_contract = ([axes[i] for i in order] for axes in (lhs_contract, rhs_contract))
    lhs_free = [a for a in range(lhs.ndim) if a not in lhs_contract and a not in lhs_batch]
    rhs_free = [a for a in range(rhs.ndim) if a not in rhs_contract and a not in rhs_batch]
    left, lhs_transposed = _ordered(lhs.astype(dtypes[0]), lhs_batch, lhs_free, lhs_contract)
    right, rhs_transposed = _ordered(rhs.astype(dtypes[1]), rhs_batch, rhs_contract, rhs_free)
    counts = (len(lhs_free), len(rhs_free), len(lhs_contract))
    spec = _Spec(lhs_transposed, rhs_transposed, np.dtype(out.dtype), None, wanted, counts)
    return _kernel(left, right, None, spec)[0]

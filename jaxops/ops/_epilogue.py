"""A matmul's epilogue, y = activation(z + bias), and its derivatives, each in one pass over the result."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad
from jax.nn import gelu, relu, silu

from jaxops._kernel import Kernel, jvp_of_linear
from jaxops._rows import accumulator
from jaxops._sharding import Layout, reshard_like


def _gelu(z):
    return gelu(z, approximate=True)


def _gelu_exact(z):
    return gelu(z, approximate=False)


#: The activations by name; the handlers number them in this order.
ACTIVATIONS = {None: lambda z: z, "relu": relu, "gelu": _gelu, "gelu_exact": _gelu_exact, "silu": silu}


def activation_index(activation: str | None) -> np.int32:
    return np.int32(list(ACTIVATIONS).index(activation))


def _differentiate(activation, z, dz):
    """f'(z) dz, in dz's dtype; it is its own transpose."""
    if activation is None:
        return dz
    y, vjp = jax.vjp(ACTIVATIONS[activation], z.astype(dz.dtype))
    return vjp(reshard_like(dz, jax.typeof(y)))[0]


def _map_first(operands, dims) -> list[jax.Array]:
    """The operands with the mapped axis in front; unmapped operands have size 1 there."""
    return [jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]


class _EpilogueJvp(Kernel):
    """dy = f'(z) (dz + dbias): its own primitive, so that it is transposed as a whole, into one kernel.

    Operands: z unless the activation is None; then dz and dbias, if `has` names them. dbias has the result's rank, and
    may have size 1 along any axis.
    """

    def _named(self, operands, activation, has):
        rest = iter(operands)
        z = next(rest) if activation is not None else None
        return z, *(next(rest) if name in has else None for name in ("dz", "dbias"))

    def abstract(self, first, *_, activation, dtype, has) -> list[ShapedArray]:
        assert activation is not None or "dz" in has
        return [ShapedArray(first.shape, dtype)]

    def layout(self, *operands, activation, **_) -> Layout:
        del activation
        shape = operands[0].shape
        names = [f"x{a}" for a in range(len(shape))]
        sides = [[name if d == s else "" for name, d, s in zip(names, x.shape, shape, strict=True)] for x in operands]
        return Layout.of(sides, [names])

    def plain(self, *operands, activation, dtype, has) -> list[jax.Array]:
        z, *moved = self._named(operands, activation, has)
        wide = accumulator(*(x.dtype for x in operands))
        total = sum(x.astype(wide) for x in moved if x is not None)
        return [_differentiate(activation, z, jnp.broadcast_to(total, operands[0].shape)).astype(dtype)]

    def batch(self, operands, dims, *, activation, dtype, has):
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        whole = (activation is not None) + ("dz" in has)  # the first operands have the result's shape
        moved = [
            jnp.broadcast_to(x, (size, *x.shape[1:])) if i < whole else x
            for i, x in enumerate(_map_first(operands, dims))
        ]
        return self.bind(*moved, activation=activation, dtype=dtype, has=has), [0]

    def jvp(self, primals, tangents, *, activation, **params):
        linear = [activation is None, *(True for _ in primals[1:])]
        return jvp_of_linear(self, linear, primals, tangents, activation=activation, **params)

    def transpose(self, cotangents, *operands, activation, dtype, has):
        del dtype
        (dy,) = cotangents
        z, dz, dbias = self._named(operands, activation, has)
        wanted = [x.aval if x is not None and ad.is_undefined_primal(x) else None for x in (dz, dbias)]
        found = dict(zip(("dz", "dbias"), _transposed(activation, z, dy, *wanted), strict=True))
        return [None] * (activation is not None) + [found[name] for name in has]


def _transposed(activation, z, dy, dz, dbias):
    """The cotangents of dz and dbias, with the given types; None if the type is None."""
    summed = None if dbias is None else tuple(a for a, d in enumerate(dbias.shape) if d == 1)
    by_kernel = dz is not None and activation is not None
    operands = [dy] if activation is None else [z, dy]
    out = []
    if by_kernel or summed is not None:
        dtype = np.dtype(dz.dtype) if by_kernel else None
        out = _backward.bind(*operands, activation=activation, dtype=dtype, summed=summed)
    return [
        out[0] if by_kernel else None if dz is None else dy.astype(dz.dtype),
        None if summed is None else out[-1].astype(dbias.dtype),
    ]


class _EpilogueBackward(Kernel):
    """dz = f'(z) dy, and dbias: the unrounded dz summed over the axes `summed`, in a fixed order.

    Operands: z unless the activation is None; dy. Results: dz if its dtype is given, dbias if `summed` is given. If the
    summed axes are adjacent and other axes follow, one kernel pass writes both; otherwise XLA computes them.
    """

    def abstract(self, *operands, activation, dtype, summed) -> list[ShapedArray]:
        del activation
        dy = operands[-1]
        results = [] if dtype is None else [ShapedArray(dy.shape, dtype)]
        if summed is not None:
            shape = tuple(1 if a in summed else d for a, d in enumerate(dy.shape))
            results.append(ShapedArray(shape, accumulator(*(x.dtype for x in operands))))
        return results

    def layout(self, *operands, dtype, summed, **_) -> Layout:
        names = [f"x{a}" for a in range(operands[0].ndim)]
        results = [] if dtype is None else [names]
        if summed is not None:
            results.append(["" if a in summed else name for a, name in enumerate(names)])
        return Layout.of([names] * len(operands), results)

    def plain(self, *operands, activation, dtype, summed) -> list[jax.Array]:
        wide = accumulator(*(x.dtype for x in operands))
        dz = _differentiate(activation, operands[0], operands[-1].astype(wide))
        results = [] if dtype is None else [dz.astype(dtype)]
        return results if summed is None else [*results, jnp.sum(dz, axis=summed, keepdims=True)]

    def _groups(self, *operands, dtype, summed) -> tuple[int, int, int] | None:
        """The sizes before the summed axes, along them, and after them; None if the kernel cannot sum so."""
        shape = operands[-1].shape
        dtypes = {np.dtype(x.dtype) for x in operands} | ({np.dtype(dtype)} if dtype is not None else set())
        if len(dtypes) > 1 or not dtypes <= {np.dtype(d) for d in ("float32", "float16", jnp.bfloat16)}:
            return None
        if not all(isinstance(d, int) for d in shape) or not shape:
            return None
        over = range(len(shape) - 1) if summed is None else [a for a in summed if shape[a] != 1]
        first, last = (over[0], over[-1] + 1) if len(over) else (0, 0)
        if any(shape[a] != 1 and a not in over for a in range(first, last)) or last == len(shape):
            return None
        return math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:])

    def is_chosen(self, *operands, activation, dtype, summed) -> bool:
        del activation
        return self._groups(*operands, dtype=dtype, summed=summed) is not None

    def call_target(self, *operands, activation, dtype, summed) -> list[jax.Array]:
        sizes = self._groups(*operands, dtype=dtype, summed=summed)
        if sizes is None:
            return self.plain(*operands, activation=activation, dtype=dtype, summed=summed)
        groups, rows, columns = sizes
        results = self.abstract(*operands, activation=activation, dtype=dtype, summed=summed)
        flat = [x.update(shape=sizes) for x in results[: dtype is not None]]
        if summed is not None:
            # A block sums 32-pack chunks of rows: about four blocks a multiprocessor on an H200, whatever the device,
            # so that the sum's order does not depend on it.
            across = math.ceil(columns * operands[-1].dtype.itemsize / 512) * groups
            chunks = max(1, min(528 // across, rows // 32))
            flat.append(ShapedArray((groups, chunks, columns), results[-1].dtype))
            flat.append(results[-1].update(shape=(groups, columns)))
        out = self.ffi_call(
            flat,
            *(x.reshape(sizes) for x in operands),
            activation=activation_index(activation),
            has_dz=dtype is not None,
            has_dbias=summed is not None,
        )
        if summed is not None:
            del out[-2]
        return [x.reshape(like.shape) for x, like in zip(out, results, strict=True)]

    def local(self, run, shards, scatter, *operands, dtype, summed, **params) -> list[jax.Array]:
        del scatter
        out = run(*operands, dtype=dtype, summed=summed, **params)
        over = [axis for a in summed or () for axis in shards.get(f"x{a}", ())]
        return [*out[:-1], lax.psum(out[-1], over)] if over else out

    def batch(self, operands, dims, *, summed, **params):
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        moved = [jnp.broadcast_to(x, (size, *x.shape[1:])) for x in _map_first(operands, dims)]
        out = self.bind(*moved, summed=None if summed is None else tuple(a + 1 for a in summed), **params)
        return out, [0] * len(out)

    def jvp(self, primals, tangents, **params):
        linear = [False] * (len(primals) - 1) + [True]
        return jvp_of_linear(self, linear, primals, tangents, **params)

    def transpose(self, cotangents, *operands, activation, dtype, summed):
        *z, dy = operands
        names = (["dz"] if dtype is not None else []) + (["dbias"] if summed is not None else [])
        given = dict(zip(names, cotangents, strict=True))
        moved = [None if isinstance(given.get(n), ad.Zero) else given.get(n) for n in ("dz", "dbias")]
        return [None] * len(z) + [epilogue_jvp(activation, dy.aval, *(z or (None,)), *moved)]


def epilogue_jvp(activation, like, z, dz, dbias):
    """f'(z) (dz + dbias), with the type `like`. dz or dbias may be None for zero, but not both."""
    if activation is None:
        z = None
        if dbias is None:
            return dz.astype(like.dtype)
        dz = ad.instantiate_zeros(ad.Zero(like)) if dz is None else dz
    has = tuple(name for name, x in (("dz", dz), ("dbias", dbias)) if x is not None)
    operands = [x for x in (z, dz, dbias) if x is not None]
    return _jvp.bind(*operands, activation=activation, dtype=np.dtype(like.dtype), has=has)[0]


_jvp = _EpilogueJvp("epilogue_jvp", target=False)
_backward = _EpilogueBackward("epilogue_bwd", plain_on=("cpu",))

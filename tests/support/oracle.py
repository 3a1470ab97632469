"""The ops in closed form on numpy's widest float: values, cotangents and tangents, each with its rounding error.

Every result is a pair: exact values and noise, the absolute error that the op's arithmetic may have, to first order,
besides the result's rounding. It follows from the docstrings: sums and statistics in f32 (f64 as soon as an operand is
f64), intermediate tensors in the operands' and results' dtypes. `error` measures any op and input in one unit, in which
bounds are about one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import scipy.special

WIDE = np.longdouble


class Wanted(NamedTuple):
    """Exact values, and the error that a result may have besides its own rounding."""

    value: np.ndarray
    noise: np.ndarray


def wide(x, dtype=WIDE) -> np.ndarray:
    x = np.asarray(x)
    return (x if x.dtype.kind in "fiub" else x.astype(np.float64)).astype(dtype)


def eps(*dtypes) -> float:
    """The largest among floating dtypes: twice the relative rounding error."""
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes)


def tiny(dtype) -> float:
    """XLA counts smaller numbers as 0. float16 arithmetic is in float32."""
    return float(jnp.finfo(np.float32 if dtype == np.float16 else dtype).tiny)


def accumulator(*dtypes) -> np.dtype:
    return np.dtype("float64" if any(np.dtype(d) == np.float64 for d in dtypes) else "float32")


def error(got, wanted: Wanted) -> float:
    """The error of the worst element in `got`, in units of its dtype's rounding and the noise.

    In ulp where there is no noise. Infinities and NaN must be the same; an overflow may come early by the noise. Where
    XLA counts the exact value as 0 (`tiny`), 0 is without error.
    """
    got = np.asarray(got)
    value, noise = np.broadcast_to(wanted.value, got.shape), np.broadcast_to(wanted.noise, got.shape)
    assert got.shape == np.shape(wanted.value), f"shape {got.shape} instead of {np.shape(wanted.value)}"
    precision = jnp.finfo(got.dtype)
    real = np.float64 if precision.bits < 64 else WIDE
    limit = real(float(precision.max))
    with np.errstate(all="ignore"):
        unit = real(float(precision.eps)) * np.abs(value) + noise + real(float(precision.smallest_subnormal))
        sure = ~(np.isfinite(value) & ~(np.abs(value) + 4 * unit < limit))  # neither finite nor infinite for sure
        special = sure & ~np.isfinite(value)
        mine = wide(got, real)
        if not np.array_equal(mine[special], value[special], equal_nan=True):
            return math.inf
        finite = sure & ~special
        mine, value, unit = mine[finite], value[finite], unit[finite]
        mine = np.where((mine == 0) & (np.abs(value) < tiny(got.dtype)), value, mine)
        if not np.isfinite(mine).all():
            return math.inf
        if not mine.size:
            return 0.0
        return float(np.max(np.abs(mine - value) / unit))


def unbroadcast(x: Wanted, shape: Sequence[int], noise: float = 0.0) -> Wanted:
    """Summed over the axes along which a `shape` array was broadcast; noise: the sum's, relative to its terms."""

    def total(values):
        values = values.sum(tuple(range(values.ndim - len(shape))))
        return values.sum(tuple(a for a, d in enumerate(shape) if d != values.shape[a]), keepdims=True)

    value, noisy = np.broadcast_arrays(*x)
    return Wanted(total(value), total(noisy) + noise * total(np.abs(value)))


def _finite(x):
    return np.where(np.isfinite(x), x, 0)


class _Oracle:
    """Computes in float64; where the op does so itself, in numpy's widest float."""

    acc: np.dtype

    @property
    def real(self):
        return WIDE if self.acc == np.float64 else np.float64

    def wide(self, x) -> np.ndarray:
        return wide(x, self.real)


class Logits(_Oracle):
    """softmax or log_softmax of x scale + bias, in the operands' joint shape.

    Args:
      op: "softmax" or "log_softmax".
      x, scale, bias, where: as they are given to the op, absent as None.
      axes: the joint shape's axes, non-negative.
      dtype: the result's.
    """

    def __init__(self, op, x, scale=None, bias=None, where=None, *, axes, causal=False, dtype):
        self.op, self.axes, self.dtype = op, axes, np.dtype(dtype)
        self.operands = {"x": np.asarray(x), "scale": scale, "bias": bias}
        self.acc = accumulator(self.operands["x"].dtype, dtype)
        others = (np.shape(v) for v in (bias, where) if v is not None)
        self.shape = np.broadcast_shapes(np.shape(x), *others)
        self.mask = np.broadcast_to(True if where is None else np.asarray(where), self.shape)
        if causal:
            self.mask = self.mask & np.tril(np.ones(self.shape[-2:], bool))
        with np.errstate(all="ignore"):
            self.x = np.where(self.mask, self.wide(x), 0)
            self.scale = self.real(1) if scale is None else self.wide(scale)
            z, size = self.x * self.scale, np.zeros(self.shape, self.real)
            if scale is not None or bias is not None:
                size = np.abs(z) + (0 if bias is None else np.abs(self.wide(bias)))
            z = np.where(self.mask, z if bias is None else z + self.wide(bias), -np.inf)
            self.shifted = z - z.max(axes, keepdims=True, initial=-np.inf)
            exponentials = np.where(self.mask, np.exp(self.shifted), 0)
            total = self._sum(exponentials)
            self.p, self.log_total = exponentials / total, np.log(total)
            # Relative noise in exp(z - max), and in the probabilities.
            noise = eps(self.acc) * (1 + _finite(np.abs(self.shifted)) + _finite(size))
            self.relative = noise + self._sum(np.where(self.p > 0, self.p * noise, 0))
        self.tiny = max(map(tiny, (self.acc, self.operands["x"].dtype)))

    def _sum(self, values):
        return values.sum(self.axes, keepdims=True)

    def _visible(self, values, hidden=0):
        return np.where(self.mask, values, hidden)

    def value(self) -> tuple[Wanted, ...]:
        with np.errstate(all="ignore"):
            if self.op == "softmax":
                return (Wanted(self._visible(self.p), self._visible(self.p * self.relative) + self.tiny),)
            y = self._visible(self.shifted - self.log_total, -np.inf)
            return (Wanted(y, self._visible(self.relative + eps(self.acc) * np.abs(self.log_total))),)

    def _relative_in_products(self):
        """Relative and absolute noise in the probabilities that meet tangents and cotangents."""
        relative = self.relative + eps(self.acc) * np.abs(self.log_total)
        if self.op == "softmax":
            return relative + eps(self.dtype), float(jnp.finfo(self.dtype).smallest_subnormal) + self.tiny
        return relative, self.tiny

    def vjp(self, dy) -> dict[str, Wanted]:
        p, (relative, absolute) = self.p, self._relative_in_products()
        with np.errstate(all="ignore"):
            dy = self._visible(self.wide(dy))
            size = np.abs(dy)
            if self.op == "softmax":
                total = self._sum(p * size)
                dz = p * (dy - self._sum(p * dy))
                noise = p * (relative * (size + total) + self._sum(p * relative * size))
                noise += absolute * (size + total) + p * absolute * self._sum(size)
            else:
                dz = dy - p * self._sum(dy)
                noise = eps(self.acc) * size + p * (relative * np.abs(self._sum(dy)) + eps(self.acc) * self._sum(size))
                noise += absolute * np.abs(self._sum(dy))
            dz, noise = self._visible(dz), self._visible(noise)
            kept = noise + eps(*(v.dtype for v in self.operands.values() if v is not None), self.acc) * np.abs(dz)
            found = {"x": Wanted(dz * self.scale, noise * np.abs(self.scale))}
            if self.operands["scale"] is not None:
                found["scale"] = Wanted(dz * self.x, kept * np.abs(self.x) + self.tiny * np.abs(dz))
            if self.operands["bias"] is not None:
                found["bias"] = Wanted(dz, kept)
            return {
                name: unbroadcast(g, self.operands[name].shape, eps(self.operands[name].dtype, self.acc))
                for name, g in found.items()
            }

    def jvp(self, tangents: dict[str, np.ndarray]) -> tuple[Wanted, ...]:
        p, (relative, absolute) = self.p, self._relative_in_products()
        given = {name: self.wide(t) for name, t in tangents.items()}
        with np.errstate(all="ignore"):
            terms = [given["x"] * self.scale] if "x" in given else []
            if "scale" in given:
                terms.append(np.where(np.isfinite(self.x), self.x, 0) * given["scale"])
            if "bias" in given:
                terms.append(given["bias"])
            dz, size = self._visible(sum(terms)), self._visible(sum(map(np.abs, terms)))
            noise = (eps(self.dtype) if self.op == "softmax" else eps(self.acc)) * size + self.tiny
            noise = noise + p * (relative * size) + self._sum(p * (noise + relative * size)) + absolute * size
            if self.op == "softmax":
                dy = p * (dz - self._sum(p * dz))
                noise = p * (noise + relative * (size + self._sum(p * size))) + absolute * (
                    size + self._sum(p * size) + p * self._sum(size)
                )
            else:
                dy = dz - self._sum(p * dz)
                noise = noise + absolute * self._sum(size)
            return (Wanted(self._visible(dy), self._visible(noise)),)


class Norm(_Oracle):
    """layer_norm or rms_norm; the parameters have the normalised axes' shape.

    Args:
      op: "layer_norm" or "rms_norm".
      x, scale, bias, where, residual: as they are given to the op, absent as None.
      axes: non-negative.
      dtype: the result's.
    """

    def __init__(self, op, x, scale=None, bias=None, where=None, residual=None, *, axes, epsilon, dtype):
        self.op, self.axes, self.dtype = op, axes, np.dtype(dtype)
        x = np.asarray(x)
        operands = {"x": x, "scale": scale, "bias": bias, "residual": residual}
        self.operands = {name: np.asarray(v) for name, v in operands.items() if v is not None}
        total = x.dtype if residual is None else np.dtype(jnp.promote_types(x.dtype, self.operands["residual"].dtype))
        self.acc = acc = accumulator(total, dtype, *(v.dtype for v in self.operands.values()))
        self.kernel_dtype = acc if acc == np.float64 else total
        if residual is not None:
            with np.errstate(over="ignore"):
                x = (x.astype(acc) + self.operands["residual"].astype(acc)).astype(self.kernel_dtype)
        self.total = total
        self.x = self.wide(x)
        self.expanded = [d if a in axes else 1 for a, d in enumerate(x.shape)]
        self.scale, self.bias = (
            self.real(default) if value is None else self.wide(value).reshape(self.expanded)
            for value, default in ((scale, 1), (bias, 0))
        )
        self.counts = np.broadcast_to(True if where is None else np.asarray(where), x.shape)
        with np.errstate(all="ignore"):
            mean = self._mean(self.x) if op == "layer_norm" else self.real(0)
            deviations = self.x - mean
            self.rstd = 1 / np.sqrt(self._mean(np.square(deviations)) + self.real(epsilon))
            self.normal = deviations * self.rstd
            # Noise in the normalised values: their rounding, the mean's rounding, and denormal operands counted as 0.
            offset = np.sqrt(self._mean(np.square(self.x))) if op == "layer_norm" else self.real(0)
            self.noise = eps(acc) * (np.abs(self.normal) + offset * self.rstd)
            # Its effect on rstd; where it exceeds the variance, to second order.
            shaken = np.minimum(1, self._mean(np.abs(self.normal) * self.noise + np.square(self.noise)))
            self.noise = self.noise + shaken * np.abs(self.normal)
            self.shaken = eps(acc) + shaken
            self.noise = self.noise + max(map(tiny, (acc, *(v.dtype for v in self.operands.values())))) * self.rstd

    def _sum(self, values):
        return values.sum(self.axes, keepdims=True)

    def _mean(self, values):
        """Over the positions that count."""
        return self._sum(np.where(self.counts, values, 0)) / self._sum(self.counts.astype(self.real))

    def value(self) -> tuple[Wanted, ...]:
        with np.errstate(all="ignore"):
            scaled = self.normal * self.scale
            noise = self.noise * np.abs(self.scale) + eps(self.acc) * (np.abs(scaled) + np.abs(self.bias))
            y = Wanted(scaled + self.bias, noise + np.zeros_like(self.x))
        flushed = 2 * max(map(tiny, (self.acc, *(v.dtype for v in self.operands.values()))))
        return (y, Wanted(self.x, np.full_like(self.x, flushed))) if "residual" in self.operands else (y,)

    def vjp(self, dy, dsum=None) -> dict[str, Wanted]:
        dy = self.wide(dy)
        with np.errstate(all="ignore"):
            g, normal = dy * self.scale, self.normal
            size, count = np.abs(g), self._sum(self.counts.astype(self.real))
            product, total = self._sum(g * normal) / count, self._sum(g) / count
            sizes = self._sum(size * np.abs(normal)) / count, self._sum(size) / count
            noisy = self._sum(size * self.noise) / count
            through = normal * product
            terms = size + np.abs(normal) * sizes[0]
            # To second order: equal values differ from their mean by its rounding, which a small epsilon magnifies.
            noise = eps(self.acc) * terms + self.noise * np.abs(product) + (np.abs(normal) + self.noise) * noisy
            if self.op == "layer_norm":
                through, noise = through + total, noise + eps(self.acc) * sizes[1]
            dx, noise = self.rstd * (g - np.where(self.counts, through, 0)), self.rstd * noise
            noise = noise + self.shaken * np.abs(dx)
            if dsum is not None:
                dx, noise = dx + self.wide(dsum), noise + eps(self.acc) * np.abs(self.wide(dsum))
            # It is computed in the dtype that x + residual has.
            noise = noise + eps(self.total) * np.abs(dx) + 4 * float(jnp.finfo(self.total).smallest_subnormal)
            found = {name: Wanted(dx, noise) for name in ("x", "residual") if name in self.operands}
            rows = tuple(a for a in range(self.x.ndim) if a not in self.axes)
            sums = {"scale": (dy * normal, np.abs(dy) * self.noise), "bias": (dy, np.zeros_like(dy))}
            for name, (term, noise) in sums.items():
                if name in self.operands:
                    noise = noise + eps(self.acc) * np.abs(term)
                    shape = self.operands[name].shape
                    found[name] = Wanted(term.sum(rows).reshape(shape), noise.sum(rows).reshape(shape))
            return found

    def jvp(self, tangents: dict[str, np.ndarray]) -> tuple[Wanted, ...]:
        given = {name: self.wide(t) for name, t in tangents.items()}
        zero = np.zeros_like(self.x)
        with np.errstate(all="ignore"):
            moved = [given[name] for name in ("x", "residual") if name in given]
            dx, size = sum(moved, zero), sum(map(np.abs, moved), zero)
            rounded = eps(self.total) * size if len(moved) > 1 else zero
            product, sizes = self._mean(self.normal * dx), self._mean(np.abs(self.normal) * size)
            centre = self._mean(dx) if self.op == "layer_norm" else self.real(0)
            change = self.rstd * (dx - centre - self.normal * product)
            shaken = self.shaken * np.abs(change)
            terms = size + (self._mean(size) if self.op == "layer_norm" else 0) + np.abs(self.normal) * sizes
            noise = (
                eps(self.acc) * terms
                + self.noise * np.abs(product)
                + (np.abs(self.normal) + self.noise) * self._mean(self.noise * size)
            )
            through = self._mean(np.abs(self.normal) * rounded)
            noise = noise + rounded + self._mean(rounded) + np.abs(self.normal) * through
            precise = jnp.promote_types(self.total, self.dtype)  # in which the change is kept before it is scaled
            noise = self.rstd * noise + shaken + eps(precise) * np.abs(change)
            noise = np.where(np.abs(change) < float(jnp.finfo(precise).max), noise, np.inf)
            dy, noise = change * self.scale, noise * np.abs(self.scale)
            noise = noise + eps(self.acc) * np.abs(dy)
            for name, factor, noisy in (("scale", self.normal, self.noise), ("bias", self.real(1), self.real(0))):
                if name in given:
                    t = given[name].reshape(self.expanded)
                    dy = dy + factor * t
                    noise = noise + np.abs(t) * (noisy + eps(self.acc) * np.abs(factor))
            y = Wanted(dy, noise + zero)
        return (y, Wanted(dx, rounded)) if "residual" in self.operands else (y,)


def activate(activation, z):
    """f(z), f'(z) and a bound on |f''|."""
    real = z.dtype.type
    if activation is None:
        return z, np.ones_like(z), 0.0
    if activation == "relu":
        return np.maximum(z, 0), (z > 0).astype(real), 0.0
    if activation == "gelu":
        c, d = real(math.sqrt(2 / math.pi)), real(0.044715)
        u = c * (z + d * z**3)
        s, t = scipy.special.expit(2 * u), np.tanh(u)
        return z * s, s + 0.5 * z * (1 - t * t) * c * (1 + 3 * d * z * z), 1.2
    if activation == "gelu_exact":
        cdf = 0.5 * scipy.special.erfc(-z.astype(np.float64) / math.sqrt(2)).astype(real)
        return z * cdf, cdf + z * np.exp(-z * z / 2) / real(math.sqrt(2 * math.pi)), 1.2
    s = scipy.special.expit(z)
    return z * s, s * (1 + z * (1 - s)), 0.6


class Matmul(_Oracle):
    """activation(lhs_scale rhs_scale a b + bias).

    Args:
      a, b, lhs_scale, rhs_scale, bias: as the op takes them, with arrays in a's and b's form.
      multiply: the relative error in a product's factors, such as TF32's, in addition to the accumulator's.
      dtype: the result's.
    """

    def __init__(self, a, b, bias=None, lhs_scale=None, rhs_scale=None, *, activation=None, multiply=0.0, dtype):
        operands = {"a": a, "b": b, "lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "bias": bias}
        self.operands = {name: np.asarray(v) for name, v in operands.items() if v is not None}
        self.dtype, self.activation = np.dtype(dtype), activation
        a, b = self.operands["a"], self.operands["b"]
        self.acc = accumulator(a.dtype, b.dtype, dtype)
        self.multiply = multiply
        self.a = self.wide(a)[None] if a.ndim == 1 else self.wide(a)
        self.b = self.wide(b)[:, None] if b.ndim == 1 else self.wide(b)
        self.unit = tuple(axis for axis, x in ((-2, a), (-1, b)) if x.ndim == 1)
        self.scales = {name: self.wide(v) for name, v in self.operands.items() if name.endswith("scale")}
        self.scale = np.prod([self.real(1), *self.scales.values()])
        self.product = np.matmul(self.a, self.b)
        noise = self._rounding(self.a, self.b)
        self.product_noise = noise + 2 * eps(self.acc) * np.abs(self.product) * bool(self.scales)
        z, noise = self.product * self.scale, self.product_noise * np.abs(self.scale)
        if bias is not None:
            more = np.expand_dims(np.broadcast_to(self.wide(bias), np.squeeze(z, self.unit).shape), self.unit)
            z, noise = z + more, noise + eps(self.acc) * (np.abs(z) + np.abs(more))
        self.z, self.z_noise = z, noise
        with np.errstate(all="ignore"):
            self.f, self.slope, self.curvature = activate(activation, z)

    def _rounding(self, left, right) -> np.ndarray:
        """A product's rounding: its factors', and the k-term sums', which grows as the root of k."""
        relative = self.multiply + eps(self.acc) * max(1.0, left.shape[-1] ** 0.5 / 2)
        return relative * np.matmul(np.abs(left), np.abs(right))

    def _finish(self, value, noise) -> tuple[Wanted, ...]:
        return (Wanted(np.squeeze(value, self.unit), np.squeeze(noise, self.unit)),)

    def value(self) -> tuple[Wanted, ...]:
        noise = self.z_noise * (np.abs(self.slope) + self.curvature)
        if self.activation == "relu":  # whose kink may lie within the noise
            noise = np.where(self.z > -4 * self.z_noise, self.z_noise, 0)
        elif self.activation is not None:
            noise = noise + 2 * eps(self.acc) * np.abs(self.z)
        return self._finish(self.f, noise + tiny(self.acc))

    def _slope_noise(self):
        """Of the activation's derivative at the preactivation, which is kept in the result's dtype."""
        if self.activation is None:
            return np.zeros_like(self.z)
        noise = self.z_noise + eps(self.dtype) * np.abs(self.z) + float(jnp.finfo(self.dtype).smallest_subnormal)
        if self.activation == "relu":
            return np.where(np.abs(self.z) <= 2 * noise, self.real(1), self.real(0))
        return self.curvature * noise + 4 * eps(self.acc) * (1 + np.abs(self.z))

    def vjp(self, dy) -> dict[str, Wanted]:
        dy = np.expand_dims(self.wide(dy), self.unit)
        g = dy * self.slope
        g_noise = np.abs(dy) * self._slope_noise()
        if self.activation is not None:
            g_noise = g_noise + eps(self.dtype) * np.abs(g)
        found = {}
        for name in self.scales:
            other = np.prod([self.real(1), *(v for key, v in self.scales.items() if key != name)])
            product_noise = self.product_noise + eps(self.dtype) * np.abs(self.product)
            noise = g_noise * np.abs(self.product) + np.abs(g) * product_noise
            terms = g * self.product
            noise = noise.sum() + eps(self.acc, self.operands[name].dtype) * np.abs(terms).sum()
            found[name] = Wanted(terms.sum() * other, noise * np.abs(other))
        if self.scales:
            g_noise = (g_noise + eps(self.dtype) * np.abs(g)) * np.abs(self.scale)
        unscaled, g = (g, g_noise / np.abs(self.scale) if self.scales else g_noise), g * self.scale
        for name, left, right in (("a", g, self.b.swapaxes(-1, -2)), ("b", self.a.swapaxes(-1, -2), g)):
            noise = self._rounding(left, right)
            factors = (g_noise, np.abs(right)) if name == "a" else (np.abs(left), g_noise)
            total = Wanted(np.matmul(left, right), noise + np.matmul(*factors))
            x, shape = self.operands[name], (self.a if name == "a" else self.b).shape
            total = unbroadcast(total, shape, eps(self.acc))
            found[name] = Wanted(*(v.reshape(x.shape) for v in total))
        if "bias" in self.operands:
            x = self.operands["bias"]
            g, g_noise = unscaled
            squeezed = Wanted(*(np.squeeze(v, self.unit) for v in (g, g_noise + eps(self.dtype) * np.abs(g))))
            found["bias"] = unbroadcast(squeezed, x.shape, eps(self.acc, x.dtype))
        return found

    def jvp(self, tangents: dict[str, np.ndarray]) -> tuple[Wanted, ...]:
        dz, noise = np.zeros_like(self.z), np.zeros_like(self.z)
        given = {name: self.wide(t) for name, t in tangents.items()}
        if "a" in given:
            t = given["a"].reshape(self.a.shape)
            dz, noise = dz + t @ self.b, noise + self._rounding(t, self.b)
        if "b" in given:
            t = given["b"].reshape(self.b.shape)
            noise = noise + eps(self.dtype) * np.abs(dz)
            dz, noise = dz + self.a @ t, noise + self._rounding(self.a, t)
            noise = noise + eps(self.dtype) * (np.abs(self.a @ t))
        if self.scales:
            noise = (noise + 2 * eps(self.dtype) * np.abs(dz)) * np.abs(self.scale)
            dz = dz * self.scale
            for name in self.scales:
                other = np.prod([given[name], *(v for key, v in self.scales.items() if key != name)])
                noise = noise + (self.product_noise + eps(self.dtype) * np.abs(self.product)) * np.abs(other)
                dz = dz + self.product * other
        if "bias" in given:
            shape = np.squeeze(self.z, self.unit).shape
            t = np.expand_dims(np.broadcast_to(given["bias"], shape), self.unit)
            noise = noise + eps(self.dtype) * np.abs(dz)
            dz, noise = dz + t, noise + eps(self.acc) * np.abs(t)
        noise = noise + eps(self.dtype) * np.abs(dz)
        total = noise * (np.abs(self.slope) + self.curvature) + np.abs(dz) * self._slope_noise()
        return self._finish(np.where(self.slope == 0, 0, dz * self.slope), total)


class DotGeneral:
    """lax.dot_general by a matrix product: operands brought to [batch, free, contracted] and back."""

    def __init__(self, lhs, rhs, numbers, *, multiply=0.0, dtype):
        lhs, rhs = np.asarray(lhs), np.asarray(rhs)
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
        lhs_free = [a for a in range(lhs.ndim) if a not in (*lhs_contract, *lhs_batch)]
        rhs_free = [a for a in range(rhs.ndim) if a not in (*rhs_contract, *rhs_batch)]
        self.orders = {"a": (*lhs_batch, *lhs_free, *lhs_contract), "b": (*rhs_batch, *rhs_contract, *rhs_free)}
        batch = [lhs.shape[a] for a in lhs_batch]
        m, n = ([x.shape[a] for a in free] for x, free in ((lhs, lhs_free), (rhs, rhs_free)))
        k = math.prod(lhs.shape[a] for a in lhs_contract)
        self.flat = {"a": (*batch, math.prod(m), k), "b": (*batch, k, math.prod(n))}
        self.shape, self.flat_out = (*batch, *m, *n), (*batch, math.prod(m), math.prod(n))
        self.product = Matmul(self._bring("a", lhs), self._bring("b", rhs), multiply=multiply, dtype=dtype)
        self.shapes = {"a": lhs.shape, "b": rhs.shape}

    def _bring(self, name, x):
        return np.transpose(x, self.orders[name]).reshape(self.flat[name])

    def _restore(self, name, x):
        shape = [self.shapes[name][a] for a in self.orders[name]]
        return np.transpose(x.reshape(shape), np.argsort(self.orders[name]))

    def value(self):
        return tuple(Wanted(*(v.reshape(self.shape) for v in w)) for w in self.product.value())

    def vjp(self, dy):
        found = self.product.vjp(np.asarray(dy).reshape(self.flat_out))
        return {name: Wanted(*(self._restore(name, v) for v in found[name])) for name in ("a", "b")}

    def jvp(self, tangents):
        flat = {name: self._bring(name, np.asarray(t)) for name, t in tangents.items()}
        return tuple(Wanted(*(v.reshape(self.shape) for v in w)) for w in self.product.jvp(flat))


class Sampled:
    """A function without a closed form, in float64. Noise: by how much it moves if each value on the way is rounded.

    Args:
      function: takes the operands, in `jax.numpy`.
      operands: by name.
    """

    def __init__(self, function, operands: dict[str, np.ndarray]):
        self.function, self.operands = function, operands
        self.dtype = np.dtype(jax.eval_shape(function, *operands.values()).dtype)
        self.acc = accumulator(self.dtype, *(x.dtype for x in operands.values()))

    def _compute(self, derive, *given) -> list[Wanted]:
        inputs = [wide(x, np.float64) for x in (*given, *self.operands.values())]
        with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
            values, moves = _moves(self.function, derive)(*inputs)
        noises = (eps(self.acc) * np.asarray(move) + tiny(self.acc) for move in moves)
        return list(map(Wanted, map(np.asarray, values), noises))

    def value(self) -> tuple[Wanted, ...]:
        return tuple(self._compute(_value))

    def vjp(self, dy) -> dict[str, Wanted]:
        return dict(zip(self.operands, self._compute(_vjp, dy), strict=True))

    def jvp(self, tangents: dict[str, np.ndarray]) -> tuple[Wanted, ...]:
        return tuple(self._compute(_jvp, *(tangents[name] for name in self.operands)))


def _value(function, *xs):
    return [function(*xs)]


def _vjp(function, dy, *xs):
    return jax.vjp(function, *xs)[1](dy)


def _jvp(function, *xs):
    tangents, operands = xs[: len(xs) // 2], xs[len(xs) // 2 :]
    return [jax.jvp(function, operands, tangents)[1]]


#: Rounding samples, so many that they do not all cancel, and the relative size.
_SAMPLES, _STEP = 8, 1e-6


@functools.cache
def _moves(function, derive):
    """From the inputs: `derive(function, *inputs)`, and each result's summed moves, in units of the rounding."""

    @jax.jit
    def compute(*inputs):
        program = jax.make_jaxpr(functools.partial(derive, function))(*inputs)
        values = jax.core.eval_jaxpr(program.jaxpr, program.consts, *inputs)
        rng = np.random.default_rng(0)
        sampled = jax.vmap(lambda i: _rounded(program, inputs, rng, i))(np.arange(_SAMPLES))
        return values, [jnp.sum(jnp.abs(x - value) / _STEP, 0) for x, value in zip(sampled, values, strict=True)]

    return compute


def _rounded(program, inputs, rng, sample):
    """A program's results in one sample: each input, and each operation's result, is off by some rounding."""

    def rounded(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x * (1 + _STEP * jnp.asarray(rng.standard_normal((_SAMPLES, *x.shape)))[sample])

    jaxpr, known = program.jaxpr, {}
    known |= zip(jaxpr.constvars, program.consts, strict=True)
    known |= zip(jaxpr.invars, map(rounded, inputs), strict=True)

    def read(atom):
        return atom.val if isinstance(atom, jax.extend.core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands = list(map(read, equation.invars))
        if inner := equation.params.get("jaxpr", equation.params.get("call_jaxpr")):
            results = _rounded(inner, operands, rng, sample)
        else:
            results = equation.primitive.bind(*operands, **equation.params)
            results = map(rounded, results if equation.primitive.multiple_results else [results])
        known |= zip(equation.outvars, results, strict=True)
    return list(map(read, jaxpr.outvars))

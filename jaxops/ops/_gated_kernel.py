"""The kernel of gated_matmul: both products of a gated MLP in one pass, and its rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad

from jaxops._device import local_device
from jaxops._kernel import Kernel, Product, jvp_of_linear, why_no_handler
from jaxops._rows import accumulator
from jaxops._sharding import Layout, Shards
from jaxops.ops import _matmul_choice as choices
from jaxops.ops import _matmul_kernel as products
from jaxops.ops._epilogue import ACTIVATIONS, activation_index


def _spec(x: Any, dtype: np.dtype, precision: Any, transposed: bool = False) -> products.Spec:
    """That of the product of x [..., k] and a weight [k, n], or [n, k] if transposed."""
    return products.Spec(False, transposed, dtype, None, precision, (x.ndim - 1, 1, 1))


def multiply(x: jax.Array, w: jax.Array, precision: Any, transposed: bool = False) -> jax.Array:
    """x [..., k] times w [k, n], or [n, k] if transposed, rounded to their dtype."""
    return products.kernel(x, w, None, None, _spec(x, np.dtype(x.dtype), precision, transposed))[0]


def _multiply_here(x: jax.Array, w: jax.Array, precision: Any, transposed: bool = False) -> jax.Array:
    """The same on a GPU, on one device."""
    spec = _spec(x, np.dtype(x.dtype), precision, transposed)
    return products.kernel.call_target(x, w, spec=spec, preactivation=False)[0]


def _gate(gates: jax.Array, ups: jax.Array, activation: str) -> jax.Array:
    """activation(gates) * ups, in one pass that is computed in f32, or f64, and rounded."""
    wide = accumulator(gates.dtype)
    return (ACTIVATIONS[activation](gates.astype(wide)) * ups.astype(wide)).astype(gates.dtype)


def gate(gates: jax.Array, ups: jax.Array, activation: str) -> jax.Array:
    """activation(gates) * ups. The backward pass keeps both operands, and computes the activation again."""
    # Else what JAX keeps for the backward pass are the activation and its derivative, in f32.
    return jax.checkpoint(functools.partial(_gate, activation=activation), prevent_cse=False)(gates, ups)


def _gate_again(gates: jax.Array, ups: jax.Array, activation: str) -> jax.Array:
    """The same in the backward pass. XLA must not find the forward pass's, which it would have to keep in memory."""
    return _gate(*lax.optimization_barrier((gates, ups)), activation)


def gate_into(product: Callable[..., jax.Array], gates: jax.Array, ups: jax.Array, w: jax.Array, activation: str):
    """product(activation(gates) * ups, w). The backward pass keeps gates, ups and w, and computes the factor again."""
    return jax.checkpoint(lambda gates, ups, w: product(_gate(gates, ups, activation), w))(gates, ups, w)


def _rows(x: Any) -> list[str]:
    """The names of the axes of rows."""
    return [f"m{a}" for a in range(x.ndim - 1)]


def _mapped_rows(operands: Sequence[Any], dims: Sequence[int | None], weights: Sequence[int]) -> list[jax.Array]:
    """The operands, all but the weights with the mapped axis in front, an axis of rows."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    return [
        x if i in weights else jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for i, (x, d) in enumerate(zip(operands, dims, strict=True))
    ]


def _summed(z: jax.Array, over: Sequence[str], scatter: Shards, names: Sequence[str]) -> jax.Array:
    """The sum of every device's partial product, further split as `scatter` tells."""
    left = list(over)
    for name, axes in scatter.items():
        z = lax.psum_scatter(z, axes, scatter_dimension=names.index(name), tiled=True)
        left = [axis for axis in left if axis not in axes]
    return lax.psum(z, left) if left else z


def _explain(kernel: Kernel, choice: choices.Choice, x: Any, w: Any, precision: Any, count: str, done: str) -> str:
    if choice.kernel != "xla":
        return f"on a GPU {choice}; {done}"
    spec = _spec(x, np.dtype(x.dtype), precision, kernel is backward)
    product = products.kernel.explain(x, w, spec=spec, preactivation=False)
    return f"{count} and a pass over it ({choice.why}): {product}; {done}"


class _OneKernel(Kernel):
    """Products and what follows them in Hopper's kernel; elsewhere, jaxops' products and what follows in plain JAX."""

    def _lower(self, platform: str, *operands, **params):
        here = why_no_handler(self.handler, platform) is None
        return super()._lower(platform, *operands, **params) if here else self.composed(*operands, **params)

    def is_chosen(self, *operands, **_) -> bool:
        return self.choice(*operands).kernel != "xla"

    choice: Callable[..., choices.Choice]


class _GatedKernel(_OneKernel):
    """activation(x w_gate) * (x w_up), and if `kept` both products, rounded, as further results.

    Operands: x [..., k], with at least one axis of rows, w_gate and w_up [k, n], of one 16-bit dtype, which is the
    results', too. Hopper's kernel activates and multiplies the products' f32 sums. Elsewhere, and where the kernel is
    not expected to be faster, jaxops' matmul computes both products; these are rounded before a pass over them.
    """

    def abstract(self, x, w_gate, w_up, *, kept, **_) -> list[ShapedArray]:
        if w_gate.shape != w_up.shape or w_gate.shape[0] != x.shape[-1]:
            raise TypeError(f"gated_matmul: x {x.shape}, w_gate {w_gate.shape} and w_up {w_up.shape} do not fit")
        return [ShapedArray((*x.shape[:-1], w_gate.shape[1]), x.dtype)] * (3 if kept else 1)

    def layout(self, x, w_gate, w_up, *, kept, **_) -> Layout:
        del w_gate, w_up
        weight, result = ["k", "n"], [*_rows(x), "n"]
        return Layout.of([[*_rows(x), "k"], weight, weight], [result] * (3 if kept else 1), ["k"])

    def plain(self, x, w_gate, w_up, *, activation, precision, kept) -> list[jax.Array]:
        return self._finished(*(multiply(x, w, precision) for w in (w_gate, w_up)), activation, kept)

    @staticmethod
    def _finished(gates, ups, activation, kept) -> list[jax.Array]:
        return [gate(gates, ups, activation), *([gates, ups] if kept else [])]

    def choice(self, x, w_gate, *_) -> choices.Choice:
        """Which kernel computes both products on this machine's GPU, or on an H200 without a GPU."""
        product = choices.Product(math.prod(x.shape[:-1]), w_gate.shape[1], x.shape[-1], "16bit")
        return choices.choose_gated(product, local_device())

    def call_target(self, x, w_gate, w_up, *, activation, precision, kept) -> list[jax.Array]:
        choice = self.choice(x, w_gate)
        if choice.kernel == "xla":
            both = (_multiply_here(x, w, precision) for w in (w_gate, w_up))
            return self._finished(*both, activation, kept)
        results = self.abstract(x, w_gate, w_up, kept=kept)
        rows, columns = math.prod(x.shape[:-1]), w_gate.shape[1]
        out = self.ffi_call(
            [result.update(shape=(rows, columns)) for result in results],
            x.reshape(rows, x.shape[-1]),
            w_gate,
            w_up,
            activation=activation_index(activation),
            has_products=kept,
            band=np.int32(choice.band),
        )
        return [y.reshape(like.shape) for y, like in zip(out, results, strict=True)]

    def local(self, run, shards, scatter, *operands, activation, precision, kept) -> list[jax.Array]:
        """If k is split over devices, sums the partial products before the activation."""
        over = shards.get("k", ())
        if not over:
            return run(*operands, activation=activation, precision=precision, kept=kept)
        x, *weights = operands
        names = [*_rows(x), "n"]
        both = (_summed(_multiply_here(x, w, precision), over, scatter, names) for w in weights)
        return self._finished(*both, activation, kept)

    def as_dot_general(self, x, w_gate, w_up, *, precision, **_) -> Product:
        """The product with w_gate, which stands for both."""
        del w_up
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        options = {"precision": precision, "preferred_element_type": np.dtype(x.dtype), "out_sharding": None}
        return [x, w_gate], {"dimension_numbers": numbers, **options}

    def flops(self, x, w_gate, w_up, **_) -> int:
        del w_up
        return 4 * math.prod(x.shape) * w_gate.shape[1]

    def explain(self, x, w_gate, w_up, *, activation, precision, kept) -> str:
        done = ", ".join([activation] + ["keeps both products"] * kept)
        return _explain(self, self.choice(x, w_gate, w_up), x, w_gate, precision, "two products", done)

    def batch(self, operands, dims, *, activation, precision, kept):
        """A mapped axis of x alone becomes an axis of rows. With weights that are mapped, matmul has a batch axis."""
        if dims[0] is not None and dims[1] is dims[2] is None:
            x, w_gate, w_up = operands
            x = jnp.moveaxis(x, dims[0], 0)
            out = self.bind(x, w_gate, w_up, activation=activation, precision=precision, kept=kept)
            return out, [0] * len(out)

        plain = functools.partial(self.plain, activation=activation, precision=precision, kept=kept)
        out = jax.vmap(plain, dims)(*operands)
        return out, [0] * len(out)

    def jvp(self, primals, tangents, *, activation, precision, kept):
        out, *both = self.bind(*primals, activation=activation, precision=precision, kept=True)
        moved = _moved_products(primals, tangents, both, precision)
        varied = [i for i, t in enumerate(moved) if not isinstance(t, ad.Zero)]

        def of_varied(*values):
            given = {**dict(enumerate(both)), **dict(zip(varied, values, strict=True))}
            return gate(given[0], given[1], activation)

        _, dout = jax.jvp(of_varied, [both[i] for i in varied], [moved[i] for i in varied])
        return ([out, *both], [dout, *moved]) if kept else ([out], [dout])


def _moved_products(primals, tangents, both, precision) -> list[jax.Array | ad.Zero]:
    """The tangents of both products."""
    x, *weights = primals
    dx, *dweights = (None if isinstance(t, ad.Zero) else t for t in tangents)
    moved: list[jax.Array | ad.Zero] = []
    for w, dw, product in zip(weights, dweights, both, strict=True):
        terms = [multiply(dx, w, precision)] if dx is not None else []
        terms += [multiply(x, dw, precision)] if dw is not None else []
        moved.append(sum(terms[1:], terms[0]) if terms else ad.Zero(jax.typeof(product)))
    return moved


class _MlpKernel(Kernel):
    """(activation(x w_gate) * (x w_up)) w_down: gated_matmul and matmul; its own primitive for its derivative alone.

    Operands: x [..., k], with at least one axis of rows, w_gate and w_up [k, n], w_down [n, d], all of one 16-bit
    dtype.
    """

    def abstract(self, x, w_gate, w_up, w_down, **_) -> list[ShapedArray]:
        kernel.abstract(x, w_gate, w_up, kept=False)
        if w_down.shape[0] != w_gate.shape[1]:
            raise TypeError(f"gated_mlp: w_gate {w_gate.shape} and w_down {w_down.shape} do not fit")
        return [ShapedArray((*x.shape[:-1], w_down.shape[1]), x.dtype)]

    def layout(self, x, *_, **__) -> Layout:
        return Layout.of([[*_rows(x), "k"], ["k", "n"], ["k", "n"], ["n", "d"]], [[*_rows(x), "d"]], ["k", "n"])

    def plain(self, x, w_gate, w_up, w_down, *, activation, precision) -> list[jax.Array]:
        (hidden,) = kernel.bind(x, w_gate, w_up, activation=activation, precision=precision, kept=False)
        return [multiply(hidden, w_down, precision)]

    def batch(self, operands, dims, **params):
        if dims[0] is not None and all(dim is None for dim in dims[1:]):
            return self.bind(jnp.moveaxis(operands[0], dims[0], 0), *operands[1:], **params), [0]
        return jax.vmap(functools.partial(self.plain, **params), dims)(*operands), [0]

    def jvp(self, primals, tangents, *, activation, precision):
        w_down, dw_down = primals[3], tangents[3]
        hidden, *both = kernel.bind(*primals[:3], activation=activation, precision=precision, kept=True)
        out = multiply(hidden, w_down, precision)
        moved = [*_moved_products(primals[:3], tangents[:3], both, precision), dw_down]
        has = tuple(name for name, t in zip(_MOVED, moved, strict=True) if not isinstance(t, ad.Zero))
        given = (t for t in moved if not isinstance(t, ad.Zero))
        # Not of `hidden`, which would be kept for the backward pass.
        return [out], _linear.bind(*both, w_down, *given, activation=activation, precision=precision, has=has)


#: What moves a gated MLP's result, beside x and the weights of both products.
_MOVED = ("dgate", "dup", "dw_down")


class _MlpJvp(Kernel):
    """(activation'(gate) up dgate + activation(gate) dup) w_down + activation(gate) up dw_down.

    It is transposed as a whole, into one kernel. Operands: gate and up [..., n], w_down [n, d], then the ones of _MOVED
    that `has` names.
    """

    def abstract(self, gate, up, w_down, *_, **__) -> list[ShapedArray]:
        return [ShapedArray((*gate.shape[:-1], w_down.shape[1]), gate.dtype)]

    def layout(self, gate, up, w_down, *_, has, **__) -> Layout:
        full, weight = [*_rows(gate), "n"], ["n", "d"]
        moved = [weight if name == "dw_down" else full for name in has]
        return Layout.of([full, full, weight, *moved], [[*_rows(gate), "d"]], ["n"])

    def plain(self, gate, up, w_down, *moved, activation, precision, has) -> list[jax.Array]:
        given = dict(zip(has, moved, strict=True))
        tangents = tuple(given.get(name) for name in ("dgate", "dup"))
        terms = []
        if tangents != (None, None):
            tangents = tuple(jnp.zeros_like(gate) if t is None else t for t in tangents)
            _, dhidden = jax.jvp(functools.partial(_gate, activation=activation), (gate, up), tangents)
            terms.append(multiply(dhidden, w_down, precision))
        if "dw_down" in given:
            terms.append(multiply(_gate(gate, up, activation), given["dw_down"], precision))
        return [sum(terms[1:], terms[0])]

    def batch(self, operands, dims, *, has, **params):
        weights = [2, *(3 + i for i, name in enumerate(has) if name == "dw_down")]
        if all(dims[i] is None for i in weights):
            return self.bind(*_mapped_rows(operands, dims, weights), has=has, **params), [0]
        return jax.vmap(functools.partial(self.plain, has=has, **params), dims)(*operands), [0]

    def jvp(self, primals, tangents, **params):
        return jvp_of_linear(self, [i > 2 for i in range(len(primals))], primals, tangents, **params)

    def transpose(self, cotangents, gate, up, w_down, *moved, activation, precision, has):
        (dy,) = cotangents
        undefined = [name for name, x in zip(has, moved, strict=True) if ad.is_undefined_primal(x)]
        wants_hidden = "dw_down" in undefined
        if undefined == ["dw_down"]:
            dgate, dup, hidden = None, None, [_gate_again(gate, up, activation)]
        else:
            options = {"activation": activation, "precision": precision, "wants_hidden": wants_hidden}
            dgate, dup, *hidden = backward.bind(dy, w_down, gate, up, **options)
        dw_down = None
        if wants_hidden:
            product = functools.partial(multiply, *hidden, precision=precision)
            (dw_down,) = jax.linear_transpose(product, w_down)(dy)
        found = dict(zip(_MOVED, (dgate, dup, dw_down), strict=True))
        return [None] * 3 + [found[name] if name in undefined else None for name in has]


class _MlpBackward(_OneKernel):
    """dgate = dh up activation'(gate) and dup = dh activation(gate), for dh = dy w_down^T.

    If wanted, also hidden = activation(gate) up, for w_down's gradient. Operands: dy [..., d], w_down [n, d], gate and
    up [..., n]. Hopper's kernel takes the sums of dh, which is rounded elsewhere.
    """

    def abstract(self, dy, w_down, gate, up, *, wants_hidden, **_) -> list[ShapedArray]:
        return [ShapedArray(gate.shape, gate.dtype)] * (3 if wants_hidden else 2)

    def layout(self, dy, *_, wants_hidden, **__) -> Layout:
        full = [*_rows(dy), "n"]
        return Layout.of([[*_rows(dy), "d"], ["n", "d"], full, full], [full] * (3 if wants_hidden else 2), ["d"])

    @staticmethod
    def _finished(dh, gate, up, activation, wants_hidden) -> list[jax.Array]:
        # Another's values for XLA: else it would keep the forward pass's activation in memory.
        gate, up = lax.optimization_barrier((gate, up))
        hidden, pull = jax.vjp(functools.partial(_gate, activation=activation), gate, up)
        return [*pull(dh), *([hidden] if wants_hidden else [])]

    def plain(self, dy, w_down, gate, up, *, activation, precision, wants_hidden) -> list[jax.Array]:
        dh = multiply(dy, w_down, precision, transposed=True)
        return self._finished(dh, gate, up, activation, wants_hidden)

    def choice(self, dy, w_down, *_) -> choices.Choice:
        """Which kernel computes it on this machine's GPU, or on an H200 without a GPU."""
        sizes = math.prod(dy.shape[:-1]), w_down.shape[0], dy.shape[-1]
        return choices.choose_gated_backward(choices.Product(*sizes, "16bit", rhs_transposed=True), local_device())

    def call_target(self, dy, w_down, gate, up, *, activation, precision, wants_hidden) -> list[jax.Array]:
        choice = self.choice(dy, w_down)
        if choice.kernel == "xla":
            return self._finished(_multiply_here(dy, w_down, precision, True), gate, up, activation, wants_hidden)
        results = self.abstract(dy, w_down, gate, up, wants_hidden=False)
        rows = math.prod(dy.shape[:-1])
        flat = (x.reshape(rows, x.shape[-1]) for x in (gate, up))
        out = self.ffi_call(
            [result.update(shape=(rows, w_down.shape[0])) for result in results],
            dy.reshape(rows, dy.shape[-1]),
            w_down,
            *flat,
            activation=activation_index(activation),
            band=np.int32(choice.band),
        )
        found = [x.reshape(like.shape) for x, like in zip(out, results, strict=True)]
        return [*found, _gate_again(gate, up, activation)] if wants_hidden else found

    def local(self, run, shards, scatter, dy, w_down, gate, up, **params) -> list[jax.Array]:
        """If d is split over devices, sums the partial products before the activation's derivative."""
        del scatter  # results are split as gate and up are
        over = shards.get("d", ())
        if not over:
            return run(dy, w_down, gate, up, **params)
        dh = lax.psum(_multiply_here(dy, w_down, params["precision"], True), over)
        return self._finished(dh, gate, up, params["activation"], params["wants_hidden"])

    def flops(self, dy, w_down, *_, **__) -> int:
        return 2 * math.prod(dy.shape) * w_down.shape[0]

    def explain(self, dy, w_down, gate, up, *, activation, precision, wants_hidden) -> str:
        done = f"derivative of {activation}" + (", and it again" if wants_hidden else "")
        return _explain(self, self.choice(dy, w_down), dy, w_down, precision, "a product", done)

    def batch(self, operands, dims, **params):
        if dims[1] is None:
            out = self.bind(*_mapped_rows(operands, dims, [1]), **params)
        else:
            out = jax.vmap(functools.partial(self.plain, **params), dims)(*operands)
        return out, [0] * len(out)

    def jvp(self, primals, tangents, *, wants_hidden, **params):
        linear = [True, False, False, False]
        out, moved = jvp_of_linear(self, linear, primals, tangents, wants_hidden=False, **params)
        if not wants_hidden:
            return out, moved
        again = functools.partial(_gate_again, activation=params["activation"])
        hidden, dhidden = jax.jvp(again, tuple(primals[2:]), tuple(ad.instantiate_zeros(t) for t in tangents[2:]))
        return [*out, hidden], [*moved, dhidden]

    def transpose(self, cotangents, dy, w_down, gate, up, *, activation, precision, wants_hidden):
        del wants_hidden  # hidden does not depend on dy
        given = {name: x for name, x in zip(("dgate", "dup"), cotangents, strict=True) if not isinstance(x, ad.Zero)}
        options = {"activation": activation, "precision": precision, "has": tuple(given)}
        return [_linear.bind(gate, up, w_down, *given.values(), **options)[0], None, None, None]


kernel = _GatedKernel("gated_matmul", plain_on=("cpu",))
mlp = _MlpKernel("gated_mlp", target=False)
_linear = _MlpJvp("gated_mlp_jvp", target=False)
backward = _MlpBackward("gated_matmul_bwd", plain_on=("cpu",))

"""Kernels as JAX primitives: one FFI target, its abstract evaluation, its lowering on every platform, its vmap rule."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
from jax.core import ShapedArray
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval, xla
from jax.lax import dot_general_p
from jax.sharding import NamedSharding, PartitionSpec

from jaxops._device import local_device
from jaxops._sharding import (
    Layout,
    gather,
    lowering_of,
    on_auto_axes,
    only_for_xla,
    partitioned,
    requires_devices,
    reshard_like,
    typed_results,
    vary_alike,
)
from jaxops._version import __version__
from jaxops._warnings import warn, warn_fallback

# Private: checkify has no public way to add a rule.
from jax._src.checkify import error_checks, nan_error_check  # isort: skip

# The calling convention's version. It is part of every target's name, so an exported program that uses an older
# convention does not find its target, instead of calling a newer one wrongly.
CALLING_CONVENTION = 11

#: Platforms that JAX lowers for.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

#: The operands and parameters for lax's dot_general.
Product = tuple[Sequence[ShapedArray], dict[str, Any]]

#: Every kernel by name, in the order in which they are declared; kernels without a target are composites.
KERNELS: dict[str, Kernel] = {}
COMPOSITES: dict[str, Kernel] = {}

#: The kernels with registered handlers, by platform ("cpu", "cuda").
HANDLERS: dict[str, frozenset[str]] = {}


def target_name(kernel: str) -> str:
    """A kernel's name in XLA's registry and in HLO."""
    return f"jaxops.{kernel}.v{CALLING_CONVENTION}"


def disabled_checks() -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """Checks to disable in :func:`jax.export.export`, so that it exports functions that use jaxops.

    An exported program finds its kernels by name. The process that runs it must import jaxops, in a version with the
    same calling convention; otherwise the program does not compile. If the compiler partitions a program over several
    devices, it cannot be exported; programs that use :func:`jax.shard_map` can.

    Returns:
      A value for `disabled_checks`, with one check for each kernel.

    Example:
      >>> import jax, jax.numpy as jnp, jaxops
      >>> (rows,) = jax.export.symbolic_shape("rows")
      >>> argument = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
      >>> exported = jax.export.export(jax.jit(jaxops.softmax), disabled_checks=jaxops.disabled_checks())(argument)
      >>> exported.call(jnp.zeros((2, 8)))[0, 0]
      Array(0.125, dtype=float32)
    """
    return tuple(jax.export.DisabledSafetyCheck.custom_call(target_name(name)) for name in KERNELS)


def register_handlers(platform: str, targets: dict[str, Any]) -> None:
    """Registers one half's handlers with XLA; `platform` is "cpu" or "cuda"."""
    for name, capsule in targets.items():
        jax.ffi.register_ffi_target(
            target_name(name), capsule, platform={"cpu": "cpu", "cuda": "CUDA"}[platform], api_version=1
        )
    HANDLERS[platform] = frozenset(targets)


def why_no_handler(name: str, platform: str) -> str | None:
    """Why a kernel has no handler that runs on a platform; None if it has one."""
    if name not in HANDLERS.get(platform, ()):
        return "jaxops was built without kernels for it"
    return local_device().why_no_kernels() if platform == "cuda" else None


class Kernel:
    """A primitive that runs one FFI target on the platforms that have it, and plain JAX on all others.

    A subclass defines:

    - `abstract`: the results' shapes and dtypes;
    - `layout`: a name for each operand and result axis, equal for axes that correspond;
    - `call_target`: the call of the FFI target, and `plain`: the same computation in plain JAX;
    - `local`: how a device runs either on its shard (see `partitioned`);
    - `is_chosen`: whether a call runs the target on platforms that have it;
    - `batch`: the vmap rule; `jvp`, and `transpose` if it is linear: the derivatives.

    They all take the operands, then the parameters.

    The ops have no custom_vjp, because it would give up forward mode. A kernel's JVP rule binds a primitive that is
    linear in the tangents, and that primitive's transpose rule binds the backward kernel. Each mode comes from one
    rule, operands that are not differentiated cost nothing, and backward kernels can be differentiated like any other.

    Args:
      name: the target's name, without prefix and version.
      plain_on: platforms on which plain JAX is the intended implementation, used without a warning.
      target: False if there is no such target. Such a primitive only exists to be transposed as a whole; it lowers to
        its plain JAX, which calls other kernels.
    """

    #: For a kernel without a target: whether `local` defines each device's work, as for the others; else the compiler
    #: does.
    split_by_local = False
    #: The handler without which a platform runs plain JAX; by default, the one with the kernel's name.
    handler = ""

    def __init__(self, name: str, *, plain_on: Sequence[str] = (), target: bool = True):
        self.name = name
        self.handler = self.handler or name
        self.plain_on = frozenset(plain_on)
        self.primitive = primitive = Primitive(f"jaxops_{name}")
        primitive.multiple_results = True
        primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
        primitive.def_abstract_eval(self.typed)
        batching.primitive_batchers[primitive] = self.batch
        ad.primitive_jvps[primitive] = self._jvp
        ad.primitive_transposes[primitive] = self._transpose
        error_checks[primitive] = self._check_nans
        if type(self).as_dot_general is not Kernel.as_dot_general:
            partial_eval.partial_eval_jaxpr_custom_rules[primitive] = self._rematerialise
        requires_devices(primitive)
        if not target:
            COMPOSITES[name] = self
            if not self.split_by_local:
                mlir.register_lowering(primitive, lowering_of(self.composed))
                return
        for platform in PLATFORMS:
            mlir.register_lowering(primitive, lowering_of(functools.partial(self._lower, platform)), platform=platform)
        mlir.register_lowering(primitive, lowering_of(functools.partial(self._lower, "this platform")))
        if target:
            KERNELS[name] = self

    def _lower(self, platform: str, *operands, **params):
        if any(operand.size == 0 for operand in operands):
            return self.composed(*operands, **params)
        why = why_no_handler(self.handler, platform)
        here = why is None
        if not here and platform not in self.plain_on:
            warn_fallback(f"{self.name} on {platform}", why)
        run = self.call_target if here else self.plain
        local = functools.partial(self.local, run, **params)
        program = (__version__, target_name(self.name), platform, here, sorted(params.items()))
        digest = hashlib.sha256(repr(program).encode()).hexdigest()[:16]
        name = f"jaxops_{self.name}_{digest}"
        types = self.typed(*map(jax.typeof, operands), **params)
        return partitioned(name, self.layout(*operands, **params), local, operands, types)

    def composed(self, *operands, **params) -> list[jax.Array]:
        """`plain` without `partitioned`; on an Explicit mesh the compiler splits it."""
        types = self.typed(*map(jax.typeof, operands), **params)
        return on_auto_axes(functools.partial(self.plain, **params), types)(*operands)

    def ffi_call(self, results: Sequence[ShapedArray], *operands, aliases=None, **attributes) -> list[jax.Array]:
        """Calls the FFI target itself; aliases: the results that take an operand's place, by the operand's number."""
        like = jax.typeof(operands[0])
        if not like.sharding.mesh.empty:
            whole = NamedSharding(like.sharding.mesh, PartitionSpec())
            results = [r.update(sharding=whole, manual_axis_type=like.manual_axis_type) for r in results]
        return jax.ffi.ffi_call(target_name(self.name), results, input_output_aliases=aliases)(*operands, **attributes)

    def bind(self, *operands, **params) -> list[jax.Array]:
        if why := next(filter(None, map(only_for_xla, operands)), None):
            warn_fallback(self.name, why)
            return self.plain(*operands, **params)
        operands = vary_alike(operands)
        meshes = [jax.typeof(x).sharding.mesh for x in operands]
        if explicit := next((mesh for mesh in meshes if mesh.explicit_axes), None):
            whole = NamedSharding(explicit, PartitionSpec())  # so that cotangents come back whole too
            operands = [jax.reshard(x, whole) if mesh.empty else x for x, mesh in zip(operands, meshes, strict=True)]
            operands = gather(self.layout(*operands, **params), operands)
        return self.primitive.bind(*operands, **params)

    def typed(self, *avals, **params) -> list[ShapedArray]:
        results = self.abstract(*avals, **params)
        return typed_results(self.name, self.layout(*avals, **params), avals, results)

    def _jvp(self, primals, tangents, **params):
        """`jvp`, with tangents in the results' types."""
        out, moved = self.jvp(primals, tangents, **params)
        return out, [
            t if isinstance(t, ad.Zero) else reshard_like(t, jax.typeof(x)) for x, t in zip(out, moved, strict=True)
        ]

    def _transpose(self, cotangents, *operands, **params):
        """`transpose`, which returns the cotangents of the undefined operands; None means zero."""
        if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
            found = [None] * len(operands)
        else:
            found = self.transpose(cotangents, *operands, **params)
        return [
            None if not ad.is_undefined_primal(x) else ad.Zero(x.aval) if g is None else reshard_like(g, x.aval)
            for x, g in zip(operands, found, strict=True)
        ]

    def _check_nans(self, *args, **params):
        """checkify's rule: float_checks report a NaN in a result. How its arguments begin differs from JAX to JAX."""
        return nan_error_check(self.primitive, *args, **self.defined(**params))

    def defined(self, **params: Any) -> dict[str, Any]:
        """The parameters for the same call without undefined elements in any result."""
        return params

    def as_dot_general(self, *operands: ShapedArray, **params: Any) -> Product | None:
        """The operands and parameters of the equivalent lax dot_general call; None: it is no product."""
        del operands, params

    def _rematerialise(self, saveable, unknown, instantiated, equation):
        """How jax.checkpoint treats a call: policies that save JAX's own products save ours, too."""
        needed = [x for x, there in zip(equation.invars, instantiated, strict=True) if isinstance(x, Var) and not there]
        every = [True] * len(equation.outvars)
        none = [False] * len(equation.outvars)
        if any(unknown):
            return None, equation, every, every, needed
        avals = [x.aval for x in equation.invars]
        answers = [saveable(self.primitive, *avals, **equation.params)]
        if (product := self.as_dot_general(*avals, **equation.params)) is not None:
            operands, params = product
            answers.append(saveable(dot_general_p, *operands, **params))
        if any(answer is True or type(answer).__name__ == "SaveableType" for answer in answers):
            return equation, None, none, none, []
        if any(type(answer).__name__ == "Offloadable" for answer in answers):
            warn(f"jax.checkpoint recomputes {self.name}: its policy would offload the result, which jaxops does not")
        return equation, equation, none, every, needed

    def is_composed(self, platform: str, *operands: ShapedArray, **params: Any) -> bool:
        """Whether `composed` runs on a platform, so that jaxops.explain lists the calls in it."""
        del platform, operands, params
        return False

    def flops(self, *operands: ShapedArray, **params: Any) -> int:
        """Multiplications and additions in a matrix product; 0 for other kernels."""
        del operands, params
        return 0

    def explain(self, *operands: ShapedArray, **params: Any) -> str:
        """A call in one line, for jaxops.explain: its parameters. A kernel that chooses overrides it."""
        del operands
        groups = (value._asdict() if hasattr(value, "_asdict") else {name: value} for name, value in params.items())
        shown = [(name, getattr(value, "name", value)) for group in groups for name, value in group.items()]
        return ", ".join(
            f"{name}={value}" for name, value in shown if value is not False and value not in ((), None, -1)
        )

    abstract: Callable[..., list[ShapedArray]]
    layout: Callable[..., Layout]
    call_target: Callable[..., list[jax.Array]]
    plain: Callable[..., list[jax.Array]]
    local: Callable[..., list[jax.Array]]
    is_chosen: Callable[..., bool]
    batch: Callable[..., tuple[list[jax.Array], list[int]]]
    jvp: Callable[..., tuple[list[jax.Array], list[jax.Array]]]
    transpose: Callable[..., list[jax.Array | None]]


def jvp_of_linear(kernel: Kernel, linear: Sequence[bool], primals, tangents, **params):
    """The JVP for a kernel that is linear in some operands and, in plain JAX, differentiable in the others."""
    out = kernel.bind(*primals, **params)
    varied = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    total = [ad.Zero(jax.typeof(x)) for x in out]
    if any(a and b for a, b in zip(linear, varied, strict=True)):
        moved = (
            ad.instantiate_zeros(t) if is_linear else x
            for is_linear, x, t in zip(linear, primals, tangents, strict=True)
        )
        total = kernel.bind(*moved, **params)
    others = [i for i, is_linear in enumerate(linear) if varied[i] and not is_linear]
    if others:

        def function(*values):
            given = dict(zip(others, values, strict=True))
            return kernel.plain(*(given.get(i, x) for i, x in enumerate(primals)), **params)

        _, more = jax.jvp(function, [primals[i] for i in others], [tangents[i] for i in others])
        more = [reshard_like(t, jax.typeof(x)) for t, x in zip(more, out, strict=True)]
        total = [ad.add_tangents(a, b) for a, b in zip(total, more, strict=True)]
    return out, total

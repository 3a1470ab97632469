"""Kernels on many devices: how axes of a kernel's operands and results that correspond to each other stay split alike.

A layout gives every axis of every operand and result a name; axes of one name are one. From it come the types of the
results on Explicit meshes and in shard_map, the rule by which Shardy propagates shardings on Auto meshes, and what is
split how in the program of one device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

# The private imports, for which JAX has no public way: what is lowered through custom_partitioning must know the
# devices at that time, and inside a shard_map over a part of the mesh its shardings come as XLA has them.
from jax._src.dispatch import prim_requires_devices_during_lowering  # isort: skip
from jax._src.sharding_impls import parse_flatten_op_sharding  # isort: skip

#: The mesh axes over which each named axis is split; one that is not split is not there.
Shards = dict[str, tuple[str, ...]]


class Layout(NamedTuple):
    """The names of all axes. summed: those over which partial results of every shard have to be summed."""

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    summed: tuple[str, ...] = ()

    @classmethod
    def of(cls, operands: Iterable[Iterable[str]], results: Iterable[Iterable[str]], summed=()) -> Layout:
        """From names in which "" is an axis of its own, of size 1, along which a tensor is constant or reduced."""
        numbers = itertools.count()

        def complete(side):
            return tuple(tuple(name or f"own{next(numbers)}" for name in names) for names in side)

        return cls(complete(operands), complete(results), tuple(summed))


def _mesh_axes(entry) -> tuple[str, ...]:
    """An entry of a PartitionSpec as a tuple."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _spec(names: Sequence[str], shards: Shards) -> PartitionSpec:
    return PartitionSpec(*(shards.get(name) for name in names))


def typed_results(
    op: str, layout: Layout, operands: Sequence[ShapedArray], results: Sequence[ShapedArray]
) -> list[ShapedArray]:
    """The results with the shardings and manual axes that the operands' imply.

    Raises:
      TypeError: the operands are sharded over an Explicit mesh in ways that do not fit together.
    """
    mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
    if mesh is None:
        return list(results)
    shards: Shards = {}
    for names, x in zip(layout.operands, operands, strict=True):
        for name, entry in zip(names, x.sharding.spec, strict=True):
            if (axes := _mesh_axes(entry)) and shards.setdefault(name, axes) != axes:
                raise TypeError(f"{op}: one axis of its operands is sharded over {shards[name]} and {axes}")
    used = [axis for axes in shards.values() for axis in axes]
    if len(set(used)) != len(used):
        raise TypeError(f"{op}: its operands' axes are sharded over one mesh axis twice: {shards}")
    varying, *others = {x.manual_axis_type for x in operands}
    if others:
        raise TypeError(f"{op}: its operands vary over different manual axes: {varying}, {others}")
    return [
        x.update(sharding=NamedSharding(mesh, _spec(names, shards)), manual_axis_type=varying)
        for names, x in zip(layout.results, results, strict=True)
    ]


def only_for_xla(x: jax.Array) -> str | None:
    """What kernels know nothing of, in a value's type: the host's memory, or a sum over a mesh axis yet to be taken."""
    like = jax.typeof(x)
    if like.memory_space != jax.memory.Space.Device:
        return "an operand is not in the device's memory"
    partial = (axes for kind in (like.sharding.spec, like.manual_axis_type) for axes in (kind.unreduced, kind.reduced))
    return "an operand is unreduced, or its cotangent, over an axis of the mesh" if any(partial) else None


def vary_alike(operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The operands, inside shard_map varying over the same manual axes."""
    axes = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*axes)
    if all(a == union for a in axes):
        return operands
    return [
        jax.lax.pcast(x, tuple(sorted(union - a)), to="varying") if a != union else x
        for x, a in zip(operands, axes, strict=True)
    ]


def reshard_like(x: jax.Array, aval: ShapedArray) -> jax.Array:
    """x, over an Explicit mesh sharded as `aval`."""
    wanted = aval.sharding
    return x if wanted.mesh.empty or jax.typeof(x).sharding.spec == wanted.spec else jax.reshard(x, wanted)


def gather(layout: Layout, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands, over an Explicit mesh not sharded along axes that clash with others and that no result has.

    So [8@x, 16] @ [16@x, 8] is [8@x, 8], whose types are jax.numpy's: the second operand is gathered.
    """
    shardings = [jax.typeof(x).sharding for x in operands]
    entries = [
        list(zip(names, map(_mesh_axes, sharding.spec), strict=True))
        for names, sharding in zip(layout.operands, shardings, strict=True)
    ]
    kept = {name for names in layout.results for name in names}
    split: dict[str, str] = {}  # the named axis that each mesh axis splits: the results' come first
    for name, axes in sorted(itertools.chain(*entries), key=lambda entry: entry[0] not in kept):
        for axis in axes:
            split.setdefault(axis, name)

    def fits(name, axes):
        return name in kept or all(split[axis] == name for axis in axes)

    return [
        x
        if all(itertools.starmap(fits, named))
        else jax.reshard(x, s.update(spec=PartitionSpec(*(axes if fits(name, axes) else None for name, axes in named))))
        for x, s, named in zip(operands, shardings, entries, strict=True)
    ]


def on_auto_axes(function: Callable[..., list[jax.Array]], results: Sequence[ShapedArray]):
    """function, inside which the Explicit axes of a mesh are Auto ones; its results are sharded as the given types."""
    axes = results[0].sharding.mesh.explicit_axes
    wanted = [x.sharding for x in results]
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=wanted) if axes else function


def _whole(x: jax.Array) -> jax.Array:
    """x, over an Explicit mesh not sharded."""
    sharding = jax.typeof(x).sharding
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if any(sharding.spec) else x


class _Group(NamedTuple):
    """What is partitioned inside a shard_map over some axes of a mesh: over the other ones, a group of devices."""

    mesh: Mesh  # with all axes
    axes: Mesh  # one group, with the other axes

    @classmethod
    def of(cls, current: AbstractMesh, devices: Iterable[jax.Device]) -> _Group:
        """From the mesh of the trace; where there is none, everything is one group in which nothing is split."""
        found = sorted(devices, key=lambda device: device.id)
        if current.empty:
            alone = Mesh(found[:1], ("devices",))
            return cls(alone, alone)
        mesh = Mesh(np.reshape(found, current.axis_sizes), current.axis_names)
        free = {
            name: size
            for name, size, kind in zip(current.axis_names, current.axis_sizes, current.axis_types, strict=True)
            if kind != AxisType.Manual
        }
        group = np.reshape(found[: math.prod(free.values())], tuple(free.values()))
        return cls(mesh, Mesh(group, tuple(free)))

    def decode(self, info: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """An operand or result with its sharding over the group."""
        spec = PartitionSpec()
        if self.axes.size > 1:
            (spec, *_) = parse_flatten_op_sharding(info.sharding._hlo_sharding, self.axes)
        spec = PartitionSpec(*spec, *[None] * (len(info.shape) - len(spec)))
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=NamedSharding(self.axes, spec))


def requires_devices(primitive: Primitive) -> None:
    """Must be called for every primitive that is lowered with `partitioned`."""
    prim_requires_devices_during_lowering.add(primitive)


def partitioned(
    name: str,
    layout: Layout,
    local: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    results: Sequence[ShapedArray],
):
    """local(shards, scatter, *operands), in programs of many devices on every device's part of the operands.

    Where the operands are on one device, or inside shard_map, nothing is added to the program. `local` takes the
    operands split over the mesh as `shards` tells, and does the communication. Its results, of the given types, must be
    split likewise, and further as `scatter` tells: over mesh axes over which it sums, where they are wanted split. An
    axis whose size is no multiple of the number of its shards is not split.

    In StableHLO it is a function of the given name, which must tell all that `local` does: it is what remains in the
    key of a compilation cache once jax_remove_custom_partitioning_ptr_from_cache_key takes the address of `local` away.
    """

    @custom_partitioning
    def function(*xs):  # the program of one device, in which nothing is sharded whatever the types on an Explicit mesh
        return [reshard_like(x, aval) for x, aval in zip(local({}, {}, *map(_whole, xs)), results, strict=True)]

    x64 = jax.config.jax_enable_x64
    current = jax.sharding.get_abstract_mesh()

    def partition(mesh, operand_infos, result_infos):
        whole = mesh
        if mesh.empty:
            whole, mesh = group = _Group.of(current, operand_infos[0].sharding.device_set)
            operand_infos, result_infos = ([*map(group.decode, infos)] for infos in (operand_infos, result_infos))
        shards: Shards = {}
        known = {name for names in layout.operands for name in names}

        def split(into: Shards, side, infos, accept):
            for names, info in zip(side, infos, strict=True):
                for name, size, entry in zip(names, info.shape, info.sharding.spec, strict=True):
                    axes = _mesh_axes(entry)
                    even = size % math.prod(mesh.shape[axis] for axis in axes) == 0
                    if axes and even and name in known and name not in shards and name not in into and accept(axes):
                        into[name] = axes

        def unused(axes):
            return not any(axis in taken for taken in shards.values() for axis in axes)

        split(shards, layout.operands, operand_infos, unused)
        split(shards, layout.results, result_infos, unused)
        sums = {axis for name in layout.summed for axis in shards.get(name, ())}
        scatter: Shards = {}
        split(scatter, layout.results[:1], result_infos[:1], lambda axes: set(axes) <= sums and not scatter)

        def sharding(names, shards):
            return NamedSharding(mesh, _spec(names, shards))

        def run(*xs):
            # XLA calls this from where it likes; the caller's Explicit mesh is not that of one device's program.
            with jax.enable_x64(x64), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return local(shards, scatter, *xs)

        outputs = [sharding(names, shards | scatter) for names in layout.results]
        return whole, run, outputs, tuple(sharding(names, shards) for names in layout.operands)

    rule = " -> ".join(", ".join(map(" ".join, side)) for side in (layout.operands, layout.results))
    function.def_partition(partition=partition, sharding_rule=rule)

    def call(*xs):
        return function(*xs)

    call.__name__ = name
    return jax.jit(call)(*operands)

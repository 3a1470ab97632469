"""Kernels on many devices: corresponding axes of a kernel's operands and results stay split alike.

A layout names every axis of every operand and result; axes with the same name are one. It determines the results' types
on Explicit meshes and in shard_map, the rule by which Shardy propagates shardings on Auto meshes, and how tensors are
split in one device's program.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

# Private, as JAX has no public way: the lowering through custom_partitioning must know the devices.
from jax._src.dispatch import prim_requires_devices_during_lowering  # isort: skip

#: The mesh axes over which each named axis is split; one that is not split is not there.
Shards = dict[str, tuple[str, ...]]


class Layout(NamedTuple):
    """All axes' names.

    summed: axes over which every shard's partial results have to be summed. whole: axes that every device has whole.
    """

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    summed: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    @classmethod
    def of(cls, operands: Iterable[Iterable[str]], results: Iterable[Iterable[str]], summed=(), whole=()) -> Layout:
        """From names; "" is a separate axis of size 1, along which a tensor is constant or reduced."""
        numbers = itertools.count()

        def complete(side):
            return tuple(tuple(name or f"own{next(numbers)}" for name in names) for names in side)

        return cls(complete(operands), complete(results), tuple(summed), tuple(whole))


def _mesh_axes(entry) -> tuple[str, ...]:
    """A PartitionSpec's entry as a tuple."""
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
    """Whether a value's type has a property unknown to kernels: host memory, or a pending sum over mesh axes."""
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

    So [8@x, 16] @ [16@x, 8] is [8@x, 8], as in jax.numpy: the second operand is gathered.
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
    """The function with a mesh's Explicit axes made Auto inside; its results are sharded as the given types."""
    axes = results[0].sharding.mesh.explicit_axes
    wanted = [x.sharding for x in results]
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=wanted) if axes else function


def _whole(x: jax.Array) -> jax.Array:
    """x, over an Explicit mesh not sharded."""
    sharding = jax.typeof(x).sharding
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec())) if any(sharding.spec) else x


class _Axis(NamedTuple):
    """A mesh axis, or a part of it: neighbours along it are `stride` apart in the program's list of devices."""

    stride: int
    size: int

    @property
    def end(self) -> int:
        return self.stride * self.size

    @property
    def name(self) -> str:
        return f"devices_{self.stride}"

    def contains(self, part: _Axis) -> bool:
        return self.stride <= part.stride and part.end <= self.end


def _axes_of(mesh: AbstractMesh) -> dict[str, _Axis]:
    """A mesh's axes by name."""
    ends = itertools.accumulate(reversed(mesh.axis_sizes), operator.mul)
    axes = [_Axis(end // size, size) for end, size in zip(ends, reversed(mesh.axis_sizes), strict=True)]
    return dict(zip(mesh.axis_names, reversed(axes), strict=True))


def _free_axes(mesh: AbstractMesh) -> list[str]:
    return [name for name in mesh.axis_names if name not in mesh.manual_axes]


def _mesh_of(axes: Sequence[_Axis]) -> AbstractMesh:
    return AbstractMesh(tuple(axis.size for axis in axes), tuple(axis.name for axis in axes))


def _grid(axes: Iterable[_Axis]) -> np.ndarray:
    """The devices' places in the program's list, with a dimension for each axis."""
    return sum(np.ix_(*(np.arange(axis.size) * axis.stride for axis in axes)), start=np.zeros((), int))


def _tiles(info: jax.ShapeDtypeStruct) -> np.ndarray | None:
    """XLA's numbers for the devices that hold each tile, `[tiles along each axis..., copies]`; None: not split."""
    sharding = None if info.sharding is None else info.sharding._hlo_sharding
    if sharding is None or not sharding.is_tiled():
        return None
    counts = sharding.tile_assignment_dimensions()[: len(info.shape)]
    return np.reshape(sharding.tile_assignment_devices(), (*counts, -1))


def _split_axes(places: np.ndarray) -> list[_Axis] | None:
    """The axes, outermost first, over which shards on the devices at these places are split; None: irregular."""
    axes: list[_Axis] = []
    while (count := len(places)) > 1:
        stride = int(places[1] - places[0])
        sizes = [n for n in range(2, count + 1) if count % n == 0 and all(np.diff(places[:n]) == stride)]
        if stride <= 0 or not sizes:
            return None
        axes.insert(0, _Axis(stride, sizes[-1]))
        places = places[:: sizes[-1]]
    return axes


class _Partition(NamedTuple):
    """How a call's operands and results are split, over axes into which all their shardings divide the devices.

    Inside a shard_map over some axes of a mesh XLA splits each group of devices by itself. It renumbers a group's
    devices for each call, in the order of the result's tiles, so its shardings do not tell which mesh axis is which. A
    probe does: an operand that is split over all the group's axes, in the mesh's order.

    whole: the mesh with all devices. group: one group's mesh, in the order of XLA's numbers. specs: the operands' and
    results' specs, over the group's axes.
    """

    whole: AbstractMesh
    group: AbstractMesh
    specs: list[PartitionSpec]

    @classmethod
    def of(cls, infos: Sequence[jax.ShapeDtypeStruct], manual: AbstractMesh | None) -> _Partition:
        """From XLA's shardings; if they do not tell how a tensor is split, it is not split.

        Args:
          infos: the operands, after the probe, if it is present, and the results.
          manual: inside a shard_map over some of a mesh's axes, the mesh.
        """
        devices = next((info.sharding.num_devices for info in infos if info.sharding is not None), 1)
        everything = _Axis(1, devices)
        alone = _mesh_of([everything])
        nothing = cls(alone, alone, [PartitionSpec(*[None] * len(info.shape)) for info in infos])
        given, outer, places = [everything], [], np.arange(devices)  # places: by XLA's numbers
        if manual is not None:
            named = _axes_of(manual)
            given, outer = [*named.values()], [named[name] for name in manual.manual_axes]
            inner = _grid(named[name] for name in _free_axes(manual))
            probe = _tiles(infos[0])
            if probe is None or probe.shape != (*inner.shape, 1):
                return nothing
            places = np.empty(probe.size, int)
            places[probe[..., 0]] = inner
        splits: list[list[list[_Axis]]] = []
        for info in infos:
            tiles = _tiles(info)
            if tiles is None:
                splits.append([[] for _ in info.shape])
                continue
            if tiles.size != len(places):
                return nothing
            at = places[tiles]
            lines = [np.moveaxis(at, a, 0).reshape(count, -1)[:, 0] for a, count in enumerate(at.shape)]
            split = [_split_axes(line) for line in lines[:-1]]
            regular = sum(np.ix_(*(line - line[0] for line in lines)), start=at.flat[0])
            if None in split or not np.array_equal(at, regular):
                return nothing
            splits.append(split)
        axes = itertools.chain(given, *itertools.chain(*splits))
        bounds = {bound for axis in axes for bound in (axis.stride, axis.end)}
        pairs = list(itertools.pairwise(sorted(bounds, reverse=True)))
        if any(end % stride for end, stride in pairs):
            return nothing
        parts = [_Axis(stride, end // stride) for end, stride in pairs]
        numbers = {place: number for number, place in enumerate(places.tolist())}
        group = [part for part in parts if not any(axis.contains(part) for axis in outer)]
        group.sort(key=lambda part: -numbers[part.stride])
        if not np.array_equal(places, _grid(group).ravel()):
            return nothing

        def names(axes):
            return tuple(part.name for axis in axes for part in parts if axis.contains(part))

        return cls(_mesh_of(parts), _mesh_of(group), [PartitionSpec(*map(names, split)) for split in splits])


def _manual_mesh(operands: Sequence[jax.Array]) -> AbstractMesh | None:
    """The mesh of the shard_map that holds the operands; None: in none, or only over axes of size 1."""
    meshes = (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in operands))
    return next((m for m in meshes if math.prod(m.shape[name] for name in m.manual_axes) > 1), None)


def _probe(mesh: AbstractMesh) -> jax.Array:
    """An array that is split over all mesh axes except the manual ones: see `_Partition`."""
    names = _free_axes(mesh)

    def split():
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*names))
        return jax.lax.with_sharding_constraint(jnp.zeros([mesh.shape[name] for name in names], bool), sharding)

    with jax.sharding.use_abstract_mesh(mesh):
        if not mesh.explicit_axes:
            return split()
        spec = PartitionSpec(*(name if name in mesh.explicit_axes else None for name in names))
        wanted = NamedSharding(mesh, spec)
        return jax.sharding.auto_axes(split, axes=mesh.explicit_axes, out_sharding=wanted)()


def requires_devices(primitive: Primitive) -> None:
    """Must be called for every primitive that is lowered with `partitioned`."""
    prim_requires_devices_during_lowering.add(primitive)


def lowering_of(function: Callable[..., list[jax.Array]]) -> Callable[..., Any]:
    """The lowering rule for a primitive that is a function in JAX and may use `partitioned`."""
    lower = mlir.lower_fun(function, multiple_results=True)

    def rule(ctx, *operands, **params):
        module = ctx.module_context
        mesh = getattr(module.axis_context, "mesh", None)
        if isinstance(mesh, AbstractMesh):  # a shard_map's; custom_partitioning asks for its devices, to count them
            devices = np.reshape(jax.devices()[:1] * mesh.size, mesh.axis_sizes)
            counted = dataclasses.replace(module.axis_context, mesh=Mesh(devices, mesh.axis_names))
            ctx = ctx.replace(module_context=module.replace(axis_context=counted))
        return lower(ctx, *operands, **params)

    return rule


def partitioned(
    name: str,
    layout: Layout,
    local: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    results: Sequence[ShapedArray],
):
    """local(shards, scatter, *operands), if there are many devices, on every device's part of the operands.

    If the operands are on one device, or inside shard_map, nothing is added to the program. `local` takes the operands
    split over the mesh as `shards` tells, and does the communication. Its results, with the given types, must be split
    likewise, and further as `scatter` tells: over mesh axes over which it sums, if they are wanted split. An axis is
    not split if the number of its shards does not divide its size.

    In StableHLO it is a function with the given name, which must tell everything that `local` does: only the name
    remains in a compilation cache's key once jax_remove_custom_partitioning_ptr_from_cache_key removes the address of
    `local`.
    """

    def alone(*xs):  # one device's program, in which nothing is sharded whatever the types on an Explicit mesh
        return [reshard_like(x, aval) for x, aval in zip(local({}, {}, *map(_whole, xs)), results, strict=True)]

    x64 = jax.config.jax_enable_x64
    manual = _manual_mesh(operands)
    everything = manual is not None and all(manual.shape[name] == 1 for name in _free_axes(manual))
    probes = [] if manual is None or everything else [_probe(manual)]

    def partition(_, operand_infos, result_infos):
        infos = [*operand_infos, *result_infos]
        whole, mesh, specs = _Partition.of(infos, manual)
        probe_specs, given = specs[: len(probes)], list(zip(infos, specs, strict=True))[len(probes) :]
        given_operands, given_results = given[: len(layout.operands)], given[len(layout.operands) :]
        shards: Shards = {}
        known = {name for names in layout.operands for name in names} - {*layout.whole}

        def split(into: Shards, side, given, accept):
            for names, (info, spec) in zip(side, given, strict=True):
                for name, size, entry in zip(names, info.shape, spec, strict=True):
                    axes = _mesh_axes(entry)
                    even = size % math.prod(mesh.shape[axis] for axis in axes) == 0
                    if axes and even and name in known and name not in shards and name not in into and accept(axes):
                        into[name] = axes

        def unused(axes):
            return not any(axis in taken for taken in shards.values() for axis in axes)

        split(shards, layout.operands, given_operands, unused)
        split(shards, layout.results, given_results, unused)
        sums = {axis for name in layout.summed for axis in shards.get(name, ())}
        scatter: Shards = {}
        split(scatter, layout.results[:1], given_results[:1], lambda axes: set(axes) <= sums and not scatter)

        def run(*xs):
            # XLA calls this from anywhere; the caller's Explicit mesh does not apply to one device's program.
            with jax.enable_x64(x64), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return local(shards, scatter, *xs[len(probes) :])

        operand_specs = [*probe_specs, *(_spec(names, shards) for names in layout.operands)]
        result_specs = [_spec(names, shards | scatter) for names in layout.results]
        shardings = [tuple(NamedSharding(mesh, spec) for spec in side) for side in (result_specs, operand_specs)]
        return whole, run, list(shardings[0]), shardings[1]

    partitioner = custom_partitioning(lambda *xs: alone(*xs[len(probes) :]))
    probe_names = [[f"probe{a}" for a in range(probe.ndim)] for probe in probes]
    sides = ((*probe_names, *layout.operands), layout.results)
    rule = " -> ".join(", ".join(map(" ".join, side)) for side in sides)
    # In the order in which the rule names them.
    whole = tuple(dict.fromkeys(name for names in itertools.chain(*sides) for name in names if name in layout.whole))
    options = {"sharding_rule": rule, "need_replication_factors": whole}
    partitioner.def_partition(partition=partition, decode_shardings=False, **options)

    def call(*xs):
        return alone(*xs) if everything else partitioner(*xs)

    call.__name__ = name
    return jax.jit(call)(*probes, *operands)

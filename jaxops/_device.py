"""The GPU that programs are lowered for."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax


class Device(NamedTuple):
    """What the choice of a kernel depends on: the CUDA compute capability and the number of multiprocessors."""

    capability: str
    multiprocessors: int


#: Assumed where a program is lowered for CUDA on a machine without a GPU.
H200 = Device("9.0", 132)


@functools.cache
def local_device() -> Device:
    """The first local CUDA device."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return H200
    return Device(str(device.compute_capability), int(device.core_count))

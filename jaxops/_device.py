"""The GPU that programs are lowered for, and the GPU half's architectures."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import jax

#: Hopper's kernels (wgmma, clusters) need this compute capability, and code compiled for this architecture.
HOPPER, HOPPER_ARCHITECTURE = "9.0", "90a"


class Device(NamedTuple):
    """The GPU, as the kernel choice sees it.

    capability: the CUDA compute capability. architectures: the architectures that the GPU half was compiled for, as in
    CMake ("80-real", "90a"); None: this device's.
    """

    capability: str
    multiprocessors: int
    architectures: tuple[str, ...] | None = None

    def why_not_hopper(self) -> str | None:
        """Why Hopper's kernels do not run here; None if they do."""
        if self.capability != HOPPER:
            return f"tuned for compute capability {HOPPER}, not {self.capability}"
        if self.architectures is None or any(a.split("-")[0] == HOPPER_ARCHITECTURE for a in self.architectures):
            return None
        return f"Hopper's kernels were not compiled: JAXOPS_CUDA_ARCHITECTURES needs {HOPPER_ARCHITECTURE}"

    def why_no_kernels(self) -> str | None:
        """Why no kernel in the GPU half runs here; None if some do."""
        if self.architectures is None or any(_runs_on(a, self.capability) for a in self.architectures):
            return None
        compiled = ";".join(self.architectures)
        return f"the GPU half was compiled for {compiled} (JAXOPS_CUDA_ARCHITECTURES), not for {self.capability}"


def _runs_on(architecture: str, capability: str) -> bool:
    """Whether code compiled for an architecture runs on a GPU.

    Machine code ("-real") runs on later GPUs in its generation, PTX on all later GPUs. "a" code runs only on its own
    GPU, "f" code only on its generation.
    """
    if not (match := re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", architecture)):
        return True  # an unknown name: CUDA gives its own error
    needed = int(match[1]), int(match[2])
    have = tuple(map(int, capability.split(".")))
    if match[3] == "a":
        return have == needed
    return have >= needed and (have[0] == needed[0] or not (match[3] or match[4] == "-real"))


#: The device assumed for lowering to CUDA on a machine without a GPU.
H200 = Device(HOPPER, 132)


@functools.cache
def local_device() -> Device:
    """The first local CUDA device."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return H200
    return Device(str(device.compute_capability), int(device.core_count), _compiled_architectures())


def _compiled_architectures() -> tuple[str, ...] | None:
    try:
        from jaxops import _cuda
    except ImportError:
        return None
    return tuple(re.split("[; ]+", _cuda.cuda_architectures))

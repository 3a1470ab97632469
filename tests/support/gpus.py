"""This machine's GPUs, for tests and tools that run several processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping


def visible(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES; without it all GPUs' numbers."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], stdout=subprocess.PIPE, text=True)
    return [str(i) for i in range(len(listed.stdout.splitlines()))] if listed.returncode == 0 else []


def of_worker(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to set in a pytest-xdist worker, before jax is imported.

    Each begins with another GPU, and takes only the memory that it needs.
    """
    worker = environment.get("PYTEST_XDIST_WORKER", "")
    found = visible(environment) if worker.startswith("gw") else []
    if not found:
        return {}
    first = int(worker[2:]) % len(found)
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(found[first:] + found[:first]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
    }

"""Meshes for tests; a test that needs more devices than there are is skipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import pytest
from jax.sharding import AxisType, Mesh


def mesh_of(shape: Sequence[int], names: Sequence[str], kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh on the first devices."""
    count = math.prod(shape)
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[:count])

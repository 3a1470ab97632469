import contextlib
import os
import pathlib
import sys
import zlib

from support import gpus

# For `benchmarks`: last, behind the installed jaxops.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

os.environ.update(gpus.of_worker())

# Before jax: eight devices wherever the tests run, unless the caller says otherwise. XLA's compiler takes most of the
# tests' time, so it does less for the CPU: it optimises nothing, emits fusions the older way, unrolls no loops and does
# not split programs between threads. Tests take half as long. Products and sums are then separate instructions, so
# XLA's f32 activations are two to three times as inexact, for which the tests allow.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        ""
        if os.path.exists("/proc/driver/nvidia/version")
        else "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_parallel_codegen_split_count=1 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true,xla_cpu_disable_loop_unrolling=true",
        os.environ.get("XLA_FLAGS", ""),
    ]
)

# If there are several processes, each has one processor. NumPy's products would start a thread for every processor.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import numpy as np
import pytest
from support import frames

import jaxops
from jaxops import _kernel, _warnings
from jaxops._device import local_device

#: How many tests this machine cannot run.
_LEFT_OUT = pytest.StashKey[int]()

# tools/variant.sh sets JAXOPS_SITE to the folder of the package under test.
if not jaxops.__file__.startswith(os.environ.get("JAXOPS_SITE", "")):
    raise ImportError(f"the tests are for {os.environ['JAXOPS_SITE']}, but jaxops is {jaxops.__file__}")


def _runs_here(item) -> bool:
    """Whether this machine has the devices that a test's marks `gpu` and `cuda` ask for."""
    if item.get_closest_marker("cuda") and "cuda" not in _kernel.HANDLERS:
        return False
    if (mark := item.get_closest_marker("gpu")) is None:
        return True
    return jax.default_backend() == "gpu" and (not mark.args or local_device().capability in mark.args)


@pytest.hookimpl(trylast=True)  # behind -m and -k
def pytest_collection_modifyitems(config, items):
    """Leaves out tests that cannot run here, so that a summary lists only skips that say something."""
    here = [item for item in items if _runs_here(item)]
    config.stash[_LEFT_OUT] = len(items) - len(here)
    if len(here) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not _runs_here(item)])
        items[:] = here


def pytest_sessionfinish(session):
    """If there are several workers, one tells how many it left out: all leave out the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter, config):
    if number := config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(f"{number} tests left out: they need a GPU, or jaxops built with its GPU half")


@pytest.fixture
def rng(request):
    """Random numbers that differ from test to test and not from run to run."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def x64():
    """float64 during a test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def full_precision():
    """f32 in full precision unless a test says otherwise; a GPU's default is TF32, also in the reference."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def fallback(monkeypatch):
    """Expects fallback warnings, and lets them appear again."""
    monkeypatch.setattr(_warnings, "_said", set())
    with pytest.warns(jaxops.FallbackWarning) as caught:
        yield caught


@pytest.fixture(scope="session")
def on_gpu():
    return jax.default_backend() == "gpu"


@pytest.fixture(scope="session")
def memory():
    """The memory for each half that can run here."""
    found = {"cpu": frames.Host()}
    if "cuda" in _kernel.HANDLERS:
        with contextlib.suppress(OSError, RuntimeError):  # no driver, no device
            found["cuda"] = frames.Device()
    return found

"""tools/sanitize_gpu.py and the calls that it makes; tools/kernels.py."""

import collections
import importlib.util
import os
import pathlib
import struct
import sys

import numpy as np
import plan_cases
import pytest
from support import frames, gpus
from support.frame_cases import LOGITS, NORMS, row_calls

from jaxops import _cpu

ROW = "_ZN6jaxops4rows9RowKernelINS0_5AlongILNS0_7SharingE1ELi8ELi80EEELi8ELNS0_6LayoutE0EfNS_3OpsEEEvT3_"


# --- the calls ---


def test_one_call_for_each_plan():
    """They cover every kind of kernel in every op; they are few enough to run under racecheck."""
    calls = plan_cases.distinct_calls()
    plans = [plan_cases.plan_of(call) for call in calls]
    assert len(set(plans)) == len(plans) < 4000
    kinds = collections.defaultdict(set)
    for plan in plans:
        kinds[plan[0]].add(plan[4])
    held = {"WarpRows", "BlockRows", "ClusterRows", "TileRows", "StreamedTiles"}
    assert all(held <= found for found in kinds.values()), kinds
    assert all("StreamedRows" in kinds[f"{op}_fwd"] for op in (*LOGITS, *NORMS))
    assert all("StagedRows" in kinds[f"{op}_{way}"] for op in NORMS for way in ("fwd", "bwd"))


@pytest.mark.parametrize("op", [*LOGITS, *NORMS])
def test_calls_are_those_that_jax_makes(op):
    """The same operands and attributes, in the same order."""
    scale, both = {"scale": (0,)}, {"scale": (0,), "bias": (0,)}
    has = {
        "layer_norm": [both, scale | {"dscale": (), "dbias": ()}],
        "rms_norm": [scale, scale | {"dscale": ()}],
    }.get(op, [{"max": True}, {}])
    for traced, own in zip(row_calls(op, "float32", False), has, strict=True):
        call = plan_cases.row_call(traced.handler, ("f32", "f32"), traced.operands[0].shape, (1,), own, 1)
        assert (call.operands, call.results) == (traced.operands, traced.results)
        kinds = [{name: np.asarray(value).dtype for name, value in c.attributes.items()} for c in (call, traced)]
        assert kinds[0] == kinds[1]


def test_handlers_take_the_calls():
    """On the CPU half, with few elements."""
    memory, rng, count = frames.Host(), np.random.default_rng(0), 0
    for call in plan_cases.distinct_calls():
        if sum(buffer.bytes for buffer in (*call.operands, *call.results)) < 1 << 16:
            frames.run("cpu", memory, call, frames.draw(call, rng), fill=None)
            count += 1
    assert count > 300


# --- the tools ---


@pytest.fixture
def sanitize_gpu():
    path = pathlib.Path(__file__).parents[2] / "tools/sanitize_gpu.py"
    spec = importlib.util.spec_from_file_location("sanitize_gpu", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_kernels_once_under_a_tool(sanitize_gpu, tmp_path, monkeypatch, capfd):
    """Two processes under a tool that finds nothing, and one whose calls end early."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(
        "#!/bin/sh\necho ran 1 of 1 calls\n"
        "echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert sanitize_gpu.main(["--only", "racecheck", "--jobs", "2"]) == 0
    out = capfd.readouterr().out
    assert "ok     racecheck calls 0" in out and "ran 1 of 1 calls" in out
    assert "2 of 2 runs are clean." in out
    fake.write_text("#!/bin/sh\necho '========= RACECHECK SUMMARY: 0 hazards'\n")
    assert sanitize_gpu.main(["--only", "racecheck", "--jobs", "2"]) == 2  # nothing says that calls were made


def test_gpus_of_workers(tmp_path, monkeypatch):
    """The machine's GPUs, or the ones that are chosen already, with another one first in each worker."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nfor i in 0 1 2; do echo GPU $i: one; done\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.visible({}) == ["0", "1", "2"]
    assert gpus.of_worker({}) == {} == gpus.of_worker({"PYTEST_XDIST_WORKER": "master"})
    assert gpus.of_worker({"PYTEST_XDIST_WORKER": "gw4"}) == {
        "CUDA_VISIBLE_DEVICES": "1,2,0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    chosen = {"CUDA_VISIBLE_DEVICES": "5,7", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    assert gpus.of_worker(chosen | {"PYTEST_XDIST_WORKER": "gw3"}) == chosen | {"CUDA_VISIBLE_DEVICES": "7,5"}
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": ""}) == []
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert gpus.visible({}) == []
    fake.unlink()
    assert gpus.visible({}) == []


def test_counts_of_kernels(tmp_path):
    """Names out of a module's .rodata, and their meaning."""
    path = pathlib.Path(__file__).parents[2] / "tools/kernels.py"
    spec = importlib.util.spec_from_file_location("kernels", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    names, data = b"\0.shstrtab\0.rodata\0", ROW.encode() + b"\0_ZN6jaxops1x\0"
    header = bytearray(64)
    struct.pack_into("<Q", header, 40, 64)
    struct.pack_into("<HHH", header, 58, 64, 2, 0)
    at = 64 + 128
    sections = [
        struct.pack("<IIQQQQ", 1, 0, 0, 0, at, len(names)),
        struct.pack("<IIQQQQ", 11, 0, 0, 0, at + len(names), len(data)),
    ]
    image = bytes(header) + b"".join(s.ljust(64, b"\0") for s in sections) + names + data
    assert tool.kernels(image) == {ROW, "_ZN6jaxops1x"}
    assert tool.kind(ROW) == "RowKernel block"


def test_plans_of_an_older_build():
    """The functions that Python asks for plans are compiled into each half that is built."""
    assert {"plan_rows", "plan_segments"} <= set(dir(_cpu))

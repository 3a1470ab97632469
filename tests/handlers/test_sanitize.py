"""tools/sanitize_gpu.py: names of kernels, the choice of calls, and the calls themselves on the CPU."""

import ctypes
import importlib.util
import json
import os
import pathlib
import struct
import sys

import kernel_survey
import numpy as np
import pytest
from kernel_survey import Kernel, Surveyed
from support import frames, gpus, kernel_cases
from support.frame_cases import LOGITS, NORMS, row_calls

ADD_CHUNKS = "_ZN6jaxops4rows15AddChunksKernelINS_4AxesILi1ELi12EEEfEEvT_S4_NS0_10SumResultsIT0_EE"
EPILOGUE = (
    "_ZN6jaxops48_GLOBAL__N__6ab1e8c5_15_epilogue_bwd_cu_1dd83c7716EpilogueBackwardIfLi4EEEvNS0_17EpilogueArgumentsE"
)
PAD_ROWS = "_ZN6jaxops6matmul7PadRowsEPKhllPhl"
ROW = (
    "_ZN6jaxops4rows9RowKernelINS0_5AlongILi256ELi8ELi1ELi16ELi1EEELi8ELNS0_3LayE0EfNS_43_GLOBAL__N__ebe2e40d_10_softmax"
    "_cu_3e36056514SoftmaxForwardILNS_5GivenE0E13__nv_bfloat16S8_EEEEvT3_NSt11conditionalIXeqT1_LS4_2EENS0_8GeometryIXsr"
    "SA_6kSlotsELi12ELi12ELb0EEENSC_IXsrSA_6kSlotsELi4ELi1ELb0EEEE4typeE"
)
STREAM = (
    "_ZN6jaxops4rows15RowStreamKernelINS0_6StagedINS0_5AlongILi8ELi16ELi1ELi1ELi1EEELi2ELi3ELi7ELb1EEELi1ELNS0_3LayE0Ef"
    "NS_44_GLOBAL__N__47c7b5fa_11_rms_norm_cu_f233c1a213NormForwardOpILb0ELb0E13__nv_bfloat16S9_EEEEvT3_NSt11conditional"
    "IXooeqT1_LS6_2EaaeqsrSB_11kParametersLi0EnesrSB_11kBroadcastsLi0EENSC_IXeqT1_LS6_2EENS0_8GeometryIXsrSB_6kSlotsELi1"
    "2ELi12ELb0EEENSD_IXsrSB_6kSlotsELi4ELi1ELb0EEEE4typeENSD_IXsrSB_6kSlotsELi1ELi1EXeqsrSB_7kInputsLi2EEEEE4typeE"
)
WGMMA = (
    "_ZN6jaxops6matmul11WgmmaMatmulINS0_9WgmmaTileILi32ELi64ELi1ELi7ELNS0_8ScheduleE0ELi2ELi2EEENS0_7ProductIffLNS_6hop"
    "per5MajorE0ELS7_0ELi1ELb0EEEEEvNS0_14WgmmaArgumentsE"
)


def surveyed(kernels, cost, handler="softmax_fwd"):
    x = frames.Operand((3, 7), 11)
    attributes = {"axes": np.array([1]), "query_axis": np.int64(-1), "has_bias": np.bool_(False), "epsilon": 1e-5}
    return Surveyed(frames.Call(handler, (x,), (x,), attributes), frozenset(kernels), cost)


# --- names ---


@pytest.mark.parametrize(
    ("mangled", "family", "member"),
    [
        (ADD_CHUNKS, "AddChunksKernel", "Axes<1, 12>, f32"),
        (EPILOGUE, "EpilogueBackward", "f32, 4"),
        (PAD_ROWS, "PadRows", "itself"),
        (ROW, "RowKernel SoftmaxForward<no options, bf16, bf16>, plain, packs of 8", "Along<256, 8, 1, 16, 1>"),
        (
            STREAM,
            "RowStreamKernel NormForwardOp<false, false, bf16, bf16>, plain, packs of 1",
            "Staged<Along<8, 16, 1, 1, 1>, 2, 3, 7, true>",
        ),
        (
            WGMMA,
            "WgmmaMatmul",
            "WgmmaTile<32, 64, 1, 7, Schedule 0, 2, 2>, Product<f32, f32, Major 0, Major 0, 1, false>",
        ),
        ("no_mangled_name", "no_mangled_name", "itself"),
    ],
)
def test_kernels_by_name(mangled, family, member):
    assert (Kernel.of(mangled).family, Kernel.of(mangled).member) == (family, member)
    assert kernel_survey.grouped([mangled]) == {family: [member]}


def test_what_placements_say():
    assert [Kernel.of(name).cluster for name in (ROW, STREAM, WGMMA)] == [16, 1, 1]
    assert Kernel("RowKernel", ("Across<8, 64, 16, 8, 2>",)).cluster == 8
    assert Kernel("RowSumsKernel", ("Looped<Along<16, 2, 2, 1, 1>, 2, false, true>",)).block_rows == 16
    assert [Kernel.of(name).stays for name in (ROW, STREAM)] == [False, True]
    # 16 rows a block, each in turn five times
    assert kernel_survey.enough_rows(STREAM, blocks=10, rows=800)
    assert not kernel_survey.enough_rows(STREAM, blocks=10, rows=799)
    assert kernel_survey.enough_rows(ROW, blocks=1600, rows=100)


def test_kernels_of_a_module(tmp_path):
    text = b"\0.rodata\0.symtab\0"
    kernels = b"\x07" + ROW.encode() + b"\0jaxops\0" + PAD_ROWS.encode() + b"\0_ZN6jaxops3cut"
    data = text + kernels + STREAM.encode() + b"\0"
    sections = [(0, 0, 0), (1, 64 + len(text), len(kernels)), (9, 64 + len(text) + len(kernels), len(STREAM) + 1)]
    sections.append((0, 64, len(text)))
    header = bytearray(64)
    struct.pack_into("<Q", header, 40, 64 + len(data))
    struct.pack_into("<HHH", header, 58, 64, len(sections), len(sections) - 1)
    table = b"".join(struct.pack("<IIQQQQ", name, 0, 0, 0, at, size).ljust(64, b"\0") for name, at, size in sections)
    module = tmp_path / "module.so"
    module.write_bytes(bytes(header) + data + table)
    assert kernel_survey.module_kernels(str(module)) == {ROW, PAD_ROWS}


# --- the choice ---


def test_choice_is_few_cheap_calls():
    costs = {"abc": 9, "ab": 2, "c": 1.1, "a": 1.5, "bc": 5, "d": 50}
    calls = [surveyed(kernels, cost) for kernels, cost in costs.items()]
    chosen = kernel_survey.cover(calls, lambda entry: entry.kernels)
    assert ["".join(sorted(entry.kernels)) for entry in chosen] == ["ab", "c", "d"]
    assert kernel_survey.cover([], lambda entry: entry.kernels) == []


def test_choice_begins_with_placements(monkeypatch):
    """The cheapest kernel of each; kernels launched then are left out of the rest."""
    assert Kernel("RowKernel", ("Along<8, 4>", "4", "plain", "f32", "Op")).sharing == "RowKernel Along<8, 4> plain"
    assert Kernel.of(PAD_ROWS).sharing == "PadRows"
    assert Kernel.of(ROW).sharing == "RowKernel Along<256, 8, 1, 16, 1> plain"
    placements = {"dear": "a", "cheap": "a", "other": "b"}
    calls = [surveyed([name], cost) for name, cost in (("dear", 3), ("cheap", 2), ("other", 1))]
    monkeypatch.setattr(kernel_survey, "sharings", lambda entry: frozenset(placements[k] for k in entry.kernels))
    first, rest = kernel_survey.choose(calls)
    assert [entry.cost for entry in first] == [1, 2] and [entry.cost for entry in rest] == [3]


def test_parts_are_evenly_long():
    first = [surveyed([str(i)], cost) for i, cost in enumerate([10, 1, 1, 1, 1, 1, 5, 5, 3, 2])]
    rest = [surveyed([f"more {i}"], 7) for i in range(3)]
    parts = [kernel_survey.part_of((first, rest), i, 3) for i in range(3)]
    assert [sum(entry.cost for entry in part[:-1]) for part in parts] == [10, 10, 10]
    assert sorted(min(entry.kernels) for part in parts for entry in part[:-1]) == sorted(str(i) for i in range(10))
    assert sorted(min(part[-1].kernels) for part in parts) == ["more 0", "more 1", "more 2"]


def test_clusters_cost_more():
    assert kernel_survey.cost([(ROW, 16)], 0) > 5 * kernel_survey.cost([(STREAM, 16)], 0)
    assert kernel_survey.cost([(ROW, 160)], 1 << 20) > kernel_survey.cost([(ROW, 16)], 1000)


def test_coverage():
    text = kernel_survey.coverage([ROW, STREAM, PAD_ROWS], [surveyed([f"{ROW} groups", "other"], 1)])
    assert "PadRows:\n    itself\n" in text and "Staged<Along<8, 16, 1, 1, 1>, 2, 3, 7, true>" in text
    assert "SoftmaxForward" not in text
    assert "\n1 of the module's 3 kernels were launched, and one or more of 1 of the 3 placements" in text
    assert text.endswith("\n1 launched ones are not the module's.")


def test_numbers_of_rows_where_kernels_change():
    tried = {}

    def launched(rows):
        tried[rows] = frozenset([("few" if rows < 300 else "some" if rows < 5000 else "many")])
        return tried[rows]

    kernel_survey.explore(launched, 4, 1 << 17)
    least = {kernel: min(rows for rows, found in tried.items() if kernel in found) for kernel in ("some", "many")}
    assert 300 <= least["some"] < 375 and 5000 <= least["many"] < 6250
    assert len(tried) < 30
    tried.clear()
    kernel_survey.explore(launched, 4, 200)
    kernel_survey.explore(launched, 4, 4)
    assert sorted(tried) == [4, 200]


# --- the calls ---


def test_calls_survive_json():
    call = surveyed("ab", 1.5)
    again = Surveyed.from_json(json.loads(json.dumps(call.to_json())))
    assert (again.kernels, again.cost, again.call.operands) == (call.kernels, 1.5, call.call.operands)
    for name, value in call.call.attributes.items():
        np.testing.assert_array_equal(again.call.attributes[name], value)
        assert np.asarray(again.call.attributes[name]).dtype == np.asarray(value).dtype
    assert frames._attributes([], again.call.attributes).size == 4


@pytest.mark.parametrize("op", [*LOGITS, *NORMS])
def test_calls_are_those_that_jax_makes(op):
    """The same operands and attributes, in the same order."""
    scale, both = {"scale": (0,)}, {"scale": (0,), "bias": (0,)}
    has = {
        "layer_norm": [both, scale | {"dscale": (), "dbias": ()}],
        "rms_norm": [scale, scale | {"dscale": ()}],
    }.get(op, [{"max": True}, {}])
    for traced, own in zip(row_calls(op, "float32", False), has, strict=True):
        call = kernel_cases.row_call(traced.handler, ("f32", "f32"), traced.operands[0].shape, (1,), own, 1)
        assert (call.operands, call.results) == (traced.operands, traced.results)
        kinds = [{name: np.asarray(value).dtype for name, value in c.attributes.items()} for c in (call, traced)]
        assert kinds[0] == kinds[1]


def test_handlers_take_the_calls():
    """Calls on few elements, on the CPU half."""
    memory, count = kernel_survey.Memory(frames.Host()), 0
    for case in kernel_cases.row_cases():
        call = case.make(case.least)
        if sum(buffer.bytes for buffer in (*call.operands, *call.results)) < 1 << 18:
            frames.call_handler("cpu", call, *memory.place(call))
            count += 1
    assert count > 10000


class Unwatched:
    """Instead of CUPTI: the test says what is launched."""

    def __init__(self):
        self.found = []


def test_survey(tmp_path, monkeypatch, capsys):
    """In two goes: one kernel needs many rows, and one call is refused."""
    launches = Unwatched()

    def call_of(rows):
        return kernel_cases.row_call("softmax_fwd", ("f32", "f32"), (rows, 8), (1,), {})

    def call_handler(half, call, operands, results):
        rows = call.operands[0].shape[0]
        if rows == 5:
            raise frames.HandlerError(3, "no")
        launches.found.append((ROW, 4) if rows < 1000 else (STREAM, 4))

    monkeypatch.setattr(kernel_survey, "Launches", lambda: launches)
    monkeypatch.setattr(kernel_survey, "module_kernels", lambda _: {ROW, STREAM, PAD_ROWS})
    monkeypatch.setattr(frames, "Device", frames.Host)
    monkeypatch.setattr(frames, "call_handler", call_handler)
    cases = [kernel_cases.Case(call_of, most=1 << 14), kernel_cases.Case(call_of, 5, 5)]
    monkeypatch.setattr(kernel_cases, "every_case", cases.copy)
    module, path = tmp_path / "module.so", tmp_path / "build" / "kernels.json"
    module.write_bytes(b"one")
    kernel_survey.survey(str(path), str(module), 0)
    assert kernel_survey.known(str(path), str(module))["cases"] == 0
    kernel_survey.survey(str(path), str(module), 100)
    found, chosen = kernel_survey.load(str(path))
    assert (found["cases"], found["all_cases"], list(found["refused"].values())) == (2, 2, [1])
    rows = {min(entry.kernels): entry.call.operands[0].shape[0] for entries in chosen for entry in entries}
    assert rows[ROW] == 4 and 1000 <= rows[STREAM] < 1250
    kernel_survey.main(["report", str(path), "--ran", "1", "1"])
    assert "2 of the module's 3 kernels were launched" in capsys.readouterr().out
    module.write_bytes(b"another")
    assert kernel_survey.known(str(path), str(module)) is None


# --- the tool ---


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
    """Two processes under a tool that finds nothing; the second one's time is up before its last call."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(
        "#!/bin/sh\ncase $* in *'--part 0') echo ran 1 of 1 calls;; *) echo ran 0 of 1 calls;; esac\n"
        "echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(sanitize_gpu, "surveyed", lambda *_: None)
    calls = [surveyed([ROW], 2).to_json(), surveyed([STREAM], 1).to_json()]
    path = tmp_path / "kernels.json"
    kernels = [ROW, STREAM, PAD_ROWS]
    path.write_text(
        json.dumps({"of": "", "cases": 2, "all_cases": 2, "kernels": kernels, "calls": calls, "refused": {}})
    )
    assert sanitize_gpu.main(["--only", "racecheck", "--jobs", "2", "--survey", str(path)]) == 0
    out = capfd.readouterr().out
    assert "ok     racecheck kernels 0" in out and "ran 1 of 1 calls" in out
    assert "1 of the module's 3 kernels were launched, and one or more of 1 of the 3 placements" in out
    assert "2 of 2 runs are clean." in out
    sanitize_gpu.main(["--only", "racecheck", "--kernels", "Norm.*Staged", "--jobs", "2", "--survey", str(path)])
    assert "1 of the module's 1 kernels were launched" in capfd.readouterr().out


def test_gpus_of_workers(tmp_path, monkeypatch):
    """The machine's GPUs, or the GPUs already chosen; each worker starts with another one."""
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


def test_callbacks_of_launches():
    """What CUPTI passes of cuLaunchKernel and of cuLaunchKernelEx."""
    launches = object.__new__(kernel_survey.Launches)
    launches.found = []
    grid = (ctypes.c_uint * 4)(7, 1, 1, 128)
    configured = (ctypes.c_void_p * 2)(ctypes.addressof(grid), None)
    plain = (ctypes.c_uint64 * 3)(1, 5 | 1 << 32, 1)
    for number, parameters in ((652, configured), (307, plain)):
        for site in (0, 1):
            data = kernel_survey._CallbackData(site, b"cuLaunch", ctypes.addressof(parameters), None, b"kernel")
            launches._launched(None, 1, number, ctypes.pointer(data))
    assert launches.found == [("kernel", 7), ("kernel", 5)]

"""The GPU handlers under compute-sanitizer: `make sanitize-gpu`.

racecheck runs only if `--only` names it. It needs a build with JAXOPS_RACECHECK=ON, which `make sanitize-gpu
ARGS='--only racecheck'` makes: in the usual build it reports hazards in attention's kernels, where a warp's first lane
arrives at a barrier for all lanes.
Under racecheck a launch of a kernel takes up to a second, and in a cluster of 16 blocks up to five, however small. The
plan of a row says which kernel it takes (ffi/rows/plan.h), so that one call for each plan of an op and dtype is enough
(tests/plan_cases.py). `--once racecheck,memcheck` makes the same calls under memcheck; other tools run tests on call
frames of rows of many lengths (COLUMNS_ONCE in tests/support/row_cases.py) and of every tile, without red zones, as the
tools watch the memory themselves.

Several processes run at a time, spread over the GPUs of the machine. Prints a line for each as it ends, the output of
each process that fails, and a summary; exits non-zero if one fails. `--only "memcheck (softmax|layer_norm) float32"`
runs the processes whose names match the expression, `--only racecheck` a tool alone. `--only racecheck --calls
attention` makes only the calls of matching handlers. `--run-seconds` stops the calls early.
synccheck (of CUDA 13.0) ends any kernel by an illegal memory access that waits at an mbarrier in eight or more clusters
of 16 blocks, be it one of each block's own at which one thread arrives; the tests give such kernels two.
initcheck does not see what the copy engine writes, by which matmul's results are stored; that all of them are written
the same tests show on poisoned memory.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import gpus  # noqa: E402

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
CALLS = [sys.executable, "tests/plan_cases.py"]
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")  # slowest first; racecheck needs its own build


@dataclasses.dataclass(frozen=True)
class Run:
    """A process of its own under a tool. tests: how many it has to pass; 0: it makes calls instead."""

    tool: str
    part: str
    command: tuple[str, ...]
    tests: int = 0

    @property
    def name(self) -> str:
        """By which `--only` chooses."""
        return f"{self.tool} {self.part}"


def tests() -> list[str]:
    """The tests of rows of every placement and of every tile, the slowest first, without tests of some rows."""
    chosen = "test_memory and cuda and not some_rows and not every_layout"
    command = [*PYTEST, "--collect-only", "tests/handlers/test_frames.py", "-k", chosen]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [line for line in reversed(listed.splitlines()) if line.startswith("tests/")]


def test_runs(tool: str, ids: list[str]) -> list[Run]:
    """The tests under a tool, grouped by op and dtype."""
    parts = {}
    for test in ids:
        row_op = re.search(r"(\w+)-(\w+)-cuda", test)
        if tool != "initcheck" or row_op:
            parts.setdefault(f"{row_op[1]} {row_op[2]}" if row_op else "matmul", []).append(test)
    return [Run(tool, part, (*PYTEST, *of_part), len(of_part)) for part, of_part in parts.items()]


def call_runs(tool: str, parts: int, options: argparse.Namespace) -> list[Run]:
    """A call for each plan, under a tool; they stop when the seconds are over."""
    command = (*CALLS, "--parts", str(parts), "--seconds", str(options.run_seconds))
    # initcheck does not see what the kernels of products and attention store.
    command += ("--only", options.calls or ("(softmax|norm)_" if tool == "initcheck" else ""))
    return [Run(tool, f"calls {i}", (*command, "--part", str(i))) for i in range(parts)]


def environment(gpu: str, **more: str) -> dict[str, str]:
    """The environment of a process that has one GPU and one thread to itself."""
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return os.environ | one | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": gpu} | more


def sanitize(run: Run, gpu: str, more: list[str]) -> tuple[bool, str, str]:
    """Whether the tool found nothing, a line about it, and its output."""
    start = time.perf_counter()
    command = ["compute-sanitizer", "--tool", run.tool, "--print-limit", "5", "--error-exitcode", "1", *run.command]
    command += more if run.tests else []
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(gpu, JAXOPS_BARE_MEMORY=run.tool),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ran = re.search(r"^(?:=+ )?((\d+) passed\b.*?) in |^(ran \d+ of \d+ calls)$", done.stdout, re.MULTILINE)
    found = re.findall(r"={9} (?:ERROR|RACECHECK) SUMMARY: (.*)", done.stdout)
    clean = done.returncode == 0 and ran is not None and bool(found)
    clean = clean and (not run.tests or int(ran[2]) == run.tests)
    said = f"{found[-1] if found else 'no summary'}; {ran[1] or ran[3] if ran else 'nothing ran'}"
    seconds = time.perf_counter() - start
    return clean, f"{'ok    ' if clean else 'FAILED'} {run.name:40} {said} ({seconds:.0f} s)", done.stdout


def main(arguments: list[str]) -> int:
    """Runs the tools; returns how many runs fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="runs in whose name, such as 'memcheck matmul', it is found"
    )
    parser.add_argument("--jobs", type=int, help="processes at a time (default: 12 a GPU, at most one a processor)")
    parser.add_argument(
        "--once", default="racecheck", metavar="TOOLS", help="the tools under which each plan runs once"
    )
    parser.add_argument("--calls", metavar="PATTERN", help="calls of handlers whose names match the pattern")
    parser.add_argument("--run-seconds", type=float, default=1e6, help="begin no more calls when they are over")
    options, more = parser.parse_known_args(arguments)
    devices = gpus.visible()
    if not devices:
        parser.error("no GPU is visible")
    jobs = options.jobs or min(12 * len(devices), os.cpu_count() or 1)
    once = [tool for tool in TOOLS if tool in options.once.split(",")]
    if "synccheck" in once and not options.calls:
        parser.error("synccheck takes the tests alone, or --calls of kernels without clusters, such as attention's")
    every, ids = [], []
    named = [tool for tool in TOOLS if tool in options.only]
    for tool in named or TOOLS[1:]:
        if tool in once:
            every += call_runs(tool, jobs, options)
        else:
            every += test_runs(tool, ids := ids or tests())
    chosen = [run for run in every if re.search(options.only, run.name)]
    if not chosen:
        parser.error(f"{options.only!r} is in no run's name: there are {', '.join(run.name for run in every)}")
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        turns = zip(chosen, itertools.cycle(devices), strict=False)
        pending = {pool.submit(sanitize, run, gpu, more): run for run, gpu in turns}
        for job in concurrent.futures.as_completed(pending):
            clean, line, output = job.result()
            print(line, flush=True)
            if not clean:
                failed += 1
                print(output[-4000:], flush=True)
    print(f"\n{len(chosen) - failed} of {len(chosen)} runs are clean.")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))

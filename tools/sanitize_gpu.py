"""The GPU handlers under compute-sanitizer: `make sanitize-gpu`. On call frames of rows of every placement (lengths by
capacity: COLUMNS_ONCE in tests/row_cases.py) and of every tile; without red zones, as the tools watch the memory
themselves.

Under racecheck a launch in a cluster of 16 blocks takes seconds, however small: its tests are processes of their own,
the other tools' those of an op and a dtype. Several run at a time, spread over the GPUs of the machine. Prints a line
for each as it ends, the output of those that fail, and a summary; exits non-zero if one fails.
`--only "racecheck (softmax|layer_norm) float32"` runs those in whose name the expression is found.
synccheck (of CUDA 13.0) ends any kernel by an illegal memory access that waits at an mbarrier in eight or more clusters
of 16 blocks, be it one of each block's own at which one thread arrives; the tests give such kernels two (TUNING.md).
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
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")  # the slowest first


@dataclasses.dataclass(frozen=True)
class Run:
    """Tests in a process of their own under a tool."""

    tool: str
    part: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """By which `--only` chooses."""
        return f"{self.tool} {self.part}"


def tests() -> list[str]:
    """The tests that together visit every kernel, the slowest first; those of some rows are a part of others."""
    chosen = "test_memory and cuda and not some_rows"
    command = [*PYTEST, "--collect-only", "tests/test_frames.py", "-k", chosen]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [line for line in reversed(listed.splitlines()) if line.startswith("tests/")]


def runs(ids: list[str]) -> list[Run]:
    """The tests under each tool."""
    found = []
    for tool in TOOLS:
        parts = {}
        for test in ids:
            row_op = re.search(r"(\w+)-(\w+)-cuda", test)
            if tool == "initcheck" and not row_op:
                continue
            part = f"{row_op[1]} {row_op[2]}" if row_op else "matmul"
            if tool == "racecheck":
                part += " " + re.sub(r".*::test_memory_of_|-?\w+-\w+-cuda|[\[\]]", " ", test).strip()
            parts.setdefault(part, []).append(test)
        found += [Run(tool, part, tuple(of_part)) for part, of_part in parts.items()]
    return found


def gpus() -> list[str]:
    """The numbers of this machine's GPUs, or those that CUDA_VISIBLE_DEVICES names."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return [str(i) for i in range(len(listed.splitlines()))]


def sanitize(run: Run, gpu: str, more: list[str]) -> tuple[bool, str, str]:
    """Whether the tool found nothing, a line about it, and its output."""
    start = time.perf_counter()
    command = ["compute-sanitizer", "--tool", run.tool, "--print-limit", "5", "--error-exitcode", "1"]
    command += [*PYTEST, *run.tests, *more]
    environment = os.environ | {"JAXOPS_BARE_MEMORY": run.tool, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": gpu}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    passed = re.search(r"^(?:=+ )?((\d+) passed\b.*?) in ", done.stdout, re.MULTILINE)
    found = re.findall(r"={9} (?:ERROR|RACECHECK) SUMMARY: (.*)", done.stdout)
    clean = done.returncode == 0 and passed is not None and int(passed[2]) == len(run.tests) and bool(found)
    said = f"{found[-1] if found else 'no summary'}; {passed[1] if passed else 'no test passed'}"
    seconds = time.perf_counter() - start
    return clean, f"{'ok    ' if clean else 'FAILED'} {run.name:60} {said} ({seconds:.0f} s)", done.stdout


def main(arguments: list[str]) -> int:
    """Runs the tools; returns how many runs fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="runs in whose name, such as 'racecheck matmul', it is found"
    )
    parser.add_argument("--jobs", type=int, help="processes at a time (default: 12 a GPU, at most one a processor)")
    options, more = parser.parse_known_args(arguments)
    every = runs(tests())
    chosen = [run for run in every if re.search(options.only, run.name)]
    if not chosen:
        parser.error(f"{options.only!r} is in no run's name: there are {', '.join(run.name for run in every)}")
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    failed, devices = 0, gpus()
    jobs = options.jobs or min(12 * len(devices), os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        turns = zip(chosen, itertools.cycle(devices), strict=False)
        pending = [pool.submit(sanitize, run, gpu, more) for run, gpu in turns]
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

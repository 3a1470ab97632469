"""The GPU handlers under compute-sanitizer: `make sanitize-gpu`. On call frames of every row length, by which every
placement of the row kernels is visited, and of every tile; without red zones, as the tools watch the memory themselves.

Tools, ops and dtypes are processes of their own, several at a time, spread over the GPUs of the machine. Prints a line
for each as it ends, the output of those that fail, and a summary; exits non-zero if one fails. `--only "racecheck
matmul"` runs those whose name contains the text.
initcheck does not see what the copy engine writes, by which matmul's results are stored; that all of them are written
the same tests show on poisoned memory.
"""

import argparse
import concurrent.futures
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
ROW_OPS = ("softmax", "log_softmax", "layer_norm", "rms_norm")
DTYPES = ("float32", "bfloat16", "float16", "float64")
#: What is run, and the tests of it.
PARTS = {"matmul": "memory and cuda and matmul"} | {
    f"{op} {dtype}": f"memory and {op}-{dtype}-cuda" + (" and not log_softmax" if op == "softmax" else "")
    for op in ROW_OPS
    for dtype in DTYPES
}
RUNS = [
    (tool, part)
    for tool in ("racecheck", "memcheck", "synccheck", "initcheck")  # the slowest first
    for part in PARTS
    if (tool, part) != ("initcheck", "matmul")
]


def gpus() -> list[str]:
    """The numbers of this machine's GPUs, or those that CUDA_VISIBLE_DEVICES names."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return [str(i) for i in range(len(listed.splitlines()))]


def run(tool: str, part: str, gpu: str, more: list[str]) -> tuple[bool, str, str]:
    """Whether the tool found nothing, a line about it, and its output."""
    start = time.perf_counter()
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "5", "--error-exitcode", "1", sys.executable]
    command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "tests/test_frames.py"]
    command += ["-k", PARTS[part], *more]
    environment = os.environ | {"JAXOPS_BARE_MEMORY": "1", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": gpu}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    tests = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed).*?) in ", done.stdout, re.MULTILINE)
    found = re.findall(r"={9} (?:ERROR|RACECHECK) SUMMARY: (.*)", done.stdout)
    clean = done.returncode == 0 and bool(tests) and bool(found)
    said = f"{found[-1] if found else 'no summary'}; {tests[-1] if tests else 'no tests'}"
    seconds = time.perf_counter() - start
    return clean, f"{'ok    ' if clean else 'FAILED'} {tool:9} {part:20} {said} ({seconds:.0f} s)", done.stdout


def main(arguments: list[str]) -> int:
    """Runs the tools; returns how many runs fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="runs whose name, such as 'racecheck matmul', contains it"
    )
    parser.add_argument("--jobs", type=int, help="processes at a time (default: 8 a GPU, at most one a processor)")
    options, more = parser.parse_known_args(arguments)
    chosen = [(tool, part) for tool, part in RUNS if options.only in f"{tool} {part}"]
    if not chosen:
        parser.error(f"no run's name contains {options.only!r}: there are {', '.join(map(' '.join, RUNS))}")
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    failed, devices = 0, gpus()
    jobs = options.jobs or min(8 * len(devices), os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        turns = zip(chosen, itertools.cycle(devices), strict=False)
        pending = [pool.submit(run, *tool_and_part, gpu, more) for tool_and_part, gpu in turns]
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

"""The GPU handlers under compute-sanitizer: `make sanitize-gpu`. On call frames of every row length, by which every
placement of the row kernels is visited, and of every tile; without red zones, as the tools watch the memory themselves.

Tools and ops are processes of their own, several at a time. Prints a line for each as it ends, the output of those that
fail, and a summary; exits non-zero if one fails. `--only "racecheck matmul"` runs those whose name contains the text.
initcheck does not see what the copy engine writes, by which matmul's results are stored; that all of them are written
the same tests show on poisoned memory.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
OPS = {
    "softmax": "memory and cuda and softmax and not log_softmax",
    "log_softmax": "memory and cuda and log_softmax",
    "layer_norm": "memory and cuda and layer_norm",
    "rms_norm": "memory and cuda and rms_norm",
    "matmul": "memory and cuda and matmul",
}
RUNS = [
    (tool, op)
    for tool in ("racecheck", "memcheck", "synccheck", "initcheck")  # the slowest first
    for op in OPS
    if (tool, op) != ("initcheck", "matmul")
]


def run(tool: str, op: str, more: list[str]) -> tuple[bool, str, str]:
    """Whether the tool found nothing, a line about it, and its output."""
    start = time.perf_counter()
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "5", "--error-exitcode", "1", sys.executable]
    command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "tests/test_frames.py", "-k", OPS[op], *more]
    environment = os.environ | {"JAXOPS_BARE_MEMORY": "1", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    tests = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed).*?) in ", done.stdout, re.MULTILINE)
    found = re.findall(r"={9} (?:ERROR|RACECHECK) SUMMARY: (.*)", done.stdout)
    clean = done.returncode == 0 and bool(tests) and bool(found)
    said = f"{found[-1] if found else 'no summary'}; {tests[-1] if tests else 'no tests'}"
    seconds = time.perf_counter() - start
    return clean, f"{'ok    ' if clean else 'FAILED'} {tool:9} {op:11} {said} ({seconds:.0f} s)", done.stdout


def main(arguments: list[str]) -> int:
    """Runs the tools; returns how many runs fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="runs whose name, such as 'racecheck matmul', contains it"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: %(default)s)")
    options, more = parser.parse_known_args(arguments)
    chosen = [(tool, op) for tool, op in RUNS if options.only in f"{tool} {op}"]
    if not chosen:
        parser.error(f"no run's name contains {options.only!r}: there are {', '.join(map(' '.join, RUNS))}")
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for job in concurrent.futures.as_completed([pool.submit(run, tool, op, more) for tool, op in chosen]):
            clean, line, output = job.result()
            print(line, flush=True)
            if not clean:
                failed += 1
                print(output[-4000:], flush=True)
    print(f"\n{len(chosen) - failed} of {len(chosen)} runs are clean.")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))

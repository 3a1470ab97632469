"""Runs the tests that depend most on versions for every Python here with the newest of each supported minor version of
jax, and with the oldest of all: `make compatibility`. Without the GPU half, whose objects depend on neither.

Each pair has an environment of its own under .venv. `make compatibility ARGS="import fuzz"` chooses the tests. Prints a
table; exits non-zero if a pair fails.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
TESTS = ("import", "registry", "transformations", "linen", "nnx", "patch", "explain", "fuzz")


def pythons() -> list[str]:
    """One interpreter for each supported minor version, including pyenv's."""
    found = {}
    for minor in map(int, re.findall(r'Python :: 3\.(\d+)"', (ROOT / "pyproject.toml").read_text())):
        root = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
        candidates = [shutil.which(f"python3.{minor}"), *root.glob(f"versions/3.{minor}.*/bin/python")]
        for candidate in filter(None, candidates):
            if subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
                found.setdefault(minor, str(candidate))
    return list(found.values())


def versions(python: str) -> list[str]:
    """The versions of jax to test with, among PyPI's versions for this Python: the oldest, and the newest of each
    minor version.
    """
    bounds = re.search(r"SUPPORTED = \(\((\d+), (\d+)\), \((\d+), (\d+)\)\)", (ROOT / "jaxops/_load.py").read_text())
    low, high = ((int(bounds[i]), int(bounds[i + 1])) for i in (1, 3))
    command = [python, "-m", "pip", "--disable-pip-version-check", "index", "versions", "jaxlib"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    offered = re.search("Available versions: (.*)", listing)[1].split(", ")
    parsed = sorted(tuple(map(int, version.split("."))) for version in offered if re.fullmatch(r"[\d.]+", version))
    supported = [version for version in parsed if low <= version < high]
    newest = {version[:2]: version for version in supported}
    return [".".join(map(str, version)) for version in sorted({supported[0], *newest.values()})]


def path_of(test: str) -> pathlib.Path:
    """The file of the tests of a name."""
    found = [path.relative_to(ROOT) for path in (ROOT / "tests").glob(f"*/test_{test}.py")]
    if len(found) != 1:
        raise SystemExit(f"tests must be names of files tests/*/test_NAME.py, got {test!r}")
    return found[0]


def main(tests: list[str]) -> int:
    """Runs the tests of the given names, or TESTS; returns how many pairs fail."""
    rows, failed = [], 0
    files = " ".join(str(path_of(test)) for test in tests or TESTS)
    for python in pythons():
        name = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        for jax in versions(python):
            command = ["make", "test", f"PYTHON={python}", f"JAX={jax}", "CUDA=OFF", f"ARGS=-q {files}"]
            start = time.perf_counter()
            run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            count = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed).*?) in ", run.stdout, re.MULTILINE)
            failed += run.returncode != 0
            summary = count[-1] if count else "did not run"
            rows.append(f"{name:14} jax {jax:9} {'ok    ' if run.returncode == 0 else 'FAILED'} {summary}")
            print(f"{rows[-1]} ({time.perf_counter() - start:.0f} s)", flush=True)
            if run.returncode:
                print(run.stdout[-4000:], run.stderr[-4000:], sep="\n", flush=True)
    print(f"\n{len(rows) - failed} of {len(rows)} pairs pass.")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))

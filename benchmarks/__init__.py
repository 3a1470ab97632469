"""Benchmarks of jaxops beside XLA, on the device at hand: `python -m benchmarks OP`; the demo: `-m benchmarks.demo`."""

import sys
from pathlib import Path

# For `support.ops`: the tests, the benchmarks and the demo compare the same ops with the same references.
_TESTS = str(Path(__file__).resolve().parents[1] / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)

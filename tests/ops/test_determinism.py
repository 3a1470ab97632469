"""The same call on the same device gives the same bits; XLA's own operations too, if it is told to choose them so."""

import functools
import os
import subprocess
import sys

import determinism
import pytest

#: Else XLA times its variants for matrix products and sums in each process, and the fastest one differs.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@functools.cache
def printed(busy: bool = False, flags: str = "", number: int = 0) -> str:
    """A separate process's output; number: tells equal calls apart."""
    del number
    result = subprocess.run(
        [sys.executable, determinism.__file__, *(["--busy"] if busy else [])],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": f"{DETERMINISTIC} {flags}", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == len(determinism.CALLS)
    return result.stdout


def test_from_call_to_call():
    assert determinism.digests(determinism.SHAPES[:1])


@pytest.mark.slow
def test_from_process_to_process():
    assert printed(number=1) == printed()


@pytest.mark.slow
def test_while_other_work_shares_the_device():
    assert printed(busy=True) == printed()


@pytest.mark.slow
def test_with_other_numbers_of_threads(on_gpu):
    """On the CPU, another number of devices shares XLA's thread pool; XLA's own products depend on it there."""
    few, all_of_them = (
        [line for line in text.splitlines() if on_gpu or not line.startswith("matmul")]
        for text in (printed(flags="--xla_force_host_platform_device_count=5"), printed())
    )
    assert few == all_of_them and len(few) >= 5


@pytest.mark.slow
@pytest.mark.gpu
def test_without_command_buffers():
    assert printed(flags="--xla_gpu_enable_command_buffer=") == printed()

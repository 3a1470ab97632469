"""Arrays with more than 2^31 elements and bytes, and memory that is not there."""

import ctypes
import fcntl
import math
import mmap
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import frames
from support.frame_cases import LOGITS, NORMS, resized, row_calls
from support.ops import value_and_gradients

import jaxops

LIMIT = 2**31


class Repeated:
    """An array with `count` equal parts along the first axis; all parts except the last share memory.

    It takes two parts' memory, however many there are. own: each part has separate memory, for a result that the
    handler reads again.
    """

    def __init__(self, shape, dtype, part=None, own=False):
        count, *_ = shape
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.bytes = math.prod(shape[1:]) * self.dtype.itemsize
        assert self.bytes % mmap.PAGESIZE == 0
        self._library = ctypes.CDLL(None)
        self._library.mmap.restype = ctypes.c_void_p
        self._library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        file = os.memfd_create("repeated")
        os.ftruncate(file, self.bytes)
        shared, private, fixed, anonymous, reserve = 1, 2, 0x10, 0x20, 0x4000
        # Nothing may be read or written on the pages around it.
        self.size = count * self.bytes + 2 * mmap.PAGESIZE
        self._base = self._library.mmap(None, self.size, 0, private | anonymous | reserve, -1, 0)
        self.address = self._base + mmap.PAGESIZE
        for i in range(count):
            alone = own or i == count - 1
            flags = fixed | (private | anonymous if alone else shared)
            at = self._library.mmap(self.address + i * self.bytes, self.bytes, 3, flags, -1 if alone else file, 0)
            assert at == self.address + i * self.bytes, "mmap failed"
        os.close(file)
        self.parts = [self._part(0), self._part(count - 1)]
        for values in self.parts:
            values[...] = np.zeros((), self.dtype) if part is None else part

    def _part(self, i):
        raw = (ctypes.c_uint8 * self.bytes).from_address(self.address + i * self.bytes)
        return np.frombuffer(raw, self.dtype).reshape(self.shape[1:])

    def free(self):
        self.parts.clear()
        self._library.munmap(ctypes.c_void_p(self._base), ctypes.c_size_t(self.size))


PART = 2**16  # rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns, length", [(33, None), (16, 24)], ids=["along", "across"])
@pytest.mark.parametrize("op", [*LOGITS, *NORMS])
def test_many_rows_on_the_cpu(op, columns, length, dtype, rng):
    """Forward and backward, every result for each row beyond 2^31 elements."""
    elements = columns * (length or 1)
    count = LIMIT // (PART * elements) + 2
    for call in row_calls(op, dtype, False, length is not None):
        small = resized(call, PART, columns, length or 0)
        large = resized(call, count * PART, columns, length or 0)
        values = frames.draw(small, rng)
        wanted = [
            x.view(b.dtype).reshape(b.shape)
            for x, b in zip(frames.run("cpu", frames.Host(), small, values, fill=0), small.results, strict=True)
        ]
        repeated, kept = [], []

        def place(buffer, value, repeated=repeated, kept=kept):
            """An operand's or a result's memory: repeated if every row has it."""
            if buffer.shape[0] != PART:
                kept.append(np.zeros(buffer.shape, buffer.dtype) if value is None else value)
                return kept[-1].ctypes.data
            repeated.append(Repeated((count, *buffer.shape), buffer.dtype, value))
            return repeated[-1].address

        operands = [place(b, np.ascontiguousarray(v)) for b, v in zip(small.operands, values, strict=True)]
        inputs = len(repeated)
        results = [place(b, None) for b in small.results]
        assert math.prod(large.operands[0].shape) > LIMIT
        frames.call_handler("cpu", large, operands, results, threads=2)
        rows = iter(repeated[inputs:])
        sums = iter(kept[-sum(b.shape[0] != PART for b in small.results) :] if len(kept) else [])
        for i, (buffer, target) in enumerate(zip(small.results, wanted, strict=True)):
            if buffer.shape[0] == PART:
                for part in next(rows).parts:
                    np.testing.assert_array_equal(part, target, err_msg=f"{call.handler}: result {i}")
                continue
            got = next(sums)
            if i not in call.workspaces:
                scale = count * np.abs(target).max()
                np.testing.assert_allclose(got / scale, count * target / scale, atol=1e-2, err_msg=call.handler)
        for array in repeated:
            array.free()


def periodic(op, x, dy, count, scale=1.0, bias=0.0, epsilon=1e-6):
    """The value, x's gradient and the statistics, in float64, for a row that repeats x `count` times."""
    x, dy, scale = (np.asarray(v).astype(np.float64) for v in (x, dy, scale))
    if op in LOGITS:
        p = np.exp(x - x.max())
        total = p.sum() * count
        p /= total
        if op == "softmax":
            return p, p * (dy - (p * dy).sum() * count), ()
        return np.log(p), dy - p * dy.sum() * count, (x.max(), total)
    mean = x.mean() if op == "layer_norm" else 0.0
    rstd = 1 / np.sqrt(np.square(x - mean).mean() + epsilon)
    normalised, g = (x - mean) * rstd, dy * scale
    through = normalised * (g * normalised).mean() + (g.mean() if op == "layer_norm" else 0)
    return normalised * scale + bias, rstd * (g - through), (mean, rstd) if op == "layer_norm" else (rstd,)


@pytest.mark.slow
@pytest.mark.parametrize("op", [*LOGITS, *NORMS])
def test_a_long_row_on_the_cpu(op, rng):
    """One row with 2^31 - 2^21 floats, in equal runs of 2^20; softmax's result takes 8 GiB."""
    part = 2**20
    count = LIMIT // part - 2
    x, dy, *parameters = (rng.standard_normal(part).astype(np.float32) for _ in range(4))
    parameters = parameters[: {"layer_norm": 2, "rms_norm": 1}.get(op, 0)]
    value, gradient, statistics = periodic(op, x, dy, count, *parameters)
    first = value.astype(np.float32) if op == "softmax" else x
    statistics = [np.full(1, s, np.float32) for s in statistics]
    operands = {"fwd": [x, *parameters], "bwd": [first, *parameters[:1], *statistics, dy]}
    for call in row_calls(op, "float32", False):
        direction = call.handler[-3:]
        arrays = [Repeated((count, part), v.dtype, v) if v.size > 1 else v for v in operands[direction]]
        results = [
            Repeated((count, part), np.float32, own=call.handler == "softmax_fwd")
            if b.shape[-1] > 1
            else np.zeros(b.shape, np.float32)
            for b in call.results
            if len(b.shape) == 2
        ]
        results[1:1] = [Repeated((2 * count, part), np.float32) for b in call.results if len(b.shape) == 4]
        long = resized(call, 1, count * part)
        results += [np.zeros(b.shape, np.float32) for b in long.results if len(b.shape) == 3]  # sums over a row's parts
        where = [[v.address if isinstance(v, Repeated) else v.ctypes.data for v in vs] for vs in (arrays, results)]
        frames.call_handler("cpu", long, *where, threads=2)
        wanted = value if direction == "fwd" else gradient
        for got in results[0].parts:
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=4e-6 * np.abs(wanted).max(), err_msg=call.handler)
        for array in (*arrays, *results):
            if isinstance(array, Repeated):
                array.free()


def test_rows_longer_than_the_handlers_take():
    """Left to XLA, with a warning, when the program is lowered."""
    x = jax.ShapeDtypeStruct((2, LIMIT), jnp.bfloat16)
    for op in (jaxops.softmax, jaxops.log_softmax, jaxops.layer_norm, jaxops.rms_norm):
        with pytest.warns(jaxops.FallbackWarning, match="rows of up to"):
            text = jax.jit(op).trace(x).lower().as_text()
        assert "jaxops." not in text


LARGE = {
    "many rows": (LIMIT // 40 + 2, 40),
    "long rows": (3, LIMIT // 3 // 8 * 8 + 8),
    "the longest row": (2, LIMIT - 2**21),
    "rows across": (LIMIT // 2**20 + 1, 64, 2**14),
}


def check_rows(op, shape):
    """The corners of value and gradient for a bfloat16 array whose rows repeat 8 elements."""
    last = (shape[1] - 1) // 8 * 8
    patterns = [jax.random.normal(jax.random.key(seed), (8,), jnp.bfloat16) for seed in range(2)]

    def corners(*patterns):
        x, dy = (p[jax.lax.broadcasted_iota(jnp.int32, shape, 1) % 8] for p in patterns)
        call = lambda x: getattr(jaxops, op)(x, axis=1).astype(x.dtype)  # noqa: E731
        results = value_and_gradients(call, (x,), dy)
        return [[r[i, j : j + 8] for i in (0, -1) for j in (0, last)] for r in results]

    x, dy = (np.asarray(p, np.float64) for p in patterns)
    wanted = periodic(op, x, dy, shape[1] // 8)
    for got, target in zip(jax.jit(corners)(*patterns), wanted, strict=False):
        for corner in got:
            corner = np.asarray(corner, np.float64).reshape(8, -1)
            np.testing.assert_allclose(
                corner, target[:, None] + 0 * corner, rtol=2e-2, atol=1e-2 * np.abs(target).max()
            )


def check_matmul(precision, *sizes):
    """Products between constants, and their gradients."""
    dtype = jnp.bfloat16 if precision is None else jnp.float32

    def corners(m, k, n):
        a, b, dy = (jnp.full(s, v, dtype) for s, v in (((m, k), 0.5), ((k, n), 0.25), ((m, n), 2**-10)))
        call = lambda a, b: jaxops.matmul(a, b, precision=precision, activation="relu")  # noqa: E731
        return [r[i, j] for r in value_and_gradients(call, (a, b), dy) for i in (0, -1) for j in (0, -1)]

    for m, k, n in sizes:
        got = np.asarray(jax.jit(corners, static_argnums=(0, 1, 2))(m, k, n), np.float64)
        wanted = np.repeat([k / 8, n * 0.25 / 2**10, m * 0.5 / 2**10], 4)
        np.testing.assert_allclose(got, wanted, rtol=1e-2)


@pytest.fixture
def check_on_gpu(tmp_path, tmp_path_factory):
    """Runs a function from above in a separate process, which keeps no memory; one at a time on this machine."""

    def check(function, *arguments):
        with (tmp_path_factory.getbasetemp().parent / "memory of a GPU").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            run_python(f"from ops import test_size\ntest_size.{function.__name__}(*{arguments!r})", tmp_path)

    return check


@pytest.mark.slow
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("op", [*LOGITS, *NORMS])
@pytest.mark.gpu
def test_rows_on_a_gpu(op, shape, check_on_gpu):
    check_on_gpu(check_rows, op, LARGE[shape])


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.gpu
def test_matmul_on_a_gpu(precision, check_on_gpu):
    """A result, and then operands, with more than 2^31 elements."""
    check_on_gpu(check_matmul, precision, (2**16 + 1, 64, 2**15 + 1), (2**25 + 1, 64, 64))


# --- no memory ---


def run_python(script, tmp_path, **environment):
    tests = os.path.dirname(os.path.dirname(__file__))
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])} | environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_no_memory_for_a_handler(tmp_path):
    """Its buffers do not fit: XLA's error for that; the next call works."""
    script = """
import resource
from support import frames
import numpy as np
from support.frame_cases import resized, row_calls

call = row_calls("softmax", "bfloat16", False)[0]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), used + (1 << 28)))
small = np.zeros(11, "uint16")
huge = resized(call, 1, 2**30)
places = [small.ctypes.data]
try:
    frames.call_handler("cpu", huge, places * len(huge.operands), places * len(huge.results))
except frames.HandlerError as error:
    print(error.code)
frames.check_memory("cpu", frames.Host(), call, np.random.default_rng(0))
print("lives on")
"""
    assert run_python(script, tmp_path, JAX_PLATFORMS="cpu").split() == ["8", "lives", "on"]


@pytest.mark.gpu
def test_no_memory_for_an_array():
    """JAX's own error; the process lives on."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.jit(lambda: jaxops.softmax(jnp.zeros((2**20, 2**20), jnp.float32)))().block_until_ready()
    np.testing.assert_array_equal(jaxops.softmax(jnp.zeros((2, 4))), np.full((2, 4), 0.25))

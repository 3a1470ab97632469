"""Many threads, devices, streams and processes at once."""

import concurrent.futures
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import frames
from support.frame_cases import LOGITS, NORMS, resized, row_calls
from support.frames import memory_of

import jaxops

ROW_OPS = (*LOGITS, *NORMS)


def loss(op):
    function = getattr(jaxops, op)
    return lambda x, *parameters: jnp.sum(jnp.sin(3 * function(x, *parameters)))


def gradients(op, x, *parameters):
    """A function of its own each time, so that each call compiles."""
    return jax.jit(jax.value_and_grad(loss(op), tuple(range(1 + len(parameters)))))(x, *parameters)


def operands(op, rng, rows, columns):
    count = {"layer_norm": 2, "rms_norm": 1}.get(op, 0)
    shapes = [(rows, columns), *[(columns,)] * count]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_threads_that_compile_and_call(rng):
    """Each thread compiles and runs its own programs; results equal one thread's results, bit by bit."""
    cases = [(op, operands(op, rng, 60, 40 + 3 * i)) for i in range(2) for op in ROW_OPS]
    wanted = [leaves(gradients(op, *xs)) for op, xs in cases]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(lambda op, xs: leaves(gradients(op, *xs)), *cases[i % len(cases)]) for i in range(16)]
        for i, call in enumerate(calls):
            for got, target in zip(call.result(), wanted[i % len(cases)], strict=True):
                np.testing.assert_array_equal(got, target)


def test_threads_that_call_one_program(rng):
    function = jax.jit(jax.value_and_grad(loss("layer_norm"), (0, 1, 2)))
    draws = [operands("layer_norm", rng, 300, 257) for _ in range(8)]
    wanted = [leaves(function(*xs)) for xs in draws]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for i, call in enumerate([pool.submit(lambda xs: leaves(function(*xs)), draws[i % 8]) for i in range(200)]):
            for got, target in zip(call.result(), wanted[i % 8], strict=True):
                np.testing.assert_array_equal(got, target)


def test_threads_that_call_one_kernel(rng, on_gpu):
    """On a GPU with another amount of shared memory each, as one has a residual's cotangent to read."""
    x, residual = (jnp.asarray(rng.standard_normal((2000, 4096)), jnp.bfloat16) for _ in range(2))

    def gradient(**options):
        def loss(x, scale):
            return jnp.sin(sum(jax.tree.leaves(jaxops.rms_norm(x, scale, **options)))).astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss, (0, 1)))

    functions = [gradient(), gradient(residual=residual)]
    operands = jax.device_put((x, jnp.ones(4096)))
    wanted = [leaves(f(*operands)) for f in functions]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(lambda f: leaves(f(*operands)), functions[i % 2]) for i in range(200 if on_gpu else 10)]
        for i, call in enumerate(calls):
            for got, target in zip(call.result(), wanted[i % 2], strict=True):
                np.testing.assert_array_equal(got, target)


def test_devices_at_once(rng):
    """The same program on every device of the process, from a thread each."""
    devices = jax.local_devices()
    xs = operands("rms_norm", rng, 500, 129)
    function = jax.jit(jax.value_and_grad(loss("rms_norm"), (0, 1)))
    wanted = leaves(function(*xs))

    def on(device):
        return [leaves(function(*jax.device_put(xs, device))) for _ in range(5)]

    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        for runs in pool.map(on, devices):
            for got in runs:
                for a, b in zip(got, wanted, strict=True):
                    np.testing.assert_array_equal(a, b)


@pytest.mark.cuda
def test_streams_at_once(memory, rng):
    """Handlers called from threads, each on its own stream; results equal a single call's results, bit by bit."""
    there = memory_of(memory, "cuda")
    for op in ROW_OPS:
        for call in row_calls(op, "bfloat16", True, False, "cuda"):
            call = resized(call, 3001, 1024)
            values = frames.draw(call, rng)
            wanted = frames.run("cuda", there, call, values, fill=0)
            streams = [there.stream() for _ in range(4)]

            def on(stream, call=call, values=values):
                return [frames.run("cuda", there, call, values, fill=0, stream=stream) for _ in range(5)]

            with concurrent.futures.ThreadPoolExecutor(len(streams), initializer=there.enter) as pool:
                for runs in pool.map(on, streams):
                    for got in runs:
                        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
                            if i not in call.workspaces:
                                np.testing.assert_array_equal(a, b)


# --- processes ---

_CHECK = """
import numpy as np
def check():
    import jax, jax.numpy as jnp, jaxops
    x = jnp.arange(24.0).reshape(2, 12)
    for ours, reference in ((jaxops.softmax, jax.nn.softmax), (jaxops.log_softmax, jax.nn.log_softmax)):
        np.testing.assert_allclose(ours(x), reference(x), rtol=1e-6, atol=1e-6)
"""


def start(script, tmp_path):
    path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.py"  # another may be read just now
    path.write_text(script)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.Popen(
        [sys.executable, "-P", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process):
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return out


def test_fork_after_import(tmp_path):
    """A process that has imported jaxops, and run nothing, can fork: its children and itself compute."""
    script = f"""
import os, jaxops
{_CHECK}
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        check()
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
check()
"""
    finish(start(script, tmp_path))


def test_spawn(tmp_path):
    """A process started by one that computes."""
    script = f"""
import multiprocessing
{_CHECK}
if __name__ == "__main__":
    check()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=check)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    finish(start(script, tmp_path))


def test_many_processes_import_at_once(tmp_path):
    processes = [start("import jaxops; print(len(jaxops.__all__))", tmp_path) for _ in range(6)]
    assert {finish(process).strip() for process in processes} == {str(len(jaxops.__all__))}

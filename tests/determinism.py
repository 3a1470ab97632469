"""Prints a digest of every op's bits, in results and gradients: `determinism.py [--busy]`.

--busy: while another thread keeps the device at work. The output must be the same in every run on one device.
"""

import hashlib
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from support.ops import CASES, value_and_gradients

import jaxops

#: By name, functions of x and a vector.
CALLS = {name: call for case in CASES.values() for name, call in case.repeated.items()}
SHAPES = ((300, 257), (1030, 1024), (7, 40000), (2000, 64))


def digests(shapes=SHAPES) -> dict[str, str]:
    rng = np.random.default_rng(0)
    found = {}
    for name, call in CALLS.items():
        total = hashlib.sha256()
        for shape in shapes:
            if "matmul" in name and max(shape) > 2000:
                continue
            for dtype in ("float32", "bfloat16"):
                x = jnp.asarray(rng.standard_normal(shape), dtype)
                bias = jnp.asarray(rng.standard_normal(shape[1:]), "float32")
                out = jax.eval_shape(call, x, bias)
                dy = jnp.asarray(rng.standard_normal(out.shape), out.dtype)

                @jax.jit
                def several(x, bias, dy, call=call):  # enough launches in a row for a command buffer
                    return [value_and_gradients(call, (x * (1 + i), bias), dy) for i in range(4)]

                first, second = (
                    [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(several(x, bias, dy))] for _ in range(2)
                )
                assert first == second, f"{name} differs from call to call"
                total.update(b"".join(first))
        found[name] = total.hexdigest()
    return found


def keep_busy(stop: threading.Event) -> None:
    work = jax.jit(lambda x: jnp.tanh(x @ x) + jaxops.softmax(x))
    x = jnp.ones((1500, 1500), jnp.float32)
    while not stop.is_set():
        x = work(x).block_until_ready()


if __name__ == "__main__":
    stop = threading.Event()
    thread = threading.Thread(target=keep_busy, args=(stop,))
    if "--busy" in sys.argv:
        thread.start()
    try:
        for name, digest in digests().items():
            print(f"{name}: {digest}")
    finally:
        stop.set()
    if "--busy" in sys.argv:
        thread.join()

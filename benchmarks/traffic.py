"""The bytes that a training step's kernels move on an H200, without one: `python -m benchmarks.traffic 'Llama: 16'`.

XLA compiles the step for a described H200. Nothing runs and nothing is autotuned, so there are no times; but the passes
that XLA adds between products and jaxops' calls are the real ones, and most of a step's losses are there: copies,
concatenations, values that are computed again. `python -m benchmarks budget` has the times, on a GPU.

It needs jaxops built with its GPU half, and jax's CUDA plugin (`pip install --no-deps jax-cuda13-plugin
jax-cuda13-pjrt`, of jax's version); the machine needs no GPU.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Before jax. Without autotuning XLA would take Triton's products; measured, most are cuBLAS's.
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false " + os.environ.get(
    "XLA_FLAGS", ""
)
os.environ["JAX_PLATFORMS"] = "cpu,cuda"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from rich import table

from benchmarks import harness, models
from jaxops._kernel import HANDLERS

#: XLA's description of the GPU (stream_executor::GpuTargetConfigProto).
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
#: The contenders that compile without a GPU; cuDNN's attention needs one.
CONTENDERS = [name for name in models.CONTENDERS if name != models.BASELINE]
#: Bytes a second that an H200 copies.
RATE = 4.3e12

#: Instructions that move nothing.
_FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "call")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)")
_SHAPE = re.compile(r"(pred|bf16|[sfu](?:8|16|32|64)|f8\w*)\[([\d,]*)\]")


class Pass(NamedTuple):
    """A kernel: the bytes of its operands and results, how often it runs, and the operation that it comes from."""

    kind: str
    shape: str
    source: str
    bytes: int
    times: int


def _bytes(shape: str) -> int:
    total = 0
    for dtype, dims in _SHAPE.findall(shape):
        size = 1 if dtype == "pred" or dtype.startswith("f8") else int(dtype.lstrip("bfsu")) // 8
        total += size * math.prod(int(d) for d in dims.split(",") if d)
    return total


def passes(hlo: str) -> Iterator[Pass]:
    """A compiled module's kernels, loops' bodies as often as they run."""
    parts = re.split(r"\n\n(?=%|ENTRY)", hlo)
    computations = {re.match(r"(?:ENTRY )?%([\w.\-]+)", part)[1]: part for part in parts if re.match(r"ENTRY|%", part)}
    entry = next(name for name, part in computations.items() if part.startswith("ENTRY"))

    def walk(name: str, times: int) -> Iterator[Pass]:
        lines = [found for line in computations[name].splitlines()[1:] if (found := _INSTRUCTION.match(line))]
        shapes = {found[1]: found[2] for found in lines}
        for found in lines:
            result, shape, opcode, operands, rest = found.groups()
            if opcode in ("while", "call"):
                inner = re.search(r"(?:body|to_apply)=%([\w.\-]+)", rest)
                count = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
                yield from walk(inner[1], times * (int(count[1]) if count else 1))
            if opcode in _FREE:
                continue
            moved = _bytes(shape) + sum(_bytes(shapes.get(x, "")) for x in re.findall(r"%([\w.\-]+)", operands))
            target = re.search(r'custom_call_target="([^"]*)"', rest)
            source = re.search(r'op_name="([^"]*)"', rest)
            kind = target[1] if target else re.sub(r"[.\d]+$", "", result) if opcode == "fusion" else opcode
            yield Pass(kind, shape, re.sub(r"_\d+", "_*", source[1]) if source else "", moved, times)

    return walk(entry, 1)


def compiled(case: models.Case, name: str) -> jax.stages.Compiled:
    """A contender's training step for an H200."""
    topology = topologies.get_topology_desc("", "cuda", topology="1x1x1", target_config=H200)
    device = SingleDeviceSharding(topology.devices[0])
    module = case.contender(name)
    batch = jax.eval_shape(module.batch, jax.random.key(0))
    parameters = jax.eval_shape(lambda key, b: module.init(key, *module.example(b)), jax.random.key(0), batch)
    state = (parameters, parameters, parameters, jax.ShapeDtypeStruct((), jnp.int32))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), (state, batch))
    return models.make_step(module.loss).trace(*placed).lower(lowering_platforms=("cuda",)).compile()


def show(case: models.Case, name: str, most: int) -> None:
    """Prints how much each kind of kernel moves, and the passes between calls that move most."""
    console = harness.make_console()
    program = compiled(case, name)
    found = list(passes(program.as_text()))
    console.print(f"{case.label}: {name}; temporary {program.memory_analysis().temp_size_in_bytes / 2**30:.2f} GiB")
    calls = [one for one in found if "." in one.kind or "$" in one.kind]
    between = [one for one in found if one not in calls]
    kinds = collections.Counter({"XLA's passes": sum(one.bytes * one.times for one in between)})
    for one in calls:
        kinds[one.kind] += one.bytes * one.times
    shown = table.Table(title=f"calls and passes, at {RATE / 1e12} TB/s", title_justify="left")
    for heading in ("kind", "GiB", "us"):
        shown.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind, moved in kinds.most_common():
        shown.add_row(kind, f"{moved / 2**30:.2f}", f"{moved / RATE * 1e6:.0f}")
    console.print(shown)
    groups: dict[tuple[str, str, str], list[Pass]] = collections.defaultdict(list)
    for one in between:
        groups[one.kind, one.shape, one.source].append(one)
    largest = sorted(groups.items(), key=lambda group: -sum(one.bytes * one.times for one in group[1]))
    shown = table.Table(title="XLA's passes", title_justify="left")
    for heading in ("times", "us", "kind", "result", "from"):
        shown.add_column(heading, justify="right" if heading in ("times", "us") else "left", overflow="fold")
    for (kind, shape, source), some in largest[:most]:
        moved = sum(one.bytes * one.times for one in some)
        times = sum(one.times for one in some)
        shown.add_row(
            str(times), f"{moved / RATE * 1e6:.0f}", kind, re.sub(r"\{[\d,]*\}", "", shape)[:48], source[-60:]
        )
    console.print(shown)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the chosen models' traffic; 1 if there is none, or no GPU half."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traffic", description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", default="", help="a regular expression that the model's label contains")
    parser.add_argument("--contender", default="jaxops", choices=CONTENDERS)
    parser.add_argument("--most", type=int, default=25, help="how many passes to list (default: %(default)s)")
    options = parser.parse_args(argv)
    cases = [case for case in models.CASES if re.search(options.only, case.label)]
    if "cuda" not in HANDLERS or not cases:
        print(
            "jaxops has no GPU half here: make build CUDA=ON"
            if cases
            else f"no model has {options.only!r} in its label"
        )
        return 1
    for case in cases:
        show(case, options.contender, options.most)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The row plans on GPUs: functions of shape, dtype and device, which need no GPU (ffi/rows/plan.h)."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops import _cpu
from jaxops._kernel import KERNELS

ELEMENTS = ("bfloat16", "float16", "float32", "any", "float64")
COLUMNS = sorted({2**k + d for k in range(20) for d in (-1, 0, 1, 8)} | {3 * 2**k for k in range(3, 17)} | {50257})
#: Inputs and parameters: softmax forward and backward, layer_norm and rms_norm forward, and their gradients.
BODIES = ((1, 0), (2, 0), (1, 2), (1, 1), (2, 1))


def pack_of(elements: str, across: bool) -> int:
    return {"float32": 4, "float64": 1}.get(elements, 4 if across else 8)


def every_plan(**fixed):
    for elements, (inputs, parameters), columns, rows in itertools.product(ELEMENTS, BODIES, COLUMNS, (1, 300, 10**6)):
        options = (0, 2) if parameters == 0 else (0,)
        for option in options:
            across = fixed.get("across", False)
            whole = columns % pack_of(elements, across) == 0 or across
            problem = {
                "rows": rows,
                "columns": columns,
                "elements": elements,
                "inputs": inputs,
                "parameters": parameters,
                "options": option,
                "packs": whole and elements != "float64",
                "alike": option == 0,
                **fixed,
            }
            yield problem, _cpu.plan_rows(**problem)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("cluster", [1, 8, 16])
def test_every_row_is_held(across, cluster):
    """By the threads of one block, or in a cluster that the device runs; else the row is read again in each pass."""
    kernels = set()
    for problem, plan in every_plan(across=across, most_cluster=cluster):
        kernels.add(plan["kernel"])
        assert plan["kernel"] != "no kernel", problem
        assert 1 <= plan["cluster"] <= cluster, problem
        width = {"TileRows": 32 if plan["lanes"] <= 4 else 8, "StreamedTiles": 8}.get(plan["kernel"], 1)
        assert plan["lanes"] * width <= 1024, problem
        if plan["kernel"] in ("StreamedRows", "StreamedTiles"):
            continue
        wide = 1 if plan["elements"] or across else pack_of(problem["elements"], across)
        assert plan["lanes"] * plan["packs"] * plan["cluster"] * wide >= problem["columns"], (problem, plan)
        if plan["kernel"] == "WarpRows":
            assert plan["lanes"] in (1, 2, 4, 8, 16, 32)
        elif not across and plan["lanes"] > 32:
            assert plan["lanes"] % 32 == 0
    expected = {"TileRows", "StreamedTiles"} if across else {"WarpRows", "BlockRows", "StreamedRows", "StagedRows"}
    if cluster > 1 and not across:
        expected |= {"ClusterRows", "PersistentRows"}
    assert kernels == expected


def test_staged_rows_have_their_sure_elements():
    """A thread's first elements lie in the row, in every block: they are read without a question."""
    bodies = [(1, 1, False), (1, 2, False), (2, 1, True), (3, 1, True), (1, 0, False), (2, 0, False)]
    for elements, columns in itertools.product(
        ("bfloat16", "float32"), [*range(65, 9000, 3), *range(9000, 270000, 37)]
    ):
        for inputs, parameters, sums in bodies:
            plan = _cpu.plan_rows(
                rows=4000,
                columns=columns,
                elements=elements,
                packs=False,
                parameters=parameters,
                inputs=min(inputs, 2),
                fetched=inputs,
                sums=2 * sums,
            )
            if plan["kernel"] != "StagedRows":
                continue
            cluster = plan["cluster"]
            share = -(-columns // (cluster * 32)) * 32 if cluster > 1 else columns
            last = columns - (cluster - 1) * share
            fixed = cluster > 1
            sure = (12 if plan["packs"] == 33 else 14) if fixed else plan["packs"] // 2  # SureElements in plan.h
            assert sure * plan["lanes"] <= last, (columns, plan)
            assert share <= plan["packs"] * plan["lanes"], (columns, plan)


@pytest.mark.parametrize("elements", ["bfloat16", "float32"])
def test_threads_fit_the_length(elements):
    """No warp in a block is without packs: an odd length costs no idle threads."""
    pack = pack_of(elements, False)
    for columns in range(pack, 40000, pack * 3):
        plan = _cpu.plan_rows(rows=10**6, columns=columns, elements=elements)
        if plan["kernel"] == "BlockRows":
            assert (plan["lanes"] - 32) * plan["packs"] * pack < columns or plan["lanes"] == 64


def test_few_rows_get_more_threads():
    few, many = (_cpu.plan_rows(rows=rows, columns=4096, elements="bfloat16", parameters=2) for rows in (8, 8192))
    assert few["lanes"] > many["lanes"]


def test_segments_and_chunks():
    assert _cpu.plan_segments(1, 2**20, False, True, False, 2, False, False) > 1
    assert _cpu.plan_segments(1, 4096, False, True, False, 2, False, False) == 0
    assert _cpu.plan_segments(600, 2**20, False, True, False, 2, False, False) == 0  # rows enough for every block
    kernel, x = KERNELS["layer_norm_bwd"], jax.ShapeDtypeStruct

    def chunks(groups, rows, columns, dtype="bfloat16"):
        full, row = x((groups, rows, columns), dtype), x((groups, rows, 1), "float32")
        operands = (full, x((1, 1, columns), "float32"), row, row, full)
        has = ("scale", "dscale", "dbias")
        return kernel._chunks(*operands, axes=(2,), kept=(0,), has=has, dtype=np.dtype(dtype))

    assert [chunks(1, rows, 4096) for rows in (8, 64, 10**6)] == [1, 8, 264]
    assert chunks(1000, 10**6, 4096) == 1
    assert [chunks(1, 10**6, columns) for columns in (256, 1024, 16384, 65536)] == [528, 264, 66, 15]


def test_explain_prints_the_plan():
    (call,) = jaxops.explain(jaxops.softmax, jnp.ones((2048, 8192), jnp.bfloat16), platform="cuda").calls
    assert call.detail.startswith("2048 rows of 8192 adjacent: BlockRows, 256 lanes x 4 packs;")
    (call,) = jaxops.explain(lambda x: jaxops.softmax(x, axis=0), jnp.ones((300, 64)), platform="cuda").calls
    assert call.detail.startswith("64 rows of 300 strided: TileRows, 32 lanes x 16 packs;")

"""The benchmarks run on the device at hand and write what they print."""

import csv
import importlib
import pathlib
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops import ROW_OPS

from jaxops._device import H200, local_device

COLUMNS = "date,jaxops,jax,device,op,direction,shape,dtype,ours,xla,unit,ceiling,ratio,timing"


@pytest.fixture
def load():
    """Imports a module of benchmarks/."""
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def bench(load, tmp_path):
    """Runs `python -m benchmarks` with the arguments and returns the rows of a CSV file."""

    def run(*arguments, file):
        command = [*arguments, "--quick", "--seconds", "0.01", "--results", str(tmp_path)]
        assert load("__main__").main(command) == 0
        lines = (tmp_path / f"{file}.csv").read_text().splitlines()
        assert lines[0].startswith(COLUMNS)
        rows = list(csv.DictReader(lines))
        for row in rows:
            assert row["jax"] == jax.__version__
            assert float(row["ours"]) > 0
            assert float(row["xla"]) > 0
            speed = float(row["ours"]) / float(row["xla"])
            expected = speed if "/s" in row["unit"] else 1 / speed
            assert float(row["ratio"]) == pytest.approx(expected, rel=1e-3)
        return rows

    return run


@pytest.mark.parametrize("op", ["softmax", "layer_norm"])
def test_row_op(bench, op, capsys):
    rows = bench(op, "--dtype", "float32", "--only", "x127", file=op)
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    assert all(float(row["ceiling"]) > 0 and row["unit"] == "TB/s" for row in rows)
    assert rows[0]["shape"] in capsys.readouterr().out


def test_results_are_recorded(load, tmp_path):
    """A measurement's row takes the place of its earlier one; other rows stay."""
    harness = load("harness")
    path = tmp_path / "new" / "op.csv"
    measured = dict.fromkeys(("op", "direction", "dtype", "unit", "timing"), "")
    for shape, ours in (("a, b", 1.0), ("c", 2.0), ("a, b", 3.0)):
        harness.record(path, harness.Row.of(**measured, shape=shape, ours=ours, xla=2.0, ceiling=None, ratio=0.5))
    lines = path.read_text().splitlines()
    assert lines[0].startswith(COLUMNS)
    with path.open() as file:
        assert [(row["shape"], row["ours"]) for row in csv.DictReader(file)] == [("a, b", "3"), ("c", "2")]


def test_matmul(bench):
    rows = bench("matmul", "--dtype", "float32", "--only", "forward", file="matmul")
    assert {row["unit"] for row in rows} == {"TFLOP/s"}


def test_attention(bench):
    rows = bench("attention", "--dtype", "bfloat16", "--only", "forward|packed", file="attention")
    assert {row["unit"] for row in rows} == {"TFLOP/s"} and len(rows) >= 4


def test_matmul_of_random_sizes(bench, load):
    rows = bench("matmul_random", "--dtype", "float32", "--seed", "1", file="matmul_random")
    matmul = load("matmul")
    assert [row["shape"] for row in rows] == [str(case) for case in matmul.random_cases(1, 3, 1e9)]
    drawn = matmul.random_cases(0, 64, 4e11)
    assert drawn == matmul.random_cases(0, 64, 4e11) != matmul.random_cases(1, 64, 4e11)
    assert all(1e7 <= case.operations <= 4e11 for case in drawn)


def test_rows_of_random_shapes(bench, load):
    rows = bench("rows_random", "--dtype", "bfloat16", "--seed", "1", file="rows_random")
    rows_random = load("rows_random")
    assert {row["shape"] for row in rows} == {str(case) for case in rows_random.random_cases(1, 4, 2**18)}
    drawn = rows_random.random_cases(0, 64, 2**26)
    assert drawn == rows_random.random_cases(0, 64, 2**26) != rows_random.random_cases(1, 64, 2**26)
    assert {case.option for case in drawn} == {"", *(name for names in rows_random.OPTIONS.values() for name in names)}


def test_own_kernels_of_matmul(load, tmp_path, capsys):
    """The choice is as it was afterwards; without a Hopper GPU there is nothing to measure."""
    main, choices = load("__main__"), importlib.import_module("jaxops.ops._matmul_choice")
    small = choices.Product(64, 64, 64, "16bit")
    hopper = jax.default_backend() != "cpu" and local_device().capability == "9.0"
    only = ["--only", "1024x1024x1024"] if hopper else []
    command = ["matmul_own", "--dtype", "bfloat16", "--quick", "--seconds", "0.01", "--results", str(tmp_path), *only]
    assert main.main(command) == (0 if hopper else 1)
    assert hopper or "its kernels need a Hopper GPU" in capsys.readouterr().out
    assert choices.choose(small, H200).kernel == "xla"


def test_products_that_the_choice_rests_on(load):
    """Each once, by their names; all that there are figures of."""
    matmul = load("matmul")
    names = [str(case) for case in matmul.OWN]
    assert len({*names}) == len(names)
    assert {*matmul.FEW_ROWS, *(name.strip() for name in matmul.MORE.split(","))} <= {*names}
    results = pathlib.Path(matmul.__file__).parent / "results" / "matmul_own.csv"
    with results.open() as file:
        assert {row["shape"] for row in csv.DictReader(file)} <= {*names}


def test_calls(load, tmp_path):
    harness, calls = load("harness"), load("calls")
    settings = harness.Settings(("float32",), True, 0.01, re.compile(""), tmp_path, harness.make_console())
    assert calls.run(settings, length=5)
    with (tmp_path / "calls.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["op"] for row in rows] == ["softmax", "layer_norm"]
    assert float(rows[0]["ceiling"]) > 0


@pytest.mark.slow
def test_train(bench, capsys):
    """Every contender; the losses of the first steps and on text agree, or the run fails."""
    rows = bench("train", "--only", "Llama", "--steps", "3", file="train")
    assert [row["direction"] for row in rows] == ["plain Flax", "swapped", "fused", "jaxops"]
    assert {row["unit"] for row in rows} == {"ms"}
    out = capsys.readouterr().out
    assert "Llama: 1 layers, width 256" in out and "losses of 3 steps on text" in out


def test_losses_on_text(load, tmp_path, capsys):
    """Steps read other text each time; losses that are further apart than XLA's own fail the run."""
    harness, models, train = load("harness"), load("models"), load("train")
    for case in models.QUICK:
        module = case.contender("plain Flax")
        if module.text:
            first, second = module.text(0), module.text(1)
            shapes = jax.tree.map(lambda x: (x.shape, x.dtype), [first, second])
            assert shapes[0] == shapes[1] == jax.tree.map(lambda x: (x.shape, x.dtype), module.batch(jax.random.key(0)))
            assert np.any(first["tokens"] != second["tokens"]) and len(np.unique(first["tokens"])) > 20
    assert train.errors_on_text({"float32": [4.0, 2.0], "a": [4.0, 2.5]}) == {"float32": (0.0, 0.0), "a": (0.125, 0.25)}
    settings = harness.Settings((), True, 0.01, re.compile(""), tmp_path, harness.make_console(), steps=2)
    near = {"float32": [4.0, 2.0], "best XLA": [4.0, 2.02], "jaxops": [4.0, 1.975]}
    assert train._show_text(models.QUICK[0], near, settings)
    for far in (1.9, np.nan):
        assert not train._show_text(models.QUICK[0], {**near, "jaxops": [4.0, far]}, settings)
        assert "FAILED 2 layers, width 128" in capsys.readouterr().out


def test_gradients_that_differ(load):
    """The training benchmark refuses gradients by the largest difference, and NaN by any; tiny ones may be noise."""
    train = load("train")
    wanted = {"a": jnp.ones(4), "b": 1e-6 * jnp.ones(4)}
    found = {"a": jnp.array([1.0, 1.0, 1.0, 1.2]), "b": jnp.zeros(4)}
    differences = train._gradients_differ(found, wanted)
    np.testing.assert_allclose([differences["a"], differences["b"]], [0.1, 1e-3], rtol=1e-4)
    assert np.isnan(train._gradients_differ({"a": jnp.full(4, jnp.nan), "b": jnp.zeros(4)}, wanted)["a"])


@pytest.mark.parametrize("factor", [1.0, 1.1, np.nan])
def test_gradients_beside_float32(factor, load, monkeypatch, tmp_path, capsys):
    """A contender whose gradients are wrong fails the run."""
    main, models = load("__main__"), load("models")
    best = models.CONTENDERS[models.BASELINE]
    wrong = best._replace(class_loss=lambda *operands: factor * best.class_loss(*operands))
    names = ("plain Flax", models.BASELINE)
    monkeypatch.setattr(models, "CONTENDERS", {name: models.CONTENDERS[name] for name in names} | {"wrong": wrong})
    command = ["gradients", "--quick", "--only", "Vit", "--results", str(tmp_path)]
    assert main.main(command) == (0 if factor == 1 else 1)
    out = capsys.readouterr().out
    assert "wrong" in out and "best XLA" in out


def test_trained_models_are_one(load):
    """The contenders of a model have the same parameters, and equal losses, in shape and type."""
    models = load("models")
    for case in models.QUICK:
        modules = [case.contender(name) for name in models.CONTENDERS]
        batch = modules[0].batch(jax.random.key(1))
        shapes = [jax.eval_shape(module.init, jax.random.key(0), *module.example(batch)) for module in modules]
        assert all(shape == shapes[0] for shape in shapes)
        losses = [jax.eval_shape(module.loss, shapes[0], batch) for module in modules]
        assert all((loss.shape, loss.dtype) == ((), jnp.float32) for loss in losses)


def test_budget(load, capsys, tmp_path):
    """Kinds of kernels, time that they overlap in, and where the compiler says that they come from."""
    budget = load("budget")
    source = 'metadata={op_name="jit(step)/a/add" source_file="/x/m.py" source_line=7}'
    hlo = f"  %loop_add_fusion.1 = f32[] fusion(), {source}"
    events = [("MatmulKernel", 0.0, 4.0), ("loop_add_fusion_1", 2.0, 4.0), ("void AttentionForward", 10.0, 1.0)]
    found = budget.Budget(20.0, [budget.Event(*event) for event in events], hlo)
    assert {kind for kind, events in found.kinds().items() if events} == {"products", "elementwise", "attention"}
    assert (found.busy, found.gaps, budget.Budget(1.0, [], hlo).gaps) == (7.0, 4.0, 0.0)
    assert found.sources() == {"loop_add_fusion_1": "jit(step)/a/add m.py:7"}
    models = load("models")
    for case in models.CASES:
        floor = budget.floors(case, 1e15, 4e12)
        assert all(value > 0 for value in floor.values())
    if jax.default_backend() != "gpu":
        assert load("__main__").main(["budget", "--results", str(tmp_path)]) == 1
        assert "there is no GPU" in capsys.readouterr().out


@pytest.fixture
def flax_llama():
    """Transformers' module with the Flax Llama; its last version is 4.56."""
    return pytest.importorskip("transformers.models.llama.modeling_flax_llama", exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_upstream(flax_llama, load, tmp_path, capsys):
    """Every contender trains transformers' model; the losses fall and agree, or the run fails."""
    main, upstream = load("__main__"), load("upstream")
    assert main.main(["upstream", "--quick", "--seconds", "0.01", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "All losses of the 50 steps agree." in out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    names = [upstream.PLAIN, upstream.BEST, upstream.SWAPPED, upstream.FUSED]
    assert [row[0] for row in rows] == names
    assert all(float(row[6]) < float(row[5]) - 0.5 for row in rows)
    assert re.search(r"^swapped: [1-9]\d* on jaxops", out, re.MULTILINE)
    assert re.search(r"^fused: 2 dot_product_attention", out, re.MULTILINE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_upstream_with_the_attention_of_jax(flax_llama, load, monkeypatch):
    """Within the scope every layer calls `jax.nn`'s attention, with about the same gradients; afterwards none does."""
    upstream = load("upstream")
    case, before = upstream.SMALL[0], flax_llama.FlaxLlamaAttention.__call__
    model, tokens = case.model(), case.batches()[0]
    spy = mock.Mock(wraps=jax.nn.dot_product_attention)
    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)

    def gradients():
        spy.reset_mock()
        return jax.grad(upstream.loss_of(model.module))(model.params, tokens), spy.call_count

    plain, calls = gradients()
    assert calls == 0
    with upstream.cudnn_attention():
        changed, calls = gradients()
    assert calls == case.layers and flax_llama.FlaxLlamaAttention.__call__ is before
    assert jax.tree.structure(plain) == jax.tree.structure(changed)
    for a, b in zip(jax.tree.leaves(changed), jax.tree.leaves(plain), strict=True):
        assert float(jnp.linalg.norm(a - b)) < 0.03 * float(jnp.linalg.norm(b))


def test_upstream_losses_that_differ(load):
    """Curves agree within a bound of every step's loss, and NaN agrees with nothing."""
    upstream = load("upstream")
    wanted = [4.0, 2.0]
    assert upstream.difference([4.0, 2.0], wanted) == (0.0, True)
    assert upstream.difference([4.0, 2.0 * (1 + 2 * upstream.TOLERANCE)], wanted)[1] is False
    assert upstream.difference([float("nan"), 2.0], wanted)[1] is False


def test_upstream_without_transformers(load, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load("__main__").main(["upstream", "--quick", "--results", str(tmp_path)]) == 1
    assert "FAILED upstream: it needs transformers with Flax models" in capsys.readouterr().out


def test_every_shape_list_makes_tasks(load, tmp_path, monkeypatch):
    """Shapes, labels and amounts of work of the lists for both kinds of device; nothing is run."""
    harness, rows, matmul = load("harness"), load("rows"), load("matmul")
    settings = harness.Settings(("bfloat16", "float32"), False, 1.0, re.compile(""), tmp_path, None)
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        tasks = [task for op in ROW_OPS for task in rows.tasks(op, settings)]
        tasks += [task for dtype in settings.dtypes for task in matmul.tasks(matmul.cases(dtype, False), dtype, 1.0)]
        labels = [task.label for task in tasks]
        assert len(set(labels)) == len(labels)
        assert all(task.work > 0 for task in tasks)
        for task in tasks:
            if (task.direction, task.dtype) != ("forward", "bfloat16"):
                continue
            operands = jax.eval_shape(task.draw, 0)
            ours, reference = (jax.tree.leaves(jax.eval_shape(f, *operands)) for f in (task.ours, task.reference))
            described = [[(x.shape, x.dtype) for x in results] for results in (ours, reference)]
            assert described[0] == described[1], task.label


def test_wrong_results_are_refused(load):
    harness = load("harness")
    double = harness.Task(
        "double", "forward", "4", "float32", lambda x: 2 * x, lambda x: 2.001 * x, lambda seed: (), 1.0, "TB/s", 1.0
    )
    calls = [harness.Calls(f, [(jax.numpy.ones(4),)]) for f in (double.ours, double.reference)]
    with pytest.raises(ArithmeticError, match="differs"):
        harness.check(double, *calls)


def test_kernels_are_counted(load):
    hlo = """HloModule jit_run, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused_computation (param_0: f32[4]) -> f32[4] {
  %param_0 = f32[4]{0} parameter(0)
  %negate = f32[4]{0} negate(%param_0)
  ROOT %exponential = f32[4]{0} exponential(%negate)
}

%command_buffer (p: f32[4]) -> (f32[4], f32[]) {
  %p = f32[4]{0} parameter(0)
  %fusion = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused_computation
  ROOT %call = (f32[4]{0}, f32[]) custom-call(%fusion), custom_call_target="t"
}

ENTRY %main.3 (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %call = (f32[4]{0}, f32[]) call(%x), to_apply=%command_buffer
  %get-tuple-element = f32[4]{0} get-tuple-element(%call), index=0
  ROOT %loop_fusion = f32[4]{0} fusion(%get-tuple-element), kind=kLoop, calls=%fused_computation
}
"""
    assert load("calls").kernels(hlo) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["softmax", "--only", "("], "no regular expression"),
        (["rows_random", "--dtype", "tf32"], "tf32 is of matmul alone"),
    ],
)
def test_arguments_that_are_refused(arguments, message, load, capsys):
    with pytest.raises(SystemExit):
        load("__main__").main(arguments)
    assert message in capsys.readouterr().err


def test_a_selection_of_nothing_is_a_failure(load, capsys, tmp_path):
    arguments = ["softmax", "--quick", "--only", "no such label", "--results", str(tmp_path)]
    assert load("__main__").main(arguments) == 1
    assert "no measurement's label has 'no such label' in it" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]

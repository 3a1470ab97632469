"""`make demo`."""

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from support import contract
from support.ops import COMPARISONS

from benchmarks.demo import __main__ as demo
from benchmarks.demo import language_model, measurement, report
from jaxops.__main__ import environment

ROOT = pathlib.Path(__file__).parents[2]
START = f"import runpy, sys; sys.path.append({str(ROOT)!r}); runpy.run_module('benchmarks.demo', run_name='__main__')"


def run(*arguments, cwd):
    # This process may hold most of a GPU's memory: the other must not reserve its share up front.
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", START, *arguments]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)


def test_quick_json(tmp_path):
    done = run("--quick", "--json", "--steps", "12", "--seed", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["versions"]["jax"] == jax.__version__
    assert result["device"]["platform"] == jax.devices()[0].platform
    assert "softmax_fwd" in result["handlers"]["cpu"]
    assert result["failures"] == []

    expected = [(op, dtype) for op in COMPARISONS for dtype in measurement.DTYPES]
    assert [(row["op"], row["dtype"]) for row in result["ops"]] == expected
    for row in result["ops"]:
        assert not row["worse"]
        for error in ("value_error_ulp", "gradient_error_ulp"):
            assert 0 < row[error]["jaxops"] <= max(measurement.ROUNDING, row[error]["reference"])
        for seconds in ("forward_seconds", "forward_and_backward_seconds"):
            assert row[seconds]["ratio"] == pytest.approx(row[seconds]["reference"] / row[seconds]["jaxops"])

    training = result["training"]
    plain, swapped = (np.array(training["losses"][name]) for name in ("plain", "jaxops"))
    assert plain.shape == swapped.shape == (12,)
    assert plain[-1] < plain[0] - 0.5
    difference = training["largest_relative_difference"]
    assert difference == pytest.approx(np.max(np.abs(swapped - plain) / plain))
    assert difference < report.CURVE_TOLERANCE
    assert all(seconds > 0 for seconds in training["seconds_per_step"].values())
    assert (tmp_path / training["plot"]).read_bytes().startswith(b"\x89PNG")


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--help"])
    assert stopped.value.code == 0
    help_text = capsys.readouterr().out
    for option in ("--quick", "--json", "--out", "--steps", "--seed"):
        assert option in help_text


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "x"], ["--seed", "-1"], ["--unknown"]], ids=str)
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_out_that_cannot_be_written(tmp_path, capsys):
    """Is said before anything is measured."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--out", str(tmp_path / "file" / "plots")])
    assert stopped.value.code == 2
    assert "argument --out: cannot write into" in capsys.readouterr().err


def test_missing_packages(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optax" else found(name))
    with pytest.raises(SystemExit) as stopped:
        demo.main([])
    assert stopped.value.code == 2
    assert "needs optax: pip install '.[demo]'" in capsys.readouterr().err


def test_models_differ_in_their_operations_alone():
    settings = language_model.Settings(steps=1, width=16, layers=1, heads=2, length=6, batch=2)
    characters = np.arange(12, dtype=np.int32).reshape(2, 6)
    parameters, logits, launches = {}, {}, {}
    for name, operations in language_model.OPERATIONS.items():
        model = language_model.Decoder(operations, 12, settings)
        parameters[name] = model.init(jax.random.key(0), characters)
        logits[name] = model.apply(parameters[name], characters)
        launches[name] = contract.count_launches(model.apply, parameters[name], characters)
    jax.tree.map(np.testing.assert_array_equal, parameters["plain"], parameters["jaxops"])
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(logits["jaxops"], logits["plain"], atol=1e-2)
    # A layer: 1 softmax, 2 norms, and the products for q, k, v, logits, mixing, output and the 2 of the MLP; then
    # the last norm and the last product.
    assert launches == {"plain": 0, "jaxops": 1 + 2 + 8 + 1 + 1}


def test_text_and_batches():
    text = language_model.read_text()
    assert len(text) > 100_000
    assert "The " in text
    settings = language_model.Settings(steps=3, length=20, batch=4)
    first, vocabulary = language_model.batches(settings, text)
    assert first.shape == (3, 4, 21)
    assert vocabulary == len(set(text))
    np.testing.assert_array_equal(first, language_model.batches(settings, text)[0])
    alphabet = np.array(sorted(set(text)))
    assert "".join(alphabet[first[0, 0]]) in text


def row(value=(0.5, 0.6), gradient=(1.0, 1.0)):
    errors = measurement.Pair(*value), measurement.Pair(*gradient)
    return measurement.Row("softmax", "float32", *errors, measurement.Pair(1e-3, 2e-3), measurement.Pair(3e-3, 3e-3))


@pytest.mark.parametrize(
    ("value", "gradient", "worse"),
    [
        ((0.5, 0.4), (1.9, 1.0), []),
        ((30.0, 31.0), (5.0, 5.0), []),
        ((2.1, 2.0), (1.0, 1.0), ["value"]),
        ((2.1, math.nan), (3.0, 2.5), ["value", "gradient"]),
        ((math.nan, math.nan), (1.0, 1.0), ["value"]),
    ],
)
def test_failures_of_rows(value, gradient, worse):
    found = report.failures([row(value, gradient)], 0.0)
    assert len(found) == len(worse)
    assert all(f"softmax in float32: the {what} errs" in text for what, text in zip(worse, found, strict=True))
    assert row(value, gradient).worse == bool(worse)


def test_failures_of_curves():
    assert report.failures([row()], 0.0099) == []
    assert "2 % apart; at most 1 % is allowed" in report.failures([row()], 0.02)[0]
    assert len(report.failures([row()], math.nan)) == 1
    assert language_model.largest_relative_difference([2.0, 4.0], [2.0, 4.2]) == pytest.approx(0.05)


def test_nan_becomes_null():
    runs = {
        name: language_model.Run(None, {"x": np.zeros(3)}, None, [np.float32(1.5), math.nan], [0.1])
        for name in language_model.OPERATIONS
    }
    rows = [row((math.nan, 1.0))]
    settings, sizes = language_model.Settings(steps=2), measurement.Sizes.of("cpu", True)
    result = report.as_dictionary(
        environment(), sizes, rows, settings, runs, math.nan, report.Path("out"), report.failures(rows, math.nan)
    )
    read = json.loads(json.dumps(result, allow_nan=False))
    assert read["training"]["losses"]["plain"] == [1.5, None]
    assert read["training"]["largest_relative_difference"] is None
    assert read["ops"][0]["value_error_ulp"]["jaxops"] is None
    assert len(read["failures"]) == 2

"""`python -m jaxops`."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxops
from jaxops import __main__ as report
from jaxops import _selfcheck


def test_quick_json(tmp_path):
    """In a fresh process, elsewhere: the report of an installation."""
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "jaxops", "--quick", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["versions"]["jax"] == jax.__version__
    assert result["device"]["platform"] == jax.devices()[0].platform
    assert "softmax_fwd" in result["handlers"]["cpu"]
    assert (result["cuda_architectures"] is None) == (result["handlers"]["cuda"] == [])
    assert {check["op"] for check in result["checks"]} == set(_selfcheck.OPS)
    assert all(check["passed"] and check["value_error_ulp"] > 0 for check in result["checks"])


def test_a_wrong_op_is_found(monkeypatch, capsys):
    op, definition, shapes = _selfcheck.OPS["softmax"]
    wrong = {
        "value": (lambda x: op(x) * 1.00001, definition, shapes),
        "gradient": (lambda x: op(x) + 0 * x**2 + jax.lax.stop_gradient(op(x)) - op(x), definition, shapes),
        "nan": (lambda x: op(x) * jnp.nan, definition, shapes),
    }
    monkeypatch.setattr(_selfcheck, "OPS", wrong)
    assert report.main(["--quick", "--json"]) == 1
    out, err = capsys.readouterr()
    checks = json.loads(out)["checks"]
    failed = [(check["op"], check["dtype"]) for check in checks if not check["passed"]]
    assert failed == [("value", "float32"), *((op, d) for op in ("gradient", "nan") for d in ("float32", "bfloat16"))]
    assert [check["value_error_ulp"] for check in checks if check["op"] == "nan"] == [None, None]
    assert "gradient in float32 errs by" in err and "at most 32 are allowed" in err


def test_text(monkeypatch, capsys):
    monkeypatch.setattr(_selfcheck, "OPS", {"softmax": _selfcheck.OPS["softmax"]})
    assert report.main(["--quick"]) == 0
    text = capsys.readouterr().out
    assert f"jaxops {jaxops.__version__}" in text and "softmax_fwd" in text
    assert text.count("ok\n") == 2 and "WRONG" not in text


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["--unknown"], 2), (["--steps", "3"], 2)], ids=str)
def test_arguments(arguments, status, capsys):
    with pytest.raises(SystemExit) as stopped:
        report.main(arguments)
    assert stopped.value.code == status
    out, err = capsys.readouterr()
    assert ("--json" in out and "--quick" in out) if status == 0 else arguments[0] in err

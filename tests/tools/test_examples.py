"""examples/train_lm.py trains, saves, goes on where it was interrupted, and compares."""

import csv
import functools
import importlib.util
import pathlib
import sys

import numpy as np
import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "train_lm.py"


@pytest.fixture
def example(monkeypatch):
    """The example, with a size that trains in seconds."""
    specification = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "train_lm", module)
    specification.loader.exec_module(module)
    size = module.Size(1, 32, 2, length=16, batch=2, vocabulary=256, steps=8)
    monkeypatch.setattr(module, "SIZES", {"tiny": size})
    for name in ("make_model", "make_optimizer", "make_step"):  # compiled once, however often a test trains
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name)))
    return module


def losses(directory):
    with (directory / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    return np.array([float(row["loss"]) for row in rows])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("library", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_train(example, library, tmp_path, monkeypatch, capsys, on_gpu):
    monkeypatch.setattr(example, "compare", lambda *arguments: {"flax": 1.0, "jaxops": 2.0})
    run = ["--library", library, "--save-every", "3", "--out"]
    example.main([*run, str(tmp_path / "whole")])
    whole = losses(tmp_path / "whole")
    assert whole[-1] < whole[0] - 0.01
    assert (tmp_path / "whole" / "loss.png").read_bytes().startswith(b"\x89PNG")
    example.main([*run, str(tmp_path / "plain"), "--plain"])
    np.testing.assert_allclose(losses(tmp_path / "plain"), whole, rtol=1e-2)

    draw = example.draw_batch

    def interrupted(text, size, step):
        if step == 7:
            raise KeyboardInterrupt
        return draw(text, size, step)

    monkeypatch.setattr(example, "draw_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        example.main([*run, str(tmp_path / "parts")])
    monkeypatch.setattr(example, "draw_batch", draw)
    example.main([*run, str(tmp_path / "parts")])
    assert "resumed at step 6" in capsys.readouterr().out
    # On a GPU XLA times its products' algorithms anew in each program, and may choose another one.
    np.testing.assert_allclose(losses(tmp_path / "parts"), whole, rtol=1e-3 if on_gpu else 1e-5)


@pytest.mark.slow
def test_compare(example):
    size = example.SIZES["tiny"]
    rates = example.compare(size, "linen", example.read_text(None), rounds=1, steps=1)
    assert set(rates) == {"flax", "jaxops"}
    assert all(rate > 0 for rate in rates.values())

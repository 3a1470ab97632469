"""The examples in the docstrings of the public functions do what they say."""

import doctest
import inspect

import jax
import pytest

import jaxops

FUNCTIONS = [name for name in jaxops.__all__ if inspect.isfunction(getattr(jaxops, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples(name):
    """On the CPU, whose digits the docstrings show."""
    tests = [t for t in doctest.DocTestFinder().find(getattr(jaxops, name), name, globs={}) if t.examples]
    assert tests, f"{name} has no example"
    report = []
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for test in tests:
            runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
            runner.run(test, out=report.append)
            assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described(name):
    function = getattr(jaxops, name)
    described = inspect.getdoc(function).split("Args:")[1].split("Returns:")[0]
    for parameter in inspect.signature(function).parameters:
        assert f"\n  {parameter}: " in described, parameter

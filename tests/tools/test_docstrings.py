"""The examples in the docstrings of the public functions do what they say."""

import doctest
import inspect
import re

import jax
import pytest

import jaxops
from jaxops.flax import linen, nnx

OBJECTS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (jaxops, linen, nnx)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) or (module is not jaxops and name not in ("SwapReport",))
}
#: Aliases, whose docstrings refer to the original.
del OBJECTS["jaxops.flax.linen.MultiHeadAttention"]
FUNCTIONS = [n for n, value in OBJECTS.items() if inspect.isfunction(value) and inspect.signature(value).parameters]


@pytest.mark.parametrize("name", OBJECTS)
def test_examples(name, on_gpu):
    """On the CPU, whose digits the docstrings show."""
    if on_gpu and name == "jaxops.disabled_checks":
        pytest.skip("what is exported where there is a GPU is for the GPU")
    tests = [t for t in doctest.DocTestFinder(recurse=False).find(OBJECTS[name], name, globs={}) if t.examples]
    assert tests, f"{name} has no example"
    report = []
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for test in tests:
            runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
            runner.run(test, out=report.append)
            assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described(name):
    described = re.split("Returns:|Yields:|Example:", inspect.getdoc(OBJECTS[name]).split("Args:")[1])[0]
    for parameter in inspect.signature(OBJECTS[name]).parameters:
        assert re.search(rf"^  ([*\w]+, )*\**{parameter}(, [*\w]+)*: ", described, re.MULTILINE), parameter

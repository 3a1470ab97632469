"""Importing jaxops: version checks, no side effects on JAX, and behaviour without handlers."""

import importlib.metadata
import importlib.resources
import os
import pathlib
import subprocess
import sys
import tomllib
import warnings

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import jaxops
from jaxops import _cpu, _kernel, _load, _warnings


def python(script, tmp_path, **environment):
    """A fresh interpreter's output. It runs elsewhere, so that it imports the installed package."""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=os.environ | environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- versions ---


@pytest.mark.parametrize(
    "version", ["0.10.0", "0.10.2", "0.11.2", "0.12.0", "0.12.0.1", "0.12.1.dev20260101", "0.10.0rc1"]
)
def test_supported_versions_pass(version):
    _load.check_versions(version, version, "0.10.0")


@pytest.mark.parametrize(
    "version", ["0.4.38", "0.9.1", "0.9.99", "0.13.0", "0.13.0.dev1", "1.0.0", "1.0", "unknown", ""]
)
@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_unsupported_versions_are_refused(version, package):
    """The message names both versions and the remedy."""
    versions = {"jax": "0.11.0", "jaxlib": "0.11.0"} | {package: version}
    with pytest.raises(ImportError) as caught:
        _load.check_versions(*versions.values(), "0.10.0")
    message = str(caught.value)
    assert f"jaxops {jaxops.__version__}" in message and f"{package} {version} is installed" in message
    assert ">= 0.10 and < 0.13" in message and "pip install" in message


def test_jaxlib_older_than_the_headers_is_refused():
    with pytest.raises(ImportError) as caught:
        _load.check_versions("0.11.0", "0.11.0", "0.12.0.1")
    message = str(caught.value)
    assert "headers of jaxlib 0.12.0.1" in message and "jaxlib 0.11.0 is installed" in message
    assert "pip install 'jaxlib>=0.12.0.1'" in message and "build jaxops again" in message
    _load.check_versions("0.12.1", "0.12.1", "0.12.0.1")


def test_handlers_are_built_with_the_headers_of_the_oldest_supported_jaxlib():
    """And run with this one, whichever it is: `make` and pip build so; a build with others is refused by older ones."""
    root = pathlib.Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    (pinned,) = (name for name in project["build-system"]["requires"] if name.startswith("jaxlib"))
    oldest = ".".join(map(str, _load.SUPPORTED[0])) + ".0"
    assert pinned == f"jaxlib=={oldest}"
    if _load._parse(_cpu.jaxlib_headers) != _load._parse(oldest):
        assert _load._parse(_cpu.jaxlib_headers) > _load.SUPPORTED[0]
        pytest.skip(f"this build took the headers of jaxlib {_cpu.jaxlib_headers}")
    _load.check_versions(jax.__version__, jaxlib.__version__, _cpu.jaxlib_headers)
    np.testing.assert_array_equal(jax.jit(jaxops.softmax)(jnp.zeros((1, 2))), [[0.5, 0.5]])


def test_the_distribution_requires_what_import_accepts():
    low, high = (".".join(map(str, bound)) for bound in _load.SUPPORTED)
    root = pathlib.Path(__file__).parents[2]
    dependencies = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"jax>={low},<{high}", f"jaxlib>={low},<{high}"} <= set(dependencies)


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_import_beside_a_future_version_is_refused(package, tmp_path):
    """By the import itself, in a fresh process, and without a trace in XLA."""
    script = f"""
import {package}, jax
{package}.__version__ = "0.13.0"
try:
    import jaxops
except ImportError as error:
    print("refused:", error)
print(jax.numpy.zeros(2).sum())
"""
    lines = python(script, tmp_path, JAX_PLATFORMS="cpu").splitlines()
    assert lines[0].startswith("refused: jaxops") and f"{package} 0.13.0 is installed" in lines[0]
    assert lines[1] == "0.0"


def test_nothing_is_registered_on_an_unsupported_version(monkeypatch):
    registered = []
    monkeypatch.setattr(_kernel, "register_handlers", lambda *args: registered.append(args))
    monkeypatch.setattr(jax, "__version__", "0.13.0")
    with pytest.raises(ImportError, match=r"jax 0\.13\.0 is installed"):
        _load.register()
    assert not registered


# --- the package ---


def test_version_is_that_of_the_distribution():
    try:
        installed = importlib.metadata.version("jaxops")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxops is imported from a folder, not installed")
    assert jaxops.__version__ == installed


def test_typing_marker_is_shipped():
    assert importlib.resources.files("jaxops").joinpath("py.typed").is_file()


def test_public_names():
    for name in jaxops.__all__:
        assert hasattr(jaxops, name)
    assert issubclass(jaxops.FallbackWarning, UserWarning)


# --- import ---


def test_import_initialises_no_backend(tmp_path):
    """The number of CPU devices can be set only before there is a backend."""
    script = """
import jax, jaxops
jax.config.update("jax_num_cpu_devices", 3)
print(len(jax.devices("cpu")))
"""
    assert python(script, tmp_path, JAX_PLATFORMS="cpu", XLA_FLAGS="").split() == ["3"]


def test_import_is_fast(tmp_path):
    """A fifth of the processor time that importing jax takes; twice that is tolerated."""
    script = """
import time
begin = time.process_time()
import jax
middle = time.process_time()
import jaxops
print((time.process_time() - middle) / (middle - begin))
"""
    assert min(float(python(script, tmp_path)) for _ in range(4)) < 2 * 0.2


def test_import_needs_no_optional_package(tmp_path):
    script = """
import sys, jaxops
print(sorted({"flax", "optax", "matplotlib", "rich"} & set(sys.modules)))
"""
    assert python(script, tmp_path).strip() == "[]"


# --- without handlers ---

FALLBACKS = {
    "softmax": (jaxops.softmax, jax.nn.softmax),
    "log_softmax": (jaxops.log_softmax, jax.nn.log_softmax),
    "layer_norm": (
        lambda x: jaxops.layer_norm(x, jnp.arange(1.0, 12.0), jnp.ones(11)),
        lambda x: (
            (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * jnp.arange(1.0, 12.0) + 1
        ),
    ),
    "rms_norm": (
        lambda x: jaxops.rms_norm(x, jnp.arange(1.0, 12.0)),
        lambda x: x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * jnp.arange(1.0, 12.0),
    ),
}


@pytest.fixture
def without_handlers(monkeypatch):
    """As if jaxops had been built without kernels for any platform."""
    jax.clear_caches()
    monkeypatch.setattr(_kernel, "HANDLERS", {})
    monkeypatch.setattr(_warnings, "_said", set())
    yield
    jax.clear_caches()


@pytest.mark.parametrize("op", FALLBACKS)
def test_without_handlers_calls_run_on_xla(op, without_handlers, rng):
    """Values, gradients and vmap; one warning a kernel."""
    ours, reference = FALLBACKS[op]
    weights = jnp.asarray(rng.standard_normal((5, 11)), jnp.float32)

    def both(f):
        return jax.jit(jax.vmap(jax.value_and_grad(lambda x: jnp.sum(weights * f(x)))))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (2, 3):
            x = jnp.asarray(rng.standard_normal((size, 5, 11)), jnp.float32)
            for got, wanted in zip(both(ours)(x), both(reference)(x), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)
    assert [w.category for w in caught] == [jaxops.FallbackWarning] * 2  # forward and backward
    messages = sorted(str(w.message) for w in caught)
    assert [m.split()[0] for m in messages] == [f"{op}_bwd", f"{op}_fwd"]
    assert all("built without kernels" in m for m in messages)


def test_without_handlers_matmul_runs_on_xla(without_handlers, on_gpu, rng):
    """On the CPU it does so anyway, without a warning."""
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((5, 6), (6, 13)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = jaxops.matmul(a, b, bias=jnp.ones(13), activation="relu", precision="highest")
    np.testing.assert_allclose(got, np.maximum(np.asarray(a) @ np.asarray(b) + 1, 0), rtol=1e-4, atol=1e-5)
    assert [w.category for w in caught] == [jaxops.FallbackWarning] * on_gpu

"""The package may not use the network or other programs when it runs; its build is pinned."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxops

SOURCES = sorted(Path(jaxops.__file__).parent.rglob("*.py"))
ROOT = Path(__file__).parents[2]

#: Networks, other programs, code from data.
FORBIDDEN_MODULES = {
    "asyncio",
    "dbm",
    "ftplib",
    "http",
    "marshal",
    "multiprocessing",
    "pickle",
    "requests",
    "shelve",
    "smtplib",
    "socket",
    "ssl",
    "subprocess",
    "urllib",
    "xmlrpc",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "numpy.load", "np.load"}


def name_of(node):
    """A dotted name, "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def forbidden(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [node.module] * (node.module.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call) and name_of(node.func) in FORBIDDEN_CALLS:
            found.append(name_of(node.func))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_sources(path):
    assert not forbidden(path.read_text())


def test_what_is_forbidden_is_found():
    source = "import pickle\nfrom urllib import request\nimport socket as s\nos.system('x')\neval('1')\nimport json\n"
    assert forbidden(source) == ["pickle", "urllib", "socket", "os.system", "eval"]


def test_run_time(tmp_path):
    """What Python audits: no connection, no pickle, no other program, no file written, while every op runs."""
    script = """
import sys
import jax, jax.numpy as jnp
jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x))))(jnp.ones((3, 3)))
seen = []
def hook(event, args):
    if event.split(".")[0] in ("socket", "pickle", "subprocess", "urllib", "http", "ftplib", "marshal") or event in (
        "os.system", "os.exec", "os.posix_spawn", "os.fork"
    ):
        if not (event == "marshal.loads" and sys._getframe(1).f_code.co_filename.startswith("<frozen importlib")):
            seen.append(event)
    elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append(f"open {args[0]}")
sys.addaudithook(hook)
import jaxops
x, v = jnp.ones((4, 6)), jnp.ones(6)
for op in (jaxops.softmax, jaxops.log_softmax, lambda x: jaxops.layer_norm(x, v, v), lambda x: jaxops.rms_norm(x, v),
           lambda x: jaxops.matmul(x, x.T)):
    jax.jit(jax.grad(lambda x: jnp.sum(op(x) ** 2)))(x)
print(seen)
"""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_build_requirements_are_pinned():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", requirement) for requirement in requires), requires

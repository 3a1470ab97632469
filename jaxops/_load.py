"""Loads the compiled halves, after checking that they can work with the installed jax and jaxlib."""

from __future__ import annotations

import re
from types import ModuleType

import jax
import jaxlib

from jaxops import _kernel
from jaxops._version import __version__

#: The supported jax and jaxlib versions: from the first, below the second.
SUPPORTED = ((0, 10), (0, 13))


def _parse(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def check_versions(jax_version: str, jaxlib_version: str, headers: str) -> None:
    """Raises ImportError unless handlers built with jaxlib `headers`' FFI headers run on the installed versions.

    XLA runs a handler if its own FFI is as new as the headers the handler was built with. A handler that is too new
    is not merely refused when called: registering it can disable JAX's whole CPU backend, hence the check.
    """
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    for name, version in (("jax", jax_version), ("jaxlib", jaxlib_version)):
        if not SUPPORTED[0] <= _parse(version) < SUPPORTED[1]:
            raise ImportError(
                f"jaxops {__version__} works with {name} >= {low} and < {high}, but {name} {version} is installed. "
                f"Install a supported one (pip install 'jax>={low},<{high}') or another version of jaxops."
            )
    if _parse(jaxlib_version) < _parse(headers):
        raise ImportError(
            f"this jaxops {__version__} was built with the headers of jaxlib {headers} and needs that version or a "
            f"newer one, but jaxlib {jaxlib_version} is installed. Update jaxlib (pip install 'jaxlib>={headers}'), "
            f"or build jaxops again with jaxlib {jaxlib_version} in the build environment."
        )


def _cuda_half() -> ModuleType | None:
    try:
        from jaxops import _cuda
    except ImportError as error:
        if getattr(error, "name", None) == "jaxops._cuda" or "cannot import name '_cuda'" in str(error):
            return None
        raise
    return _cuda


def register() -> None:
    """Registers the handlers in the halves that were built. Initialises no device."""
    try:
        from jaxops import _cpu
    except ImportError as error:
        raise ImportError(
            f"jaxops is not built here ({error}). In its source tree run `make build`; if it is installed (pip install "
            ".), start Python in another directory, as in this one the sources come first."
        ) from error
    check_versions(jax.__version__, jaxlib.__version__, _cpu.jaxlib_headers)
    _kernel.register_handlers("cpu", _cpu.targets())
    if (cuda := _cuda_half()) is not None:
        _kernel.register_handlers("cuda", cuda.targets())

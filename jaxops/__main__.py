"""`python -m jaxops`: versions, devices, handlers, and a check of the ops."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import jaxlib

import jaxops
from jaxops import _selfcheck
from jaxops._kernel import HANDLERS


def environment() -> dict[str, Any]:
    """Versions, the default device, and the parts of jaxops that this Python has."""
    device = jax.devices()[0]
    cuda = sys.modules.get("jaxops._cuda")
    return {
        "versions": {
            "jaxops": jaxops.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "location": str(Path(jaxops.__file__).parent),
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
        "handlers": {name: sorted(HANDLERS.get(name, ())) for name in ("cpu", "cuda")},
        "cuda_architectures": getattr(cuda, "cuda_architectures", None),
    }


def describe(here: dict[str, Any]) -> str:
    """The environment for people, a line for each entry."""
    device = here["device"]
    lines = {
        "versions": ", ".join(f"{name} {version}" for name, version in here["versions"].items()),
        "location": here["location"],
        "device": f"{device['count']} x {device['kind']} ({device['platform']})",
        **{f"{name} handlers": ", ".join(names) or "none" for name, names in here["handlers"].items()},
        "cuda architectures": here["cuda_architectures"] or "none: built without the GPU half",
    }
    return "\n".join(f"{name + ':':<20}{text}" for name, text in lines.items())


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxops",
        description="Prints versions, devices and handlers, and compares the ops with float64 on the default device.",
        epilog=f"Exit status: 0; 1 if an op errs by more than {_selfcheck.LIMIT:.0f} ulp; 2 for bad arguments.",
    )
    parser.add_argument("--quick", action="store_true", help="check one small shape of each op")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object and nothing else")
    options = parser.parse_args(arguments)

    here = environment()
    if not options.json:
        print(describe(here))
        print(f"\n{'op':<28}{'dtype':<10}{'value':>8}{'gradient':>10}   (errors in ulp of the largest element)")
    checks = []
    for check in _selfcheck.run(options.quick):
        checks.append(check)
        if not options.json:
            errors = f"{check.value_error_ulp:8.2f}{check.gradient_error_ulp:10.2f}"
            print(f"{check.op:<28}{check.dtype:<10}{errors}   {'ok' if check.passed else 'WRONG'}", flush=True)
    if options.json:
        finite = [
            {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
            for row in ({**dataclasses.asdict(check), "passed": check.passed} for check in checks)
        ]
        print(json.dumps({**here, "checks": finite}, allow_nan=False))
    wrong = [check for check in checks if not check.passed]
    for check in wrong:
        print(
            f"python -m jaxops: {check.op} in {check.dtype} errs by {check.value_error_ulp:.3g} ulp (gradients: "
            f"{check.gradient_error_ulp:.3g}); at most {_selfcheck.LIMIT:.0f} are allowed",
            file=sys.stderr,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Prints requirements from pyproject.toml, so that they stand in one place: `requirements.py build demo test headers`.

runtime: jaxops' dependencies, in the supported versions; build: the build requirements except jaxlib; headers: the
jaxlib that provides the FFI headers; any other word: the optional dependencies of that name.
"""

import pathlib
import re
import sys
import tomllib


def requirements(project: dict, group: str) -> list[str]:
    """The requirements of one group, groups that it includes resolved."""
    needed = project["build-system"]["requires"]
    if group == "runtime":
        return project["project"]["dependencies"]
    if group == "build":
        return [name for name in needed if not name.startswith("jaxlib")]
    if group == "headers":
        return [name for name in needed if name.startswith("jaxlib")]
    found = []
    for requirement in project["project"]["optional-dependencies"][group]:
        included = re.fullmatch(r"jaxops\[(\w+)\]", requirement)
        found += requirements(project, included[1]) if included else [requirement]
    return found


if __name__ == "__main__":
    pyproject = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())
    print(*(requirement for group in sys.argv[1:] for requirement in requirements(pyproject, group)))

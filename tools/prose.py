"""Checks the English of documentation and comments, and counts the habits that make it hard to read.

`python tools/prose.py` fails if an enforced file has one of `HABITS`, or if a group of files exceeds its limit of words
per 1000. `--counts` prints the counts instead. A line with the comment `prose: ok` is an exception.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: The files that must be clean.
ENFORCED = (
    *("*.md", "docs/**/*.md", "tests/*.md", ".github/**/*.md"),
    *("jaxops/flax/linen/*.py", "jaxops/ops/*norm.py", "jaxops/ops/*softmax.py", "jaxops/ops/matmul.py"),
    *("tools/*.py", "tests/support/*.py", "benchmarks/demo/*.py", "examples/*.py"),
    *(f"{folder}/**/*.{suffix}" for folder in ("ffi", "tests/emulator") for suffix in ("h", "cc", "cu", "cuh")),
)
#: The groups that `--counts` prints, and how many of a word they may have per 1000 words; None: not limited.
GROUPS: dict[str, tuple[tuple[str, ...], dict[str, float] | None]] = {
    "README": (("README.md",), {"of": 25, "what": 2}),
    "docs": (("docs/**/*.md", "CONTRIBUTING.md", "tests/README.md"), {"of": 26, "what": 2}),
    "CHANGELOG": (("CHANGELOG.md",), {"of": 28, "what": 2}),
    "C++ comments": (("ffi/**/*.h", "ffi/**/*.cc", "ffi/**/*.cu", "ffi/**/*.cuh"), {"of": 16, "what": 1}),
    "Python docstrings and comments": (
        ("jaxops/**/*.py", "tests/**/*.py", "benchmarks/*.py", "tools/*.py"),
        {"of": 25, "what": 2},
    ),
}
COUNTED = ("of", "what", "those", "which")

HABITS = {
    r"(?:of|and|but|for|from|in|with|by|on|than|as|plus) what(?!ever)": "name the thing",
    r"[.:;] what [^.?:]*[.:]": "name the thing; a sentence begins with its subject",
    r"what(?:ever)? (?:is|was|are|were|can|may) (?:\w+ )?(?:is|was|are|were)": "name the thing",
    r"(?:those|that) of": "repeat the noun",
    r"those (?:that|which|with|where|over|in|on|not)": "repeat the noun",
    r"(?:of|by|in) (?:its|their) own(?! \w)": "say 'its own X'",
    r"but for": "say 'except'",
    r"(?:of|in|with|by|to|from|for) whom?(?:se)?": "start a new sentence",
    r"of which": "start a new sentence",
    r"not so (?:in|for|with|where)": "a sentence has a verb",
    r"[.:;] (?:both|the same|likewise) (?:with|in|for|without)": "a sentence has a verb",
    r"(?:if|where|when) there (?:is|are) (?:one|none|any)": "name the thing",
}
PATTERN = re.compile("|".join(rf"(\b{habit}(?!\w))" for habit in HABITS).replace(" ", r"\s+"), re.IGNORECASE)


def markdown(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a page without its code blocks."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.startswith("```")
        if not code and not line.startswith(("```", "#", "<!--", ":::")):
            yield number, line


def python(text: str) -> Iterator[tuple[int, str]]:
    """The lines of docstrings, without their examples, and of comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            string = node.body[0].value
            for number, line in enumerate(string.value.splitlines(), string.lineno):
                if not line.lstrip().startswith((">>>", "...")):
                    yield number, line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (ruff|type|noqa|fmt)\b", token.string):
            yield token.start[0], token.string.lstrip("#: ")


def cxx(text: str) -> Iterator[tuple[int, str]]:
    """The lines of comments."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.search(r"(?:^|\s)//+\s?(.*)", line):
            yield number, found[1]


def prose(path: Path) -> list[tuple[int, str]]:
    """Numbered lines of a file's prose; inline code and links' targets, which are not words, are dropped."""
    read = {".md": markdown, ".py": python}.get(path.suffix, cxx)
    found = sorted(set(read(path.read_text())))
    return [(n, re.sub(r"`[^`]*`|\]\([^)]*\)", "CODE", line.strip())) for n, line in found if "prose: ok" not in line]


def paths(patterns: tuple[str, ...]) -> list[Path]:
    """The files that match."""
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def habits(path: Path) -> Iterator[str]:
    """A line for each habit found. A habit may run over the end of a line, not of a paragraph."""
    lines = prose(path)
    text = "".join(f"{line or '.'}\n" for _, line in lines)
    for found in PATTERN.finditer(text):
        number = lines[min(text[: found.start()].count("\n"), len(lines) - 1)][0]
        advice = list(HABITS.values())[found.lastindex - 1]
        yield f"{path.relative_to(ROOT)}:{number}: {' '.join(found[0].split())[:60]!r}: {advice}"


def rates(files: list[Path]) -> tuple[int, dict[str, float]]:
    """How many words, and how many of each counted one per 1000 words."""
    words = re.findall(r"[a-z]+", " ".join(line for path in files for _, line in prose(path)).lower())
    count = collections.Counter(words)
    return len(words), {word: 1000 * count[word] / max(len(words), 1) for word in COUNTED}


def main() -> int:
    """Checks or counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", action="store_true", help="print words per 1000 and habits of each group, and stop")
    parser.add_argument("files", nargs="*", type=Path, help="check these instead of the enforced ones")
    options = parser.parse_args()
    failures = [
        line for path in options.files or paths(ENFORCED) for line in (() if options.counts else habits(path.resolve()))
    ]
    for name, (patterns, limits) in GROUPS.items():
        total, rate = rates(paths(patterns))
        if options.counts:
            found = sum(len(list(habits(path))) for path in paths(patterns))
            words = ", ".join(f"{word} {rate[word]:.1f}" for word in COUNTED)
            print(f"{name}: {total} words; per 1000: {words}; habits {1000 * found / max(total, 1):.1f}")
        elif limits and not options.files:
            failures += [
                f"{name}: {rate[word]:.1f} times {word!r} per 1000 words, at most {limit} are allowed"
                for word, limit in limits.items()
                if rate[word] > limit
            ]
    print("\n".join(failures), end="\n" if failures else "")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

"""The communication in compiled programs."""

from __future__ import annotations

import math
import re
from collections import Counter

_KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"


def collectives(compiled) -> Counter:
    """How many arrays of how many elements (those of one device's result) each kind of operation communicates."""
    found: Counter = Counter()
    for result, kind, start in re.findall(rf"= (.*?) ({_KINDS})(-start)?\(", compiled.as_text()):
        sizes = [math.prod(int(d) for d in dims.split(",") if d) for dims in re.findall(r"\w+\[([\d,]*)\]", result)]
        if start and kind != "all-reduce":  # operands and results
            sizes = sizes[len(sizes) // 2 :]
        found.update((kind, size) for size in sizes)
    return found


def by_kind(found: Counter) -> dict[str, int]:
    """How many elements each kind of operation communicates."""
    total: Counter = Counter()
    for (kind, size), count in found.items():
        total[kind] += size * count
    return dict(total)

"""The communication in compiled programs."""

from __future__ import annotations

import math
import re
from collections import Counter

_KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"


def collectives(compiled) -> Counter:
    """Counts communicated arrays by the operation's kind and by elements in one device's result."""
    found: Counter = Counter()
    for result, kind, start in re.findall(rf"= (.*?) ({_KINDS})(-start)?\(", compiled.as_text()):
        if result.startswith("(("):  # from an asynchronous start: ((operands), results)
            result = result[result.index(")") :]
        elif start and kind != "all-reduce":  # (operand, result)
            result = result[result.index(",", result.index("]")) :]
        sizes = re.findall(r"\b(?:[fb]\w*|[su]\d+)\[([\d,]*)\]", result)
        found.update((kind, math.prod(int(d) for d in dims.split(",") if d)) for dims in sizes)
    return found


def by_kind(found: Counter) -> dict[str, int]:
    """How many elements each operation kind communicates."""
    total: Counter = Counter()
    for (kind, size), count in found.items():
        total[kind] += size * count
    return dict(total)

"""Fewer cases than the product of several lists, for options that do not depend on one another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Tuples with one value from each list, in which every two values from different lists meet at least once.

    The tuples are the same in every run. Each is the first tuple that brings the most new pairs.
    """
    rows = list(itertools.product(*(range(len(values)) for values in lists)))  # values need not be hashable
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        row = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[row]
        chosen.append(row)
    return [tuple(values[i] for values, i in zip(lists, row, strict=True)) for row in sorted(chosen)]

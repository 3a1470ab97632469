"""The report of `fuse`: the parts on jaxops, their share in the program, and near misses."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

from jaxops._explain import array_type, quantity
from jaxops._fuse._graph import Node, inner_jaxprs
from jaxops._fuse._match import Match
from jaxops._fuse._rules import Miss


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A part of the program that runs on jaxops.

    Attributes:
      op: jaxops' function.
      operands: the operands' shapes and dtypes, such as `bf16[8,128]`.
      result: the result's shape and dtype.
      note: the match's other parts, such as "with scale and bias".
      line: where the model computes it.
      scope: the `jax.named_scope` names around it.
      times: how often a function call runs it; None if a `while` loop decides.
      flops: multiplications and additions in its products, for one run.
      bytes: bytes that its equations read and write if each runs alone.
    """

    op: str
    operands: tuple[str, ...]
    result: str
    note: str
    line: str
    scope: str
    times: int | None
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A part that looks like a jaxops op and stays XLA's.

    Attributes:
      what: the op that it resembles.
      why: why it is not replaced.
      line: where the model computes it.
      scope: the `jax.named_scope` names around it.
      times: how often a function call runs it; None if a `while` loop decides.
    """

    what: str
    why: str
    line: str
    scope: str
    times: int | None


@dataclasses.dataclass(frozen=True)
class FuseReport:
    """The report of :func:`jaxops.fuse` for a function; prints as a table.

    Attributes:
      replaced: the parts that run on jaxops, in the order found.
      near_misses: parts that resemble an op but stay with XLA, with the reason.
      left: how many operations stay XLA's, by kind, each counted where it stands, not how often it runs.
      flops: multiplications and additions in the matrix products that run on jaxops, and in all.
      bytes: bytes that the replaced equations, and all equations, read and write if each runs alone.
    """

    replaced: tuple[Replacement, ...]
    near_misses: tuple[NearMiss, ...]
    left: dict[str, int]
    flops: tuple[int, int]
    bytes: tuple[int, int]

    @property
    def counts(self) -> dict[str, int]:
        """How often each op was found, counted where it stands."""
        return dict(collections.Counter(found.op for found in self.replaced))

    def __str__(self) -> str:
        counted = ", ".join(f"{n} {op}" for op, n in self.counts.items()) or "nothing"
        shares = [
            f"{_share(part, whole)} of {quantity(whole)}{unit}"
            for (part, whole), unit in ((self.flops, "FLOP"), (self.bytes, "B"))
        ]
        lines = [f"{counted} on jaxops: {' of products, '.join(shares)} that the equations move one by one"]
        rows = [
            (found.op, found.times, f"{' '.join(found.operands)} -> {found.result}", found.note, found.line)
            for found in self.replaced
        ]
        lines += _table(rows)
        if self.near_misses:
            lines.append(f"{len(self.near_misses)} near misses, which stay XLA's:")
            lines += _table([(miss.what, miss.times, miss.why, "", miss.line) for miss in self.near_misses])
        if self.left:
            most = sorted(self.left.items(), key=lambda item: -item[1])
            lines.append("XLA's: " + ", ".join(f"{n} {name}" for name, n in most))
        return "\n".join(lines)

    __repr__ = __str__


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _table(rows: list[tuple[str, int | None, str, str, str]]) -> list[str]:
    """Equal rows are one, with how often they run."""
    counts: dict[tuple[str, ...], int | None] = {}
    for name, times, *rest in rows:
        key = (name, *rest)
        before = counts.get(key, 0)
        counts[key] = None if times is None or before is None else before + times
    shown = [(name, "loop" if times is None else f"x{times}", *rest) for (name, *rest), times in counts.items()]
    widths = [max(len(row[i]) for row in shown) for i in range(5)] if shown else []
    return ["  " + "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in shown]


def _flops(node: Node) -> int:
    if node.name == "dot_general":
        (lhs, _), (contracted, _) = node.inputs, node.params["dimension_numbers"][0]
        return 2 * math.prod(node.avals[0].shape) * math.prod(lhs.shape[a] for a in contracted)
    if node.name == "conv_general_dilated":
        kernel, out_features = node.inputs[1].shape, node.params["dimension_numbers"].rhs_spec[0]
        return 2 * math.prod(node.avals[0].shape) * math.prod(kernel) // max(kernel[out_features], 1)
    return 0


def _bytes(node: Node) -> int:
    avals = [*(value.aval for value in node.inputs if value.number() is None), *node.avals]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals if hasattr(a, "shape"))


#: Equations that move and compute next to nothing, or that XLA joins to their neighbours: not worth a line.
_UNCOUNTED = frozenset(
    [
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "expand_dims",
        "convert_element_type",
        "copy",
        "stop_gradient",
        "iota",
        "select_n",
    ]
)


class Found:
    """Collects the entries of a program and the programs in it; sums of work count how often each runs."""

    def __init__(self):
        self.replaced: list[Replacement] = []
        self.near_misses: list[NearMiss] = []
        self.left: collections.Counter[str] = collections.Counter()
        self.flops, self.bytes = [0, 0], [0, 0]

    def add(self, item: Match | Miss) -> None:
        """A match or a near miss in the program itself."""
        if isinstance(item, Miss):
            self.near_misses.append(NearMiss(item.what, item.why, item.node.line, str(item.node.names), 1))
            return
        node = item.out.node
        flops, moved = (sum(map(count, item.nodes)) for count in (_flops, _bytes))
        operands = tuple(array_type(value.aval) for value in item.operands)
        self.replaced.append(
            Replacement(
                item.op, operands, array_type(item.out.aval), item.note, node.line, str(node.names), 1, flops, moved
            )
        )
        self._add_work(flops, moved, by_jaxops=True)

    def add_node(self, node: Node, inner: Found) -> None:
        """An equation that stays, and the parts found inside it."""
        if next(inner_jaxprs(node.params), None) is not None:
            self.include(inner)
            return
        self._add_work(_flops(node), _bytes(node), by_jaxops=False)
        if node.name not in _UNCOUNTED:
            self.left[node.name] += 1

    def _add_work(self, flops: int, moved: int, by_jaxops: bool) -> None:
        for total, amount in ((self.flops, flops), (self.bytes, moved)):
            total[0] += amount * by_jaxops
            total[1] += amount

    def include(self, inner: Found) -> None:
        self.replaced += inner.replaced
        self.near_misses += inner.near_misses
        self.left.update(inner.left)
        self._sum(inner, 1)

    def _sum(self, inner: Found, times: int) -> None:
        for mine, theirs in ((self.flops, inner.flops), (self.bytes, inner.bytes)):
            for i in (0, 1):
                mine[i] += times * theirs[i]

    def repeat(self, times: int | None) -> None:
        """All entries run so often; None: a loop decides, and sums count it once."""

        def repeated(item: Any) -> Any:
            known = times is not None and item.times is not None
            return dataclasses.replace(item, times=times * item.times if known else None)

        self.replaced = [repeated(item) for item in self.replaced]
        self.near_misses = [repeated(item) for item in self.near_misses]
        for total in (self.flops, self.bytes):
            total[:] = [amount * (1 if times is None else times) for amount in total]

    def report(self) -> FuseReport:
        """The report that the user gets."""
        return FuseReport(
            tuple(self.replaced), tuple(self.near_misses), dict(self.left), tuple(self.flops), tuple(self.bytes)
        )

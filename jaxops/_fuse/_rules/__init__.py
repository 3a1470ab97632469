"""The rules, the most far-reaching first: a node that one takes is lost to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxops._fuse._cone import Refusal
from jaxops._fuse._graph import Node
from jaxops._fuse._match import Match, Search
from jaxops._fuse._rules import _attention, _linear_losses, _losses, _norms, _products, _residuals, _softmaxes


class Rule(NamedTuple):
    """One family: the ops that it finds, the primitives at which it looks, and its near misses."""

    ops: tuple[str, ...]
    anchors: frozenset[str]
    find: Callable[[Search, Node], Match | None]
    is_near: Callable[[Node], str | None]


def _never_near(node: Node) -> str | None:
    """For rules that share parts with others: without this op, another rule finds a part of the match."""
    del node
    return None


RULES = (
    Rule((_attention.OP,), _attention.ANCHORS, _attention.find, _attention.is_near),
    Rule((_linear_losses.OP,), _linear_losses.ANCHORS, _linear_losses.find, _never_near),
    Rule((_losses.OP,), _losses.ANCHORS, _losses.find, _losses.is_near),
    Rule(("layer_norm", "rms_norm"), _norms.ANCHORS, _norms.find, _norms.is_near),
    Rule(("softmax", "log_softmax"), _softmaxes.ANCHORS, _softmaxes.find, _softmaxes.is_near),
    Rule((_products.WHOLE,), _products.ANCHORS, _products.find_gated_mlp, _never_near),
    Rule((_products.GATED,), _products.ANCHORS, _products.find_gated, _never_near),
    Rule((_products.WITH_EPILOGUE,), _products.ANCHORS, _products.find_with_epilogue, _never_near),
    Rule((_products.OP,), _products.ANCHORS, _products.find, _products.is_near),
)

#: The ops that `only` may name.
OPS = tuple(op for rule in RULES for op in rule.ops)


class Miss(NamedTuple):
    """A part that looks like a jaxops op, and why it is none."""

    what: str
    node: Node
    why: str


def search(within: Search, only: frozenset[str], joins: bool = True) -> list[Match | Miss]:
    """A graph's matches, which share no node, and the near misses.

    joins: norms may have the sums that they normalise as a second result.
    """
    matches: list[Match] = []
    refused: list[tuple[Node, int, str]] = []
    taken: dict[Node, int] = {}  # by which rule
    for i, rule in enumerate(RULES):
        if not only & set(rule.ops):
            continue
        for node in within.graph.live:
            if node.name not in rule.anchors or node in within.taken:
                continue
            try:
                match = rule.find(within, node)
                if match is not None and match.op not in only:
                    continue
                if match is not None and not within.taken.isdisjoint(match.nodes):
                    raise Refusal("a part of it is in another match")
            except Refusal as why:
                refused.append((node, i, str(why)))
                continue
            if match is not None:
                within.taken.update(match.nodes)
                taken.update(dict.fromkeys(match.nodes, i))
                matches.append(match)
    misses, told = [], set()
    for node, i, why in refused:
        # If it is no attention, its softmax is still a near miss.
        if node in taken and (i >= taken[node] or "softmax" not in RULES[taken[node]].ops):
            continue
        if node not in told and (what := RULES[i].is_near(node)):
            told.add(node)
            misses.append(Miss(what, node, why))
    return [*(_residuals.joined(within.graph, matches) if joins else matches), *misses]

"""Strategies that an operator may get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy

Cuts = tuple[tuple[str, int], ...]
"""Letters with their numbers of slices, outermost first; without letters that are not cut."""

Dims = Mapping[str, int]
"""The dim of the model that each letter of an operator denotes, numbered in order of occurrence."""


def dims_of_model(graph: OpGraph, rules: Sequence[OpRule | None]) -> tuple[Dims, ...]:
    """Returns the dims of the model for each node.

    Letters of two operators are the same dim of the model if they stand for the same dim of a value.
    """
    groups = DisjointSets()
    for at, (node, rule) in enumerate(zip(graph.nodes, rules, strict=True)):
        if rule is None:
            continue
        both = [*zip(node.ins, rule.ins, strict=True), *zip(node.outs, rule.outs, strict=True)]
        for v, letters in both:
            for d, letter in enumerate(letters):
                if letter:
                    groups.join(("value", v, d), ("node", at, letter))

    # numbered in the order of inputs, then of operators
    numbers: dict[object, int] = {}
    for v in graph.inputs:
        for d in range(len(graph.values[v].shape)):
            numbers.setdefault(groups.root(("value", v, d)), len(numbers))
    out = []
    for at, rule in enumerate(rules):
        named = () if rule is None else dict.fromkeys(x for t in (*rule.ins, *rule.outs) for x in t if x)
        out.append({x: numbers.setdefault(groups.root(("node", at, x)), len(numbers)) for x in named})
    return tuple(out)


class DisjointSets:
    """Disjoint sets (union-find); ``join`` keeps the root of its first argument."""

    def __init__(self) -> None:
        self.up: dict[object, object] = {}

    def root(self, x: object) -> object:
        while self.up.setdefault(x, x) != x:
            self.up[x] = self.up[self.up[x]]
            x = self.up[x]
        return x

    def join(self, a: object, b: object) -> None:
        self.up[self.root(b)] = self.root(a)


def ordered(rule: OpRule, dims: Dims) -> tuple[tuple[str, int], ...]:
    """Returns letters and their sizes in the order of the dims of the model, outermost first."""
    return tuple(sorted(((x, n) for x, n in rule.sizes if n > 1), key=lambda item: dims[item[0]]))


@lru_cache(maxsize=1 << 12)
def candidate_cuts(
    letters: tuple[tuple[str, int], ...], ranks: int, bounds: frozenset[int] | None = None
) -> tuple[Cuts, ...]:
    """Returns every way to assign factors of ``ranks`` to letters, outermost first; the rest repeats.

    ``bounds``: if set, products of slices from the outermost letter on must be among these numbers, which
    are products of the first axes of a device matrix.
    """
    out: list[Cuts] = []

    def go(at: int, used: int, cuts: Cuts) -> None:
        if at == len(letters):
            out.append(cuts)
            return
        letter, size = letters[at]
        for n in _divisors(ranks // used):
            if size % n == 0 and (n == 1 or bounds is None or used * n in bounds):
                go(at + 1, used * n, (*cuts, (letter, n)) if n > 1 else cuts)

    go(0, 1, ())
    return tuple(out)


@lru_cache(maxsize=1 << 14)
def strategy(cuts: Cuts, ranks: int) -> OpStrategy:
    """Returns the strategy with these slices of letters, outermost first; the rest of the ranks repeats."""
    replicas = ranks // prod(n for _, n in cuts)
    matrix = (*(n for _, n in cuts), *((replicas,) if replicas > 1 or not cuts else ()))
    return OpStrategy(matrix, tuple((x, (i,)) for i, (x, _) in enumerate(cuts)))


def followed(source: OpStrategy, source_dims: Dims, rule: OpRule, dims: Dims) -> OpStrategy:
    """Returns a strategy that cuts common dims of both operators as ``source`` does, where slices divide."""
    axes = {source_dims[x]: axes for x, axes in source.axes}
    kept = []
    used: set[int] = set()
    for x, n in ordered(rule, dims):
        mine = axes.get(dims[x], ())
        if mine and not used & set(mine) and n % prod(source.matrix[a] for a in mine) == 0:
            kept.append((x, mine))
            used.update(mine)
    return OpStrategy(source.matrix, tuple(kept))


@lru_cache(maxsize=1 << 10)
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)

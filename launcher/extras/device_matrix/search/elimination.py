"""Variable elimination: the cheapest states of many variables, with costs in tables over a few of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

LIMIT = 1 << 22
"""The largest table for the elimination of one variable; to stay below it, the worst states are dropped."""


@dataclass(frozen=True, eq=False)
class Table:
    """A table of ``costs`` with one axis per variable. Tables with the same ``key`` are equal."""

    key: int
    costs: Array


@dataclass(frozen=True)
class Scoped:
    """A table and the variables of its axes, in ascending order."""

    scope: tuple[int, ...]
    table: Table


@dataclass(frozen=True)
class _Step:
    """The elimination of a variable: its best state for each state of ``others``."""

    variable: int
    others: tuple[int, ...]
    best: Array


class Eliminator:
    """Variable elimination that computes equal tables once, so that equal layers of a model cost little.

    ``steps``: the number of tables that were computed. ``reused``: the number of tables found in the cache.
    ``dropped``: the number of states that were dropped to keep tables small.
    """

    def __init__(self) -> None:
        self.steps = self.reused = 0
        self.dropped = 0
        self._keys: dict[object, int] = {}
        self._joined: dict[object, tuple[Table, Array]] = {}
        self._cut: dict[object, Table] = {}

    def table(self, key: object, costs: Array) -> Table:
        """Returns a table; ``key`` identifies the origin of its costs: tables with equal keys are equal."""
        return Table(self._keys.setdefault(key, len(self._keys)), costs)

    def solve(self, sizes: Sequence[int], tables: Iterable[Scoped]) -> list[int]:
        """Returns the best state of each variable; the first one of equally good states.

        The result is exact as long as tables stay below ``LIMIT``.
        """
        run = _Run(self, sizes, tables)
        done = [run.eliminate(x) for x in run.order()]
        states = [0] * len(sizes)
        for step in reversed(done):
            states[step.variable] = int(step.best[tuple(states[o] for o in step.others)])
        return [run.names[x][s] for x, s in enumerate(states)]

    def join(self, parts: Sequence[Scoped], variable: int, sizes: Sequence[int]) -> tuple[Scoped, _Step]:
        """Returns the sum of ``parts`` at the best state of ``variable``, and the step that eliminates it."""
        scope = sorted({x for part in parts for x in part.scope} | {variable})
        at = {x: i for i, x in enumerate(scope)}
        order = sorted(parts, key=lambda p: ([at[x] for x in p.scope], p.table.key))
        key = (at[variable], tuple((p.table.key, tuple(at[x] for x in p.scope)) for p in order))
        if key in self._joined:
            self.reused += 1
        else:
            self.steps += 1
            total = np.zeros([sizes[x] for x in scope])
            for p in order:
                total += p.table.costs.reshape([sizes[x] if x in p.scope else 1 for x in scope])
            reduced = self.table(key, total.min(axis=at[variable]))
            self._joined[key] = reduced, total.argmin(axis=at[variable]).astype(np.int16)
        table, best = self._joined[key]
        others = tuple(x for x in scope if x != variable)
        return Scoped(others, table), _Step(variable, others, best)

    def cut(self, table: Table, axis: int, kept: tuple[int, ...]) -> Table:
        """Returns ``table`` with only the states ``kept`` of one axis."""
        key = ("cut", table.key, axis, kept)
        if key not in self._cut:
            self._cut[key] = self.table(key, np.take(table.costs, kept, axis=axis))
        return self._cut[key]


class _Run:
    """One elimination of all variables."""

    def __init__(self, shared: Eliminator, sizes: Sequence[int], tables: Iterable[Scoped]) -> None:
        self.shared = shared
        self.sizes = list(sizes)
        self.names = [list(range(n)) for n in sizes]
        self.of: list[dict[int, Scoped]] = [{} for _ in sizes]
        self.near: list[set[int]] = [set() for _ in sizes]
        self.round = [0] * len(sizes)
        self.count = 0
        for scoped in tables:
            self._add(scoped)

    def _add(self, scoped: Scoped) -> None:
        for x in scoped.scope:
            self.of[x][self.count] = scoped
            self.near[x].update(scoped.scope)
            self.near[x].discard(x)
        self.count += 1

    def _priority(self, x: int) -> tuple[int, int, int]:
        """Returns the priority of variable ``x``: the size of its table, then the number of earlier joins.

        Fewer earlier joins come first, so that a chain of equal layers halves in each round and its tables
        stay equal.
        """
        return self.sizes[x] * prod(self.sizes[y] for y in self.near[x]), self.round[x], x

    def order(self) -> Iterable[int]:
        waiting = [self._priority(x) for x in range(len(self.sizes))]
        heapq.heapify(waiting)
        gone: set[int] = set()
        while waiting:
            entry = heapq.heappop(waiting)
            x = entry[2]
            if x in gone or entry != self._priority(x):
                continue
            near = sorted(self.near[x])
            yield x
            gone.add(x)
            for y in near:
                heapq.heappush(waiting, self._priority(y))

    def eliminate(self, x: int) -> _Step:
        near = sorted(self.near[x])
        self._shrink((x, *near))
        parts = list(self.of[x].items())
        reduced, step = self.shared.join([p for _, p in parts], x, self.sizes)

        # the tables that contained it are replaced by the joined one
        for n, part in parts:
            for y in part.scope:
                del self.of[y][n]
        for y in near:
            self.near[y].discard(x)
            self.round[y] = max(self.round[y], self.round[x] + 1)
        if reduced.scope:
            self._add(reduced)
        return step

    def _shrink(self, scope: tuple[int, ...]) -> None:
        """Drops the worst states until a table over ``scope`` is not larger than ``LIMIT``."""
        while prod(self.sizes[x] for x in scope) > LIMIT:
            x = max(scope, key=lambda x: (self.sizes[x], x))
            hopes = sum(
                part.table.costs.min(axis=tuple(i for i, y in enumerate(part.scope) if y != x))
                for part in self.of[x].values()
            )
            kept = tuple(sorted(np.argsort(hopes, kind="stable")[: max(1, self.sizes[x] * 3 // 4)].tolist()))
            self.shared.dropped += self.sizes[x] - len(kept)
            self.names[x] = [self.names[x][k] for k in kept]
            self.sizes[x] = len(kept)
            for n, part in list(self.of[x].items()):
                cut = Scoped(part.scope, self.shared.cut(part.table, part.scope.index(x), kept))
                for y in part.scope:
                    self.of[y][n] = cut

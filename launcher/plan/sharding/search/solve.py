"""One search among the states of menus, by elimination of the tables of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.plan.sharding.op_rule import OpStrategy
from launcher.plan.sharding.search.tables import Priced, Pricer
from launcher.plan.sharding.search.variables import State, Variables

Menus = Sequence[tuple[State, ...]]
"""The states that each variable may have."""


@dataclass(frozen=True)
class Choice:
    """One state for each variable, at ``places`` of the menus, with seconds of a step and bytes on a rank."""

    states: tuple[State, ...]
    places: tuple[int, ...]
    seconds: float
    memory: float

    def strategies(self, variables: Variables) -> tuple[OpStrategy, ...]:
        found: list[OpStrategy] = [OpStrategy((1,))] * len(variables.of)
        for variable, state in zip(variables.all, self.states, strict=True):
            for at, strategy in zip(variable.members, state, strict=True):
                found[at] = strategy
        return tuple(found)


@dataclass(frozen=True)
class Search:
    """A search among ``menus``; ``priced``: their tables of costs."""

    pricer: Pricer
    menus: Menus
    priced: Sequence[Priced]

    def cheapest(self, byte: float = 0.0, second: float = 1.0) -> Choice:
        """Returns the choice with the lowest sum of ``second`` per second and ``byte`` per byte on a rank."""
        scoped = self.pricer.scoped(self.priced, second, byte)
        return self.at(self.pricer.shared.solve([len(m) for m in self.menus], scoped))

    def at(self, picked: Sequence[int]) -> Choice:
        """Returns the choice of these places in the menus."""
        states = tuple(menu[i] for menu, i in zip(self.menus, picked, strict=True))
        seconds = memory = 0.0
        for p in self.priced:
            place = tuple(picked[x] for x in p.scope)
            seconds += p.weight * float(p.seconds[place])
            memory += p.weight * float(p.memory[place])
        return Choice(states, tuple(picked), seconds, memory)

    def swapped(self, found: Choice, limit: float) -> Choice:
        """Improves ``found``: each variable in turn gets its cheapest state that still fits, twice."""
        tables: list[list[Priced]] = [[] for _ in self.menus]
        for p in self.priced:
            for x in p.scope:
                tables[x].append(p)
        places, room = list(found.places), limit - found.memory
        for x in [*range(len(places)), *range(len(places))]:
            seconds, memory = np.zeros(len(self.menus[x])), np.zeros(len(self.menus[x]))
            for p in tables[x]:
                row = tuple(slice(None) if y == x else places[y] for y in p.scope)
                seconds += p.weight * p.seconds[row]
                memory += p.weight * p.memory[row]
            fits = memory - memory[places[x]] <= room
            best = int(np.where(fits, seconds, np.inf).argmin())
            if seconds[best] < seconds[places[x]]:
                room -= memory[best] - memory[places[x]]
                places[x] = best
        return self.at(places)


def search(pricer: Pricer, variables: Variables, menus: Menus) -> Search:
    aligned: list[tuple[OpStrategy, ...]] = [()] * len(variables.of)
    for variable, menu in zip(variables.all, menus, strict=True):
        columns = pricer.columns(menu)
        for place, at in enumerate(variable.members):
            aligned[at] = columns[place]
    return Search(pricer, menus, pricer.priced(pricer.kinds(aligned), variables.of))

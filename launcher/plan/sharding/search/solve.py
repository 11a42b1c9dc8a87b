"""One search among given states: the tables of a graph, eliminated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.plan.sharding.cost import Cost, graph_cost
from launcher.plan.sharding.op_rule import OpStrategy
from launcher.plan.sharding.search.tables import Priced, Pricer
from launcher.plan.sharding.search.variables import State, Variables

Menus = Sequence[tuple[State, ...]]
"""Of each variable the states that it may have."""


@dataclass(frozen=True)
class Choice:
    """A state of each variable, and what the graph costs."""

    states: tuple[State, ...]
    cost: Cost

    def strategies(self, variables: Variables) -> tuple[OpStrategy, ...]:
        found: list[OpStrategy] = [OpStrategy((1,))] * len(variables.of)
        for variable, state in zip(variables.all, self.states, strict=True):
            for at, strategy in zip(variable.members, state, strict=True):
                found[at] = strategy
        return tuple(found)


@dataclass(frozen=True)
class Search:
    """``priced``: the tables of ``menus``."""

    pricer: Pricer
    variables: Variables
    menus: Menus
    priced: Sequence[Priced]

    def cheapest(self, byte: float = 0.0, second: float = 1.0) -> Choice:
        """By seconds, and bytes on a rank that count ``byte`` seconds each."""
        scoped = self.pricer.scoped(self.priced, second, byte)
        picked = self.pricer.shared.solve([len(m) for m in self.menus], scoped)
        states = tuple(menu[i] for menu, i in zip(self.menus, picked, strict=True))
        return choice(self.pricer, self.variables, states)


def search(pricer: Pricer, variables: Variables, menus: Menus) -> Search:
    aligned: list[tuple[OpStrategy, ...]] = [()] * len(variables.of)
    for variable, menu in zip(variables.all, menus, strict=True):
        columns = pricer.columns(menu)
        for place, at in enumerate(variable.members):
            aligned[at] = columns[place]
    return Search(pricer, variables, menus, pricer.priced(pricer.kinds(aligned), variables.of))


def choice(pricer: Pricer, variables: Variables, states: tuple[State, ...]) -> Choice:
    """What it truly costs."""
    found = Choice(states, Cost())
    strategies = found.strategies(variables)
    cost = graph_cost(pricer.graph, pricer.rules, strategies, pricer.model, pricer.layouts)
    return Choice(states, cost)

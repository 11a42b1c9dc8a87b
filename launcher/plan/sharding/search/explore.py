"""The cheapest states of a graph: of all where they are few, else of coarse device matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.plan.sharding.search.candidates import followed
from launcher.plan.sharding.search.solve import Choice, Menus, Search, search
from launcher.plan.sharding.search.tables import Pricer
from launcher.plan.sharding.search.variables import State, Variables, neighbours

FEW = 40
"""States of each variable, up to which all are looked at."""
HALVINGS = 11
"""Of the range in which the price of a byte is sought."""
ROUNDS = 4
"""How often what was found is improved by its neighbours, at most."""


def explore(
    pricer: Pricer, variables: Variables, ranks: int, extra: Sequence[Menus], limit: float | None = None
) -> list[Choice]:
    """The best, and others of which parts may do.

    ``extra``: states to look at besides; ``limit``: bytes of a rank.
    """
    every = [v.states(ranks) for v in variables.all]
    if few(every):
        all_of_them = search(pricer, variables, merged(pricer, [every, *extra]))
        best = fitting(all_of_them, limit)
        return [best] if limit is None else [best, all_of_them.cheapest(), smallest(all_of_them)]

    # one search for each device matrix of two axes, in which all operators are cut
    found: list[Menus] = list(extra)
    choices: list[Choice] = []
    for p in (p for p in range(2, ranks) if ranks % p == 0):
        bounds = frozenset((p, ranks))
        coarse = [v.states(ranks, bounds) for v in variables.all]
        one = search(pricer, variables, merged(pricer, [coarse, *extra]))
        choices.append(fitting(one, limit))
        choices += [] if limit is None else [one.cheapest(), smallest(one)]
    found += [one_each(pricer, c) for c in choices]

    # what they found, mixed, and a factor given to another letter, for as long as that helps
    top = min(choices, key=lambda c: order(c, limit))
    for _ in range(ROUNDS):
        near = [neighbours(v, v.cuts(s), ranks) for v, s in zip(variables.all, top.states, strict=True)]
        mixed = merged(pricer, [one_each(pricer, top), *found, pricer.equal(near)])
        new = fitting(search(pricer, variables, mixed), limit)
        if order(new, limit) >= order(top, limit):
            break
        top = new
    return [top, *choices]


def few(menus: Menus) -> bool:
    """Whether all states are looked at."""
    return max(map(len, menus), default=0) <= FEW


def one_each(pricer: Pricer, found: Choice) -> Menus:
    """Of each variable the state that was found."""
    return pricer.equal([(s,) for s in found.states])


def order(found: Choice, limit: float | None) -> tuple[float, float]:
    """Smaller is better: by how much it does not fit, then what it costs."""
    over = 0.0 if limit is None else max(0.0, found.memory - limit)
    return over, found.seconds


def merged(pricer: Pricer, menus: Iterable[Menus]) -> Menus:
    """States of all, each once."""
    known: dict[tuple[int, ...], tuple[State, ...]] = {}
    out = []
    for parts in zip(*menus, strict=True):
        key = tuple(map(id, parts))
        if len(parts) == 1:
            known[key] = parts[0]
        elif key not in known:
            known[key] = tuple(dict.fromkeys(s for part in parts for s in part))
        out.append(known[key])
    return pricer.equal(out)


def fitting(found: Search, limit: float | None) -> Choice:
    """The cheapest that fits into ``limit`` bytes, or nearly; else the smallest."""
    best = alike(found, limit)
    return best if limit is None or best.memory > limit else found.swapped(best, limit)


def alike(found: Search, limit: float | None) -> Choice:
    """The same as far as a price of a byte tells, which is the same for all: equal layers stay equal."""
    cheapest = found.cheapest()
    if limit is None or cheapest.memory <= limit:
        return cheapest
    least = smallest(found)
    if least.memory > limit:
        return least

    # the price of a byte is halved between one at which it does not fit and one at which it does
    best, low, high = least, 1e-16, 1e-4
    for _ in range(HALVINGS):
        price = (low * high) ** 0.5
        new = found.cheapest(byte=price)
        if new.memory <= limit:
            best, high = min(best, new, key=lambda c: c.seconds), price
        else:
            low = price
    return best


def smallest(found: Search) -> Choice:
    """That with the fewest bytes on a rank; of equal ones the cheapest."""
    return found.cheapest(byte=1.0, second=1e-6)


def unfolded(
    pricer: Pricer, variables: Variables, single: Variables, found: Choice, limit: float | None
) -> Choice:
    """The same with a variable an operator, each of which may follow those that it takes from or gives to."""
    strategies = found.strategies(variables)
    menus = []
    for at, variable in enumerate(single.all):
        states = dict.fromkeys([(strategies[at],)])
        rule = pricer.rules[at]
        if variable.letters and rule is not None:
            for other in neighbours_of(pricer, at):
                states[(followed(strategies[other], single.dims[other], rule, single.dims[at]),)] = None
        menus.append(tuple(states))
    return fitting(search(pricer, single, pricer.equal(menus)), limit)


def neighbours_of(pricer: Pricer, at: int) -> list[int]:
    """Nodes that make what a node takes, or take what it makes."""
    node = pricer.graph.nodes[at]
    takers = [n for v in node.outs for n, _ in pricer.uses.get(v, ())]
    return sorted({pricer.makers[v] for v in node.ins if v in pricer.makers} | set(takers))

"""The cheapest states of a graph: among all states if they are few, else among coarse device matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.plan.sharding.search.candidates import followed
from launcher.plan.sharding.search.solve import Choice, Menus, Search, search
from launcher.plan.sharding.search.tables import Pricer
from launcher.plan.sharding.search.variables import State, Variables, neighbours

FEW = 40
"""The number of states of a variable up to which all are searched."""
HALVINGS = 11
"""How often the range of the price of a byte is halved."""
ROUNDS = 4
"""How often a choice is improved by its neighbours, at most."""


def explore(
    pricer: Pricer, variables: Variables, ranks: int, extra: Sequence[Menus], limit: float | None = None
) -> list[Choice]:
    """Returns the best choice, followed by others whose parts may be useful.

    ``extra``: additional states to search. ``limit``: the bytes of a rank, if limited.
    """
    every = [v.states(ranks) for v in variables.all]
    if few(every):
        all_of_them = search(pricer, variables, merged(pricer, [every, *extra]))
        best = fitting(all_of_them, limit)
        return [best] if limit is None else [best, all_of_them.cheapest(), smallest(all_of_them)]

    # one search for each device matrix of two axes, over which all operators are cut
    found: list[Menus] = list(extra)
    choices: list[Choice] = []
    for p in (p for p in range(2, ranks) if ranks % p == 0):
        bounds = frozenset((p, ranks))
        coarse = [v.states(ranks, bounds) for v in variables.all]
        one = search(pricer, variables, merged(pricer, [coarse, *extra]))
        choices.append(fitting(one, limit))
        choices += [] if limit is None else [one.cheapest(), smallest(one)]
    found += [one_each(pricer, c) for c in choices]

    # combine their results, and move single factors to other letters, as long as that helps
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
    """Whether there are so few states that all are searched."""
    return max(map(len, menus), default=0) <= FEW


def one_each(pricer: Pricer, found: Choice) -> Menus:
    """Returns menus with a single state for each variable: that of ``found``."""
    return pricer.equal([(s,) for s in found.states])


def order(found: Choice, limit: float | None) -> tuple[float, float]:
    """The sort key of a choice (smaller is better): bytes above ``limit``, then seconds."""
    over = 0.0 if limit is None else max(0.0, found.memory - limit)
    return over, found.seconds


def merged(pricer: Pricer, menus: Iterable[Menus]) -> Menus:
    """Returns menus with the states of all ``menus``, each once."""
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
    """Returns a choice that fits into ``limit`` bytes, nearly the cheapest; if none fits, the smallest."""
    best = alike(found, limit)
    return best if limit is None or best.memory > limit else found.swapped(best, limit)


def alike(found: Search, limit: float | None) -> Choice:
    """Like ``fitting``, but with the same price per byte for all variables: equal layers stay equal."""
    cheapest = found.cheapest()
    if limit is None or cheapest.memory <= limit:
        return cheapest
    least = smallest(found)
    if least.memory > limit:
        return least

    # bisect the price of a byte between one at which the choice does not fit and one at which it does
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
    """Returns the choice with the fewest bytes on a rank; of equal ones the cheapest."""
    return found.cheapest(byte=1.0, second=1e-6)


def unfolded(
    pricer: Pricer, variables: Variables, single: Variables, found: Choice, limit: float | None
) -> Choice:
    """Refines ``found`` with one variable per operator (``single``).

    Each operator may also follow the strategy of one that it takes values from or gives values to.
    """
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
    """The nodes that make an input of node ``at``, or take an output of it."""
    node = pricer.graph.nodes[at]
    takers = [n for v in node.outs for n, _ in pricer.uses.get(v, ())]
    return sorted({pricer.makers[v] for v in node.ins if v in pricer.makers} | set(takers))

"""A first guess for ``recursive_programming``: the ranks are divided by one prime factor after the other."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from launcher.plan.sharding.op_graph import OpGraph
from launcher.plan.sharding.op_rule import OpRule
from launcher.plan.sharding.search.candidates import Cuts
from launcher.plan.sharding.search.cost import CostModel, Layouts, fixed_layouts
from launcher.plan.sharding.search.solve import search
from launcher.plan.sharding.search.tables import Pricer
from launcher.plan.sharding.search.variables import State, Variable, Variables


def halved(
    graph: OpGraph, rules: Sequence[OpRule | None], variables: Variables, ranks: int, model: CostModel
) -> tuple[State, ...]:
    """Returns a state of each variable: prime factors of the ranks are assigned one by one, largest first.

    In each variable, a factor goes to one letter or to repetition, on top of the cuts before: whatever costs
    the full graph least.
    """
    cuts: list[Cuts] = [()] * len(variables.all)
    halves = factors(ranks)
    for step, p in enumerate(halves):
        so_far = prod(halves[: step + 1])
        pricer = Pricer(graph, rules, model, fixed_layouts(graph, so_far, Layouts()))
        options = [_options(v, c, p) for v, c in zip(variables.all, cuts, strict=True)]
        states = [
            {v.state(c, so_far): c for c in more} for v, more in zip(variables.all, options, strict=True)
        ]
        found = search(pricer, variables, pricer.equal([tuple(s) for s in states])).cheapest()
        cuts = [known[state] for known, state in zip(states, found.states, strict=True)]
    return tuple(v.state(c, ranks) for v, c in zip(variables.all, cuts, strict=True))


def _options(variable: Variable, cuts: Cuts, p: int) -> list[Cuts]:
    """The current cuts, and the cuts with ``p`` times as many slices of one letter, where these divide it."""
    ways = dict(cuts)
    out = [cuts]
    for letter, size in variable.letters:
        more = ways | {letter: ways.get(letter, 1) * p}
        if size % more[letter] == 0:
            out.append(tuple((x, more[x]) for x, _ in variable.letters if more.get(x, 1) > 1))
    return out


def factors(n: int) -> list[int]:
    """Returns the prime factors of ``n``, largest first.

    >>> factors(24)
    [3, 2, 2, 2]
    """
    out, p = [], 2
    while n > 1:
        while n % p == 0:
            out.append(p)
            n //= p
        p += 1
    return out[::-1]

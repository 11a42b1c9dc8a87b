"""Searches strategies for a graph: among all states if these are few, otherwise among likely ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from launcher.extras.device_matrix.op_graph import OpGraph
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.search.candidates import Cuts, dims_of_model, followed
from launcher.extras.device_matrix.search.cost import CostModel, Layouts, StepCost, fixed_layouts, graph_cost
from launcher.extras.device_matrix.search.reasons import Reason, Reasons
from launcher.extras.device_matrix.search.repeats import shortened, unnamed
from launcher.extras.device_matrix.search.tables import Assignment, Menus, Pricer, VariableSearch, search
from launcher.extras.device_matrix.search.variables import (
    State,
    Variable,
    Variables,
    as_written,
    neighbors,
    variables,
)

FEW = 40
"""The number of states of a variable up to which all are searched."""
HALVINGS = 11
"""How often the range of the price of a byte is halved."""
ROUNDS = 4
"""How often a choice is improved by its neighbors, at most."""


def explore(
    pricer: Pricer, variables: Variables, ranks: int, extra: Sequence[Menus], limit: float | None = None
) -> list[Assignment]:
    """Returns the best choice, followed by others whose parts may be useful.

    ``extra``: additional states to search. ``limit``: the bytes of a rank, if limited.
    """
    every = [v.states(ranks) for v in variables.all]
    if few(every):
        all_of_them = search(pricer, variables, merged(pricer, [every, *extra]))
        best = fitting(all_of_them, limit)
        return [best] if limit is None else [best, all_of_them.cheapest(), smallest(all_of_them)]

    # one search for each device matrix of two axes, over which all operators are cut
    menus: list[Menus] = list(extra)
    choices: list[Assignment] = []
    for p in (p for p in range(2, ranks) if ranks % p == 0):
        bounds = frozenset((p, ranks))
        coarse = [v.states(ranks, bounds) for v in variables.all]
        one = search(pricer, variables, merged(pricer, [coarse, *extra]))
        choices.append(fitting(one, limit))
        choices += [] if limit is None else [one.cheapest(), smallest(one)]
    menus += [one_each(pricer, c) for c in choices]

    # combine their results, and move single factors to other letters, as long as that helps
    top = min(choices, key=lambda c: order(c, limit))
    for _ in range(ROUNDS):
        near = [neighbors(v, v.cuts(s), ranks) for v, s in zip(variables.all, top.states, strict=True)]
        mixed = merged(pricer, [one_each(pricer, top), *menus, pricer.equal(near)])
        new = fitting(search(pricer, variables, mixed), limit)
        if order(new, limit) >= order(top, limit):
            break
        top = new
    return [top, *choices]


def few(menus: Menus) -> bool:
    """Returns true if there are so few states that all are searched."""
    return max(map(len, menus), default=0) <= FEW


def one_each(pricer: Pricer, choice: Assignment) -> Menus:
    """Returns menus with a single state for each variable: that of ``choice``."""
    return pricer.equal([(s,) for s in choice.states])


def order(choice: Assignment, limit: float | None) -> tuple[float, float]:
    """Returns the sort key of a choice (smaller is better): bytes above ``limit``, then seconds."""
    over = 0.0 if limit is None else max(0.0, choice.memory - limit)
    return over, choice.seconds


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


def fitting(outcome: VariableSearch, limit: float | None) -> Assignment:
    """Returns a choice that fits into ``limit`` bytes, nearly the cheapest; if none fits, the smallest."""
    best = alike(outcome, limit)
    return best if limit is None or best.memory > limit else outcome.swapped(best, limit)


def alike(outcome: VariableSearch, limit: float | None) -> Assignment:
    """Like ``fitting``, but with the same price per byte for all variables: equal layers stay equal."""
    cheapest = outcome.cheapest()
    if limit is None or cheapest.memory <= limit:
        return cheapest
    least = smallest(outcome)
    if least.memory > limit:
        return least

    # bisect the price of a byte between one at which the choice does not fit and one at which it does
    best, low, high = least, 1e-16, 1e-4
    for _ in range(HALVINGS):
        price = (low * high) ** 0.5
        new = outcome.cheapest(byte=price)
        if new.memory <= limit:
            best, high = min(best, new, key=lambda c: c.seconds), price
        else:
            low = price
    return best


def smallest(outcome: VariableSearch) -> Assignment:
    """Returns the choice with the fewest bytes on a rank; of equal ones the cheapest."""
    return outcome.cheapest(byte=1.0, second=1e-6)


def refined_per_operator(
    pricer: Pricer, variables: Variables, single: Variables, choice: Assignment, limit: float | None
) -> Assignment:
    """Refines ``choice`` with one variable per operator (``single``).

    Each operator may also follow the strategy of one that it takes values from or gives values to.
    """
    strategies = choice.strategies(variables)
    menus = []
    for at, variable in enumerate(single.all):
        states = dict.fromkeys([(strategies[at],)])
        rule = pricer.rules[at]
        if variable.letters and rule is not None:
            for other in neighbors_of(pricer, at):
                states[(followed(strategies[other], single.dims[other], rule, single.dims[at]),)] = None
        menus.append(tuple(states))
    return fitting(search(pricer, single, pricer.equal(menus)), limit)


def neighbors_of(pricer: Pricer, at: int) -> list[int]:
    """Returns the nodes that make an input of node ``at``, or take an output of it."""
    node = pricer.graph.nodes[at]
    takers = [n for v in node.outs for n, _ in pricer.uses.get(v, ())]
    return sorted({pricer.makers[v] for v in node.ins if v in pricer.makers} | set(takers))


def assigned_by_factors(
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
        best = search(pricer, variables, pricer.equal([tuple(s) for s in states])).cheapest()
        cuts = [known[state] for known, state in zip(states, best.states, strict=True)]
    return tuple(v.state(c, ranks) for v, c in zip(variables.all, cuts, strict=True))


def _options(variable: Variable, cuts: Cuts, p: int) -> list[Cuts]:
    """Returns the current cuts, and those with ``p`` times as many slices of one letter.

    Cuts that do not divide the letter are left out.
    """
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


@dataclass(frozen=True)
class SearchResult:
    """The strategies of all nodes and their cost.

    ``reasons``: why operators without a written strategy got theirs. ``lacking``: the bytes that exceed the
    memory of a rank.
    """

    strategies: tuple[OpStrategy, ...]
    cost: StepCost
    reasons: tuple[Reason, ...]
    lacking: float = 0.0


def search_result(
    pricer: Pricer,
    strategies: tuple[OpStrategy, ...],
    written: Mapping[int, OpStrategy],
    memory: float | None,
) -> SearchResult:
    cost = graph_cost(pricer.graph, pricer.rules, strategies, pricer.model, pricer.fixed)
    lacking = 0.0 if memory is None else max(0.0, cost.memory.total - memory)
    reasons = tuple(Reasons(pricer, strategies).of_unwritten(written))
    return SearchResult(strategies, cost, reasons, lacking)


SMALL_GRAPH = 16
"""The number of operators of a graph up to which each is a separate variable from the start."""


def propagate(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    ranks: int,
    written: Mapping[int, OpStrategy],
    model: CostModel | None = None,
    *,
    requested: Layouts | None = None,
    memory: float | None = None,
    extra: Sequence[Sequence[OpStrategy]] = (),
) -> SearchResult:
    """Returns the cheapest strategies by ``model``; those ``written`` for some nodes are kept.

    The search is exact over ``candidate_cuts``, and strategies that follow ``written`` ones, for graphs of up
    to ``SMALL_GRAPH`` operators with up to ``explore.FEW`` candidates each.

    Args:
        graph: the operators of a stage.
        rules: the rule of each node; a node without a rule runs on full tensors.
        ranks: the number of ranks of the stage.
        written: strategies to keep, by place of the node.
        model: the cost model; by default ``CostModel()``.
        requested: layouts of inputs and other values; other inputs arrive in the layouts of their users.
        memory: the bytes of a rank that the strategies have to fit in.
        extra: strategies of all nodes that are candidates, too.
    """
    fixed = fixed_layouts(graph, ranks, requested or Layouts())
    full = Pricer(graph, rules, model or CostModel(), fixed)
    short = shortened(graph, _marks(full, written))

    # promising solutions, from a graph with few of the equal layers
    back = {short_at: at for at, short_at in reversed(list(enumerate(short.of)))}
    layers = Pricer(short.graph, [rules[back[n]] for n in range(len(back))], full.model, fixed, short.weights)
    few_written = {n: written[at] for n, at in back.items() if at in written}
    others = [[strategies[back[n]] for n in range(len(back))] for strategies in extra]
    solutions = _solutions(layers, ranks, few_written, others, memory)
    if len(back) == len(graph.nodes):
        return search_result(full, solutions[0], written, memory)

    # each operator of the full graph may have any strategy that its equal had in one of these solutions
    single = variables(graph, rules, dims_of_model(graph, rules), written, together=False)
    menus = [tuple(dict.fromkeys((s[n],) for s in solutions)) for n in short.of]
    best = alike(search(full, single, full.equal(menus)), memory)
    return search_result(full, best.strategies(single), written, memory)


def _marks(pricer: Pricer, written: Mapping[int, OpStrategy]) -> list[int]:
    """Returns a number for each node; equal operators with equal written strategies and layouts share one."""
    known: dict[object, int] = {}
    rest, leave = pricer.fixed.rest, pricer.fixed.leave
    out = []
    for at, node in enumerate(pricer.graph.nodes):
        values = tuple((rest.get(v), leave.get(v)) for v in (*node.ins, *node.outs))
        key = pricer.signatures[at], written.get(at), values
        out.append(known.setdefault(key, len(known)))
    return out


def _solutions(
    pricer: Pricer,
    ranks: int,
    written: Mapping[int, OpStrategy],
    extra: Sequence[Sequence[OpStrategy]],
    memory: float | None,
) -> list[tuple[OpStrategy, ...]]:
    """Returns solutions, the best one first."""
    graph, rules = pricer.graph, pricer.rules
    dims = dims_of_model(graph, rules)
    single = variables(graph, rules, dims, written, together=False)
    folded = (
        single if len(graph.nodes) <= SMALL_GRAPH else variables(graph, rules, dims, written, together=True)
    )

    # further states: those that follow written strategies, and those of complete solutions
    others: list[Menus] = []
    if written:
        others.append(as_written(folded, rules, written))
    for strategies in extra:
        others.append([(tuple(strategies[at] for at in v.members),) for v in folded.all])
    every = [v.states(ranks) for v in folded.all]
    if not written and not few(every):
        others.append(
            pricer.equal([(s,) for s in assigned_by_factors(graph, rules, folded, ranks, pricer.model)])
        )

    best = explore(pricer, folded, ranks, others, memory)
    out = [choice.strategies(folded) for choice in best]
    if folded is not single:
        refined = refined_per_operator(pricer, folded, single, best[0], memory)
        out.insert(0 if order(refined, memory) < order(best[0], memory) else 1, refined.strategies(single))
    return out


@dataclass(frozen=True)
class Searches:
    """The searches for the stages of one model, over ``ranks`` ranks each; for the rest see ``propagate``."""

    ranks: int
    model: CostModel
    memory: float | None
    _known: dict[Any, SearchResult] = field(default_factory=dict)

    def propagate(
        self,
        graph: OpGraph,
        rules: Sequence[OpRule | None],
        written: Mapping[int, OpStrategy],
        requested: Layouts,
    ) -> SearchResult:
        layouts = (written, requested.rest, requested.leave)
        key = (unnamed(graph), tuple(rules), *(tuple(sorted(of.items(), key=_first)) for of in layouts))
        if key not in self._known:
            self._known[key] = propagate(
                graph, rules, self.ranks, written, self.model, requested=requested, memory=self.memory
            )
        return self._known[key]


def _first(item: tuple[int, Any]) -> int:
    return item[0]

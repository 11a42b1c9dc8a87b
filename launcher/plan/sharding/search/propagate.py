"""``sharding_propagation`` and ``recursive_programming``: strategies of the operators that nobody wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.plan.sharding.op_graph import OpGraph
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.search.candidates import dims_of_model
from launcher.plan.sharding.search.cost import CostModel, Layouts, fixed_layouts
from launcher.plan.sharding.search.explore import alike, explore, few, order, unfolded
from launcher.plan.sharding.search.found import Found, found
from launcher.plan.sharding.search.halving import halved
from launcher.plan.sharding.search.repeats import shortened
from launcher.plan.sharding.search.solve import Menus, search
from launcher.plan.sharding.search.tables import Pricer
from launcher.plan.sharding.search.variables import as_written, variables

SMALL = 16
"""Operators of a graph, up to which each is a variable of its own from the first."""


def propagate(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    ranks: int,
    written: Mapping[int, OpStrategy],
    model: CostModel | None = None,
    *,
    asked: Layouts | None = None,
    memory: float | None = None,
    extra: Sequence[Sequence[OpStrategy]] = (),
) -> Found:
    """The cheapest strategies by ``model``, where ``written`` of some nodes stay as they are.

    ``rules``: of each node; what has none runs on whole tensors. ``asked``: layouts of inputs, of which
    others come as they are taken, and of other values. ``memory``: bytes of a rank that have to do.
    ``extra``: strategies of all nodes to look at besides. Exact over ``candidate_cuts``, and what follows
    from ``written``, for graphs of up to ``SMALL`` operators with up to ``explore.FEW`` candidates each.
    """
    fixed = fixed_layouts(graph, ranks, asked or Layouts())
    whole = Pricer(graph, rules, model or CostModel(), fixed)
    short = shortened(graph, _marks(whole, written))

    # what is worth looking at, found where equal layers are few
    back = {short_at: at for at, short_at in reversed(list(enumerate(short.of)))}
    layers = Pricer(
        short.graph, [rules[back[n]] for n in range(len(back))], whole.model, fixed, short.weights
    )
    few_written = {n: written[at] for n, at in back.items() if at in written}
    others = [[strategies[back[n]] for n in range(len(back))] for strategies in extra]
    solutions = _solutions(layers, ranks, few_written, others, memory)
    if len(back) == len(graph.nodes):
        return found(whole, solutions[0], written, memory)

    # each operator of the whole graph has a choice of what its like had in one of them
    single = variables(graph, rules, dims_of_model(graph, rules), written, together=False)
    menus = [tuple(dict.fromkeys((s[n],) for s in solutions)) for n in short.of]
    best = alike(search(whole, single, whole.equal(menus)), memory)
    return found(whole, best.strategies(single), written, memory)


def recursive(
    graph: OpGraph,
    rules: Sequence[OpRule | None],
    ranks: int,
    model: CostModel | None = None,
    *,
    asked: Layouts | None = None,
    memory: float | None = None,
) -> Found:
    """``recursive_programming``: nothing is written, the degrees are found as well.

    What ``propagate`` finds with nothing written, for which the ranks are halved again and again first.
    """
    return propagate(graph, rules, ranks, {}, model, asked=asked, memory=memory)


def _marks(pricer: Pricer, written: Mapping[int, OpStrategy]) -> list[int]:
    """Numbers of nodes, equal for those that are the same operator and had the same written."""
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
    """The best first."""
    graph, rules = pricer.graph, pricer.rules
    dims = dims_of_model(graph, rules)
    single = variables(graph, rules, dims, written, together=False)
    folded = single if len(graph.nodes) <= SMALL else variables(graph, rules, dims, written, together=True)

    # states that others tell of: followers of what was written, and whole solutions
    others: list[Menus] = []
    if written:
        others.append(as_written(folded, rules, written))
    for strategies in extra:
        others.append([(tuple(strategies[at] for at in v.members),) for v in folded.all])
    every = [v.states(ranks) for v in folded.all]
    if not written and not few(every):
        others.append(pricer.equal([(s,) for s in halved(graph, rules, folded, ranks, pricer.model)]))

    best = explore(pricer, folded, ranks, others, memory)
    out = [choice.strategies(folded) for choice in best]
    if folded is not single:
        refined = unfolded(pricer, folded, single, best[0], memory)
        out.insert(0 if order(refined, memory) < order(best[0], memory) else 1, refined.strategies(single))
    return out

"""``sharding_propagation`` and ``recursive_programming``: searches for strategies that are not written."""

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
"""The number of operators of a graph up to which each is a separate variable from the start."""


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
    """Returns the cheapest strategies by ``model``; those ``written`` for some nodes are kept.

    The search is exact over ``candidate_cuts``, and strategies that follow ``written`` ones, for graphs of up
    to ``SMALL`` operators with up to ``explore.FEW`` candidates each.

    Args:
        graph: the operators of a stage.
        rules: the rule of each node; a node without a rule runs on full tensors.
        ranks: the number of ranks of the stage.
        written: strategies to keep, by place of the node.
        model: the cost model; by default ``CostModel()``.
        asked: requested layouts of inputs and other values; other inputs come in the layouts of their users.
        memory: the bytes of a rank that the strategies have to fit in.
        extra: strategies of all nodes that are candidates, too.
    """
    fixed = fixed_layouts(graph, ranks, asked or Layouts())
    whole = Pricer(graph, rules, model or CostModel(), fixed)
    short = shortened(graph, _marks(whole, written))

    # promising solutions, from a graph with few of the equal layers
    back = {short_at: at for at, short_at in reversed(list(enumerate(short.of)))}
    layers = Pricer(
        short.graph, [rules[back[n]] for n in range(len(back))], whole.model, fixed, short.weights
    )
    few_written = {n: written[at] for n, at in back.items() if at in written}
    others = [[strategies[back[n]] for n in range(len(back))] for strategies in extra]
    solutions = _solutions(layers, ranks, few_written, others, memory)
    if len(back) == len(graph.nodes):
        return found(whole, solutions[0], written, memory)

    # each operator of the full graph may have any strategy that its equal had in one of these solutions
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
    """``recursive_programming``: returns what ``propagate`` finds if no strategy is written.

    In that case, the search begins with the strategies of ``halved`` unless candidates are few.
    """
    return propagate(graph, rules, ranks, {}, model, asked=asked, memory=memory)


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
    folded = single if len(graph.nodes) <= SMALL else variables(graph, rules, dims, written, together=True)

    # further states: those that follow written strategies, and those of complete solutions
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

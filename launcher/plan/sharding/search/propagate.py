"""``sharding_propagation``: infers the strategies of the operators that nobody wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.plan.sharding.cost import CostModel, Layouts, fixed_layouts
from launcher.plan.sharding.op_graph import OpGraph
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.search.candidates import dims_of_model
from launcher.plan.sharding.search.explore import explore, order, unfolded
from launcher.plan.sharding.search.found import Found, found
from launcher.plan.sharding.search.solve import Menus
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

    ``rules``: of each node; what has none runs on whole tensors. ``asked``: layouts of inputs, of which others
    come as they are taken, and of other values. ``memory``: bytes of a rank that have to do. ``extra``: strategies of all nodes to look at
    besides. Exact over ``candidate_cuts`` and what follows from ``written`` for graphs of up to ``SMALL``
    operators that have up to ``explore.FEW`` candidates each.
    """
    fixed = fixed_layouts(graph, ranks, asked or Layouts())
    pricer = Pricer(graph, rules, model or CostModel(), fixed)
    dims = dims_of_model(graph, rules)
    single = variables(graph, rules, dims, written, together=False)
    folded = single if len(graph.nodes) <= SMALL else variables(graph, rules, dims, written, together=True)

    # states that others tell of: followers of what was written, and whole solutions
    others: list[Menus] = []
    if written:
        others.append(as_written(folded, rules, written))
    for strategies in extra:
        others.append([(tuple(strategies[at] for at in v.members),) for v in folded.all])
    best = explore(pricer, folded, ranks, others, memory)
    if folded is not single:
        refined = unfolded(pricer, folded, single, best, memory)
        if order(refined, memory) < order(best, memory):
            return found(pricer, single, refined, written, memory)
    return found(pricer, folded, best, written, memory)

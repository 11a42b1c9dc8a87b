"""Infers the strategies of the operators that nobody wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.plan.sharding.cost import Cost, CostModel, graph_cost
from launcher.plan.sharding.op_graph import OpGraph
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.search.candidates import candidates, dims_of_model, followed, ordered, strategy
from launcher.plan.sharding.search.tables import Pricer
from launcher.plan.sharding.tensor_layout import TensorLayout


@dataclass(frozen=True)
class Found:
    strategies: tuple[OpStrategy, ...]
    cost: Cost


def all_candidates(graph, rules, ranks, written):
    dims = dims_of_model(graph, rules)
    out = []
    for at, rule in enumerate(rules):
        if at in written:
            out.append((written[at],)); continue
        if rule is None:
            out.append((strategy((), ranks),)); continue
        out.append(candidates(ordered(rule, dims[at]), ranks))
    return out


def propagate(graph, rules, ranks, written, model, layouts={}):
    pricer = Pricer(graph, rules, model, layouts)
    cands = all_candidates(graph, rules, ranks, written)
    kinds = pricer.kinds(cands)
    priced = pricer.priced(kinds)
    states = pricer.shared.solve([len(c) for c in cands], pricer.scoped(priced, 1.0, 0.0))
    chosen = tuple(c[s] for c, s in zip(cands, states))
    return Found(chosen, graph_cost(graph, rules, chosen, model, layouts)), pricer, priced, states

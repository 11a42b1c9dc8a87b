"""The result of a search for strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.plan.sharding.op_rule import OpStrategy
from launcher.plan.sharding.search.cost import Cost, graph_cost
from launcher.plan.sharding.search.reasons import Reason, Reasons
from launcher.plan.sharding.search.tables import Pricer


@dataclass(frozen=True)
class Found:
    """The strategies of all nodes and their cost.

    ``reasons``: why operators without a written strategy got theirs. ``lacking``: the bytes that exceed the
    memory of a rank.
    """

    strategies: tuple[OpStrategy, ...]
    cost: Cost
    reasons: tuple[Reason, ...]
    lacking: float = 0.0


def found(
    pricer: Pricer,
    strategies: tuple[OpStrategy, ...],
    written: Mapping[int, OpStrategy],
    memory: float | None,
) -> Found:
    cost = graph_cost(pricer.graph, pricer.rules, strategies, pricer.model, pricer.fixed)
    lacking = 0.0 if memory is None else max(0.0, cost.memory.total - memory)
    reasons = tuple(Reasons(pricer, strategies).found(written))
    return Found(strategies, cost, reasons, lacking)

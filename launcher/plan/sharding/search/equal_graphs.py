"""Searches once for graphs that differ only in the numbers of their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.plan.sharding.op_graph import OpGraph
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.search.cost import CostModel, Layouts
from launcher.plan.sharding.search.found import Found
from launcher.plan.sharding.search.propagate import propagate
from launcher.plan.sharding.search.repeats import unnumbered


@dataclass(frozen=True)
class Searches:
    """The searches for the stages of one model, over ``ranks`` ranks each; for the rest see ``propagate``."""

    ranks: int
    model: CostModel
    memory: float | None
    _known: dict[Any, Found] = field(default_factory=dict)

    def found(
        self,
        graph: OpGraph,
        rules: Sequence[OpRule | None],
        written: Mapping[int, OpStrategy],
        asked: Layouts,
    ) -> Found:
        given = (written, asked.rest, asked.leave)
        key = (_unnumbered(graph), tuple(rules), *(tuple(sorted(of.items(), key=_first)) for of in given))
        if key not in self._known:
            self._known[key] = propagate(
                graph, rules, self.ranks, written, self.model, asked=asked, memory=self.memory
            )
        return self._known[key]


def _first(item: tuple[int, Any]) -> int:
    return item[0]


def _unnumbered(graph: OpGraph) -> tuple[Any, ...]:
    """Returns everything in a graph that a search and its reasons depend on.

    Numbers in module names count only by their difference from the first number.
    """
    first: dict[str, list[int]] = {}
    nodes = []
    for n in graph.nodes:
        name, numbers = unnumbered(n.module), [int(x) for x in n.module.split(".") if x.isdecimal()]
        steps = [a - b for a, b in zip(numbers, first.setdefault(name, numbers), strict=True)]
        nodes.append(replace(n, module=f"{name} {steps}"))
    params = tuple((v, name in graph.buffers) for name, v in graph.params)
    changes = tuple(v for _, v in graph.changes)
    return graph.values, graph.inputs, params, tuple(nodes), graph.outputs, changes

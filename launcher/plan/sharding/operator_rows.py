"""The strategies of all operators of a plan, in the form of a strategy file."""

from __future__ import annotations

from collections import Counter
from typing import Any

from launcher.plan.operators.operator_file import ASSIGNED, KEY, Searched, digest, text
from launcher.plan.sharding.stage_sharding import Sharding
from launcher.plan.sharding.strategies.operator_names import main_operators, operator_names
from launcher.plan.sharding.strategies.written import as_written


def as_json(sharding: Sharding) -> str:
    """Returns the text of a complete strategy file: once loaded, it leaves nothing for a mode to decide."""
    found = rows(sharding)
    searched = None
    if sharding.searched:
        searched = Searched(digest(found), sharding.reasons)
    return text(found, None, searched)


def rows(sharding: Sharding) -> dict[str, dict[str, Any]]:
    """Returns the strategies by name, without operators that have no rule.

    The main operator of a module has the name of the module, unless the module is on several stages; any
    other operator has a name of its own.
    """
    graphs = [s.train for s in sharding.stages]
    stages = Counter(module for g in graphs for module in {n.module for n in g.graph.nodes})
    out = {}
    for stage, names in zip(sharding.stages, operator_names([g.graph for g in graphs]), strict=True):
        graph = stage.train
        main = main_operators(graph.graph, graph.rules)
        said = {w.node: w for w in stage.written}
        for at, (node, rule) in enumerate(zip(graph.graph.nodes, graph.rules, strict=True)):
            if rule is None:
                continue
            written = said.get(at)
            alone = main[node.module] == at and stages[node.module] == 1 and bool(node.module)
            name = node.module if alone else names[at]
            row = as_written(graph.strategies[at], rule, None if written is None else written.out)
            if written is None or written.assigned:
                row[ASSIGNED] = True
            elif written.key != name:
                row[KEY] = written.key
            out[name] = row
    return out

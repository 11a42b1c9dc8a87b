"""What a plan says of operators over device matrices: rows of those cut alike, and what they send."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.plan.sharding.moves import moves
from launcher.plan.sharding.op_rule import OpRule, OpStrategy
from launcher.plan.sharding.redistribution.planned import Redistribution
from launcher.plan.sharding.sharded_graph import ShardedGraph
from launcher.plan.sharding.stage_sharding import Sharding, StageSharding
from launcher.plan.sharding.tensor_layout import TensorLayout
from launcher.plan.values.text import bytes_text, many

NAMES = {
    "all_gather": "all-gather", "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "exchange": "exchange",
}  # fmt: skip
Rows = Iterator[tuple[str, str]]


def rows(sharding: Sharding | None) -> Rows:
    """For the plan's text."""
    if sharding is None:
        return
    yield "operators", f"over device matrices of {many(sharding.ranks, 'rank')} a stage"
    found: dict[tuple[str, str], list[str]] = {}
    for stage in sharding.stages:
        for module, said in _operators(stage):
            found.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", module), said), []).append(module)
    for (glob, said), modules in found.items():
        name = f"{glob} ({len(modules)})" if len(modules) > 1 else modules[0]
        yield "operators", f"{name or 'the model itself'}: {said}"
    for reason in dict.fromkeys(reason for stage in sharding.stages for reason in stage.reasons):
        yield "operators", reason
    for whole in gathered(sharding):
        yield "operators", f"gathered: {whole}"
    sent = Counter(dict[str, int]())
    nbytes = 0
    for stage in sharding.stages:
        for plan, size in _sent(stage.train):
            sent.update(s.op for s in plan.steps if s.op != "slice")
            nbytes += plan.elements * size
    if sent:
        text = ", ".join(many(n, NAMES[op]) for op, n in sorted(sent.items()))
        yield "operators", f"together: {text} a micro batch, {bytes_text(nbytes)} received a rank"


def _operators(stage: StageSharding) -> Iterator[tuple[str, str]]:
    """Those that were written, and those that take parameters."""
    graph = stage.train
    written = {w.node for w in stage.written if not w.assigned}
    for at, node in enumerate(graph.graph.nodes):
        rule = graph.rules[at]
        if rule is None or not (at in written or graph.params.intersection(node.ins)):
            continue
        yield node.module, f"{node.kind} {strategy_text(rule, graph.strategies[at])}"


def strategy_text(rule: OpRule, strategy: OpStrategy) -> str:
    """Slices of what it takes and makes, and the ranks that repeat it."""
    ins = " x ".join(_slices(strategy.takes(rule, i)) for i in range(len(rule.ins)))
    made = strategy.makes(rule, 0)
    out = f"{ins} -> {_slices(made)}"
    if made.partial:
        ways = 1
        for a in made.partial:
            ways *= made.matrix[a]
        out += f", {ways} terms added up"
    used = 1
    for a in strategy.used:
        used *= strategy.matrix[a]
    return out if used == strategy.ranks else f"{out}, {strategy.ranks // used} ranks each repeat it"


def _slices(layout: TensorLayout) -> str:
    return str(list(layout.slices))


@dataclass(frozen=True)
class Gathered:
    """An operator without a rule, which works on whole tensors; ``nbytes`` of those that it finds cut."""

    module: str
    op: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'}, {bytes_text(self.nbytes)}, no rule for aten.{self.op}"


def gathered(sharding: Sharding) -> Iterator[Gathered]:
    for stage in sharding.stages:
        graph = stage.train
        for node, rule, takes in zip(graph.graph.nodes, graph.rules, graph.takes, strict=True):
            values = {graph.taken[t].value for t in takes}
            cut = [v for v in values if any(graph.layouts[v].dims)]
            if rule is None and cut:
                yield Gathered(node.module, node.op, sum(graph.graph.values[v].spec.nbytes for v in cut))


def _sent(graph: ShardedGraph) -> Iterator[tuple[Redistribution, int]]:
    for move in moves(graph):
        yield move.forward, move.itemsize
        if move.backward is not None:
            yield move.backward, move.itemsize


def told(sharding: Sharding) -> dict[str, Any]:
    """For the plan as JSON: an operator a row."""
    return {
        "ranks": sharding.ranks,
        "level": sharding.level,
        "stages": [_told(s) for s in sharding.stages],
    }


def _told(stage: StageSharding) -> dict[str, Any]:
    graph = stage.train
    operators = [
        {
            "module": node.module,
            "op": node.op,
            "matrix": strategy.matrix,
            "in": [] if rule is None else [strategy.takes(rule, i).dims for i in range(len(rule.ins))],
            "out": [] if rule is None else [strategy.makes(rule, i).dims for i in range(len(rule.outs))],
        }
        for node, rule, strategy in zip(graph.graph.nodes, graph.rules, graph.strategies, strict=True)
    ]
    params = [
        {"name": p.name, "matrix": p.rest.matrix, "used": p.used.dims, "at_rest": p.rest.dims}
        for p in stage.params
    ]
    return {"operators": operators, "params": params}

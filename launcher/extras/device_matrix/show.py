"""Rows of a plan over device matrices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.extras.device_matrix.layout import TensorLayout
from launcher.extras.device_matrix.op_rule import OpRule, OpStrategy
from launcher.extras.device_matrix.operator_names import main_operators, operator_names
from launcher.extras.device_matrix.resolve import Sharding, StageSharding
from launcher.extras.device_matrix.sharded_graph import ShardedGraph, moves
from launcher.extras.device_matrix.written_strategies import as_written
from launcher.plan.tensor_parallel.operator_strategy_file import ASSIGNED, NAME_KEY, Searched, digest, text
from launcher.plan.values.text import bytes_text, many, seconds_text

NAMES = {
    "all_gather": "all-gather", "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "exchange": "exchange",
}  # fmt: skip
Rows = Iterator[tuple[str, str]]


def sharding_rows(sharding: Sharding) -> Rows:
    """Yields the rows of the plan's text, each a label and a line."""
    yield "operators", f"over device matrices of {many(sharding.ranks, 'rank')} a stage"
    modules_of: dict[tuple[str, str], list[str]] = {}
    for stage in sharding.stages:
        for module, description in _operators(stage):
            modules_of.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", module), description), []).append(module)
    for (glob, description), modules in modules_of.items():
        name = f"{glob} ({len(modules)})" if len(modules) > 1 else modules[0]
        yield "operators", f"{name or 'the model itself'}: {description}"
    for reason in sharding.reasons:
        yield "operators", reason
    for operator in gathered(sharding):
        yield "operators", f"gathered: {operator}"
    yield from (("operators", text) for text in _together(sharding))


def _together(sharding: Sharding) -> Iterator[str]:
    """Yields a line on the communication per micro batch, for the stage that spends most time on it."""
    sent = [_Sent.from_graph(s.train) for s in sharding.stages]
    longest = max(range(len(sent)), key=lambda at: sent[at].seconds(sharding))
    most = sent[longest]
    if not most.counts:
        return
    alike = all(s == most for s in sent)
    where = "together" if len(sent) == 1 else "each stage" if alike else f"most on stage {longest}"
    text = ", ".join(many(n, NAMES[op]) for op, n in sorted(most.counts.items()))
    network = f"{seconds_text(sharding.latency)} a collective and {sharding.bytes_per_second / 1e9:g} GB/s"
    yield f"{where}: {text} a micro batch, {bytes_text(most.nbytes)} received a rank, " + (
        f"predicted {seconds_text(most.seconds(sharding))} at {network}"
    )


@dataclass(frozen=True)
class _Sent:
    """The numbers of collectives by kind, and the bytes that a rank receives, in forward and backward."""

    counts: Mapping[str, int]
    nbytes: int

    @classmethod
    def from_graph(cls, graph: ShardedGraph) -> _Sent:
        both = ((m.forward, m.backward, m.itemsize) for m in moves(graph))
        plans = [(plan, size) for *ways, size in both for plan in ways if plan is not None]
        counts = Counter[str](step.op for plan, _ in plans for step in plan.steps if step.op != "slice")
        return cls(dict(counts), sum(plan.elements * size for plan, size in plans))

    def seconds(self, at: Sharding) -> float:
        return self.nbytes / at.bytes_per_second + sum(self.counts.values()) * at.latency


def _operators(stage: StageSharding) -> Iterator[tuple[str, str]]:
    """Yields the operators that have a written strategy or take parameters: module and text."""
    graph = stage.train
    written = {w.node for w in stage.written if not w.assigned}
    for at, node in enumerate(graph.graph.nodes):
        rule = graph.rules[at]
        if rule is None or not (at in written or graph.params.intersection(node.ins)):
            continue
        yield node.module, f"{node.kind} {strategy_text(rule, graph.strategies[at])}"


def strategy_text(rule: OpRule, strategy: OpStrategy) -> str:
    """Describes the slices of all tensors that an operator takes and makes, and the ranks that repeat it."""
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
class GatheredOperator:
    """An operator without a rule, which gathers its inputs; ``nbytes``: the size of those that are cut."""

    module: str
    op: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'}, {bytes_text(self.nbytes)}, no rule for aten.{self.op}"


def gathered(sharding: Sharding) -> Iterator[GatheredOperator]:
    for stage in sharding.stages:
        graph = stage.train
        for node, rule, takes in zip(graph.graph.nodes, graph.rules, graph.takes, strict=True):
            values = {graph.taken[t].value for t in takes}
            cut = [v for v in values if any(graph.layouts[v].dims)]
            if rule is None and cut:
                yield GatheredOperator(
                    node.module, node.op, sum(graph.graph.values[v].spec.nbytes for v in cut)
                )


def sharding_json(sharding: Sharding) -> dict[str, Any]:
    """Returns the data for the plan as JSON, with one row per operator."""
    return {
        "ranks": sharding.ranks,
        "level": sharding.level,
        "stages": [_stage_as_dict(s, sharding) for s in sharding.stages],
    }


def _stage_as_dict(stage: StageSharding, sharding: Sharding) -> dict[str, Any]:
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
    sent = _Sent.from_graph(graph)
    moves = {"collectives": sent.counts, "bytes": sent.nbytes, "seconds": sent.seconds(sharding)}
    return {"operators": operators, "params": params, "moves": moves}


def operators_json(sharding: Sharding) -> str:
    """Returns the text of a complete strategy file: once loaded, it leaves nothing for a mode to decide."""
    strategies = strategies_by_name(sharding)
    searched = None
    if sharding.searched:
        searched = Searched(digest(strategies), sharding.reasons)
    return text(strategies, None, searched)


def strategies_by_name(sharding: Sharding) -> dict[str, dict[str, Any]]:
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
        written_at = {w.node: w for w in stage.written}
        for at, (node, rule) in enumerate(zip(graph.graph.nodes, graph.rules, strict=True)):
            if rule is None:
                continue
            written = written_at.get(at)
            alone = main[node.module] == at and stages[node.module] == 1 and bool(node.module)
            name = node.module if alone else names[at]
            row = as_written(graph.strategies[at], rule, None if written is None else written.out)
            if written is None or written.assigned:
                row[ASSIGNED] = True
            elif written.key != name:
                row[NAME_KEY] = written.key
            out[name] = row
    return out

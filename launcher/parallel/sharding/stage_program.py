"""Runs a sharded graph on a rank's parts of tensors: redistributes, computes and frees, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.parallel.sharding.kernels.local_call import LocalCall
from launcher.parallel.sharding.kernels.prepare import Kernel, prepare
from launcher.parallel.sharding.process_groups import StageGroups
from launcher.parallel.sharding.redistribute import redistribute
from launcher.plan.sharding.moves import Move, settled, taken
from launcher.plan.sharding.rules.table import whole_rule
from launcher.plan.sharding.sharded_graph import ShardedGraph


@dataclass(frozen=True)
class _Step:
    """One operator: the ways in which it takes values, its outputs, and the ways not needed afterwards."""

    kernel: Kernel
    takes: tuple[int, ...]
    outs: tuple[int, ...]
    settles: tuple[Move | None, ...]
    done: tuple[int, ...]


class StageProgram:
    """Runs ``sharded`` on the rank of ``groups``."""

    def __init__(self, sharded: ShardedGraph, groups: StageGroups, device: torch.device) -> None:
        self.sharded = sharded
        self.groups = groups
        self.device = device
        self.ways = tuple(taken(sharded, way) for way in sharded.taken)
        last = _last_uses(sharded)
        self.steps = tuple(
            _Step(
                kernel=self._kernel(at),
                takes=takes,
                outs=node.outs,
                settles=tuple(settled(sharded, v) for v in node.outs),
                done=tuple(way for way in dict.fromkeys(takes) if last[way] == at),
            )
            for at, (node, takes) in enumerate(zip(sharded.graph.nodes, sharded.takes, strict=True))
        )

    def run(
        self, inputs: Sequence[Tensor], params: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the outputs, and the new values of buffers; all tensors are in the layouts of the graph."""
        graph = self.sharded.graph
        values = dict(zip(graph.inputs, inputs, strict=True))
        values |= {v: params[name] for name, v in graph.params if self.sharded.users[v]}
        left = {v: len(self.sharded.users[v]) for v in range(len(graph.values))}
        got: dict[int, Tensor] = {}

        def take(way: int) -> Tensor:
            if way not in got:
                value = self.sharded.taken[way].value
                got[way] = self._moved(values[value], self.ways[way])
                left[value] -= 1
                if not left[value]:  # all ways to take it exist
                    del values[value]
            return got[way]

        for step in self.steps:
            made = step.kernel(*(take(way) for way in step.takes))
            for v, t, move in zip(step.outs, made, step.settles, strict=True):
                if left[v]:
                    values[v] = self._moved(t, move)
            for way in step.done:
                del got[way]

        changes = {
            name: take(way) for (name, _), way in zip(graph.changes, self.sharded.changes, strict=True)
        }
        return [take(way) for way in self.sharded.returns], changes

    def _kernel(self, at: int) -> Kernel:
        graph, rule = self.sharded.graph, self.sharded.rules[at]
        node, strategy = graph.nodes[at], self.sharded.strategies[at]
        rule = rule or whole_rule(node, graph)
        call = LocalCall.of(node, graph, rule, strategy, self.groups.rank)
        return prepare(call, InsideCollectives(self.groups), self.device)

    def _moved(self, t: Tensor, move: Move | None) -> Tensor:
        if move is None:
            return t
        return redistribute(t, move.forward, move.backward, self.groups)


@dataclass(frozen=True)
class InsideCollectives:
    """Sums and maxima inside of operators, over the groups of a stage."""

    groups: StageGroups

    def sum(self, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
        return self.groups.all_reduce(x.clone(), matrix, axes, "sum")

    def max(self, x: Tensor, matrix: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
        return self.groups.all_reduce(x.clone(), matrix, axes, "max")


def _last_uses(sharded: ShardedGraph) -> list[int]:
    """Return the operator that takes each way last; outputs are kept to the end."""
    end = len(sharded.graph.nodes)
    out = [end] * len(sharded.taken)
    for at, takes in enumerate(sharded.takes):
        for way in takes:
            out[way] = at
    for way in (*sharded.returns, *sharded.changes):
        out[way] = end
    return out

"""The sets of ranks that need a process group of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from launcher.extras.device_matrix.all_to_all_v import Rows, rows_over
from launcher.extras.device_matrix.redistribution import Redistribution
from launcher.extras.device_matrix.resolve import Sharding, StageSharding
from launcher.extras.device_matrix.sharded_graph import ShardedGraph, gathered, moves, reduced


def collective_rows(sharding: Sharding, stages: Iterable[int]) -> tuple[Rows, ...]:
    """Returns the rows of ranks between which the collectives of some stages run, each only once.

    ``stages`` are the virtual stages of one pipeline rank. A row of one rank needs no process group and is
    left out.
    """
    all_rows = (
        rows for s in stages for rows in _stage_rows(sharding.stages[s], last=s == len(sharding.stages) - 1)
    )
    return tuple(dict.fromkeys(rows for rows in all_rows if len(rows[0]) > 1))


def _stage_rows(stage: StageSharding, last: bool) -> Iterator[Rows]:
    for graph in (stage.train, stage.evaluate):
        for move in moves(graph):
            yield from _step_rows(move.forward)
            if move.backward is not None:
                yield from _step_rows(move.backward)
        yield from _inside(graph)
    for p in stage.params:
        yield from _step_rows(gathered(p))
        yield from _step_rows(reduced(p))
    if last:
        yield from _loss(stage.train)


def _step_rows(plan: Redistribution) -> Iterator[Rows]:
    return (step.rows for step in plan.steps if step.op != "slice")


def _inside(graph: ShardedGraph) -> Iterator[Rows]:
    """Yields the rows of collectives inside of operators.

    A collective is over the axes that cut one letter of the operator's rule, or all letters of one kind.
    """
    for rule, strategy in zip(graph.rules, graph.strategies, strict=True):
        if rule is None or not rule.kernel:
            continue
        letters = (*rule.inside, *rule.sums)
        for some in (*((letter,) for letter in letters), rule.inside, rule.sums):
            axes = tuple(sorted(a for letter in some for a in strategy.of.get(letter, ())))
            if axes:
                yield rows_over(strategy.matrix, axes)


def _loss(graph: ShardedGraph) -> Iterator[Rows]:
    """Yields the rows of the collectives of the loss, over the axes that cut its classes."""
    for at in graph.returns:
        layout = graph.taken[at].layout
        if layout.dims and layout.dims[-1]:
            yield rows_over(layout.matrix, tuple(sorted(layout.dims[-1])))

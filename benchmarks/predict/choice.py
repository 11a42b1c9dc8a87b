"""Rates the layouts that a prediction would choose among those that were measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.predict.values import Compared, seconds, step

FIVE = 5


@dataclass(frozen=True)
class Cell:
    """One model on one number of devices: how much of the best measured layout's speed a choice loses.

    ``layouts``: how many were measured. ``first``: the choice is the layout that is predicted to be fastest.
    ``five``: it is the best measured of the five that are predicted to be fastest. ``hand``: it follows the
    engineers' rule: tp within a node, then as little pp and as little tp as possible, then the largest micro
    batch.
    """

    model: str
    ranks: int
    layouts: int
    first: float
    five: float
    hand: float


def cells(found: Sequence[Compared]) -> list[Cell]:
    """Return the cells of measured times; of several measurements of a layout, the best counts."""
    measured: dict[tuple[str, int], dict[tuple[int, ...], tuple[float, float]]] = defaultdict(dict)
    for c in found:
        row = c.plan.row
        layout = (row.tp, row.pp, row.dp, row.micro, row.zero)
        cell = measured[c.raw["model"], row.ranks]
        took = min(seconds(c), cell.get(layout, (seconds(c), 0.0))[0])
        cell[layout] = took, step(c.plan).seconds
    return [_cell(*name, layouts) for name, layouts in sorted(measured.items())]


def _cell(model: str, ranks: int, layouts: dict[tuple[int, ...], tuple[float, float]]) -> Cell:
    best = min(took for took, _ in layouts.values())
    order = sorted(layouts, key=lambda name: layouts[name][1])
    hand = min(layouts, key=lambda k: (k[0] > 8, k[1], k[0], -k[3]))

    def regret(names: Sequence[tuple[int, ...]]) -> float:
        return 1 - best / min(layouts[n][0] for n in names)

    return Cell(model, ranks, len(layouts), regret(order[:1]), regret(order[:FIVE]), regret([hand]))


@dataclass(frozen=True)
class OutOfMemory:
    """How well runs out of memory are predicted: precision and recall; ``failed`` is how many runs failed."""

    precision: float
    recall: float
    failed: int


def out_of_memory(ran: Sequence[Compared], failed: Sequence[Compared], room: float) -> OutOfMemory:
    """Rate the prediction that a run fails if its plan and its allocator need more than ``room`` bytes."""
    right, wrong = (sum(step(c.plan).needs > room for c in some) for some in (failed, ran))
    return OutOfMemory(right / max(right + wrong, 1), right / max(len(failed), 1), len(failed))

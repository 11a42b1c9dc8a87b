"""How good the layouts are that a prediction would choose, among those that were measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.predict.values import Compared, seconds, step

FIVE = 5


@dataclass(frozen=True)
class Cell:
    """One model on so many devices: the layouts measured, and the share of the best one's speed that is lost.

    ``first``: by the layout that is predicted to be fastest; ``five``: by the best measured of the five that
    are; ``hand``: by what engineers do: tp within a node, as little pp, then tp, as may be, and the largest
    micro batch.
    """

    model: str
    ranks: int
    layouts: int
    first: float
    five: float
    hand: float


def cells(found: Sequence[Compared]) -> list[Cell]:
    """Of measured times; of layouts that were measured several times the best counts."""
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
    """Of runs that did not fit: ``precision`` of saying so, ``recall`` of those that failed."""

    precision: float
    recall: float
    failed: int


def out_of_memory(ran: Sequence[Compared], failed: Sequence[Compared], room: float) -> OutOfMemory:
    """Of devices with so many bytes of ``room``, by what a plan and its allocator need."""
    right, wrong = (sum(step(c.plan).needs > room for c in some) for some in (failed, ran))
    return OutOfMemory(right / max(right + wrong, 1), right / max(len(failed), 1), len(failed))

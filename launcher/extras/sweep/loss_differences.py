"""Compares the losses of cells that differ only in their layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, isfinite
from pathlib import Path

from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.metrics_rows import Row, RowReader
from launcher.job.sweep_grid import Cell
from launcher.plan.certify_copy import TOLERANCE
from launcher.plan.may_change_on_resume import SCALE, class_of

GROUPS = {"operators": "parallel.operators"}
"""The setting that each group of options sets."""


LAYOUT = {"layout", "derived"}
"""Classes of settings that do not change the numbers of a step."""


COMPARED = ("loss", "grad_norm")


EARLY = 4
"""The steps whose differences are limited: later on, training has amplified rounding errors."""


TIMES = 10.0
"""The factor on the tolerance of one step."""


@dataclass(frozen=True)
class Gap:
    """The largest relative difference from cell ``of``, ``early`` in the first steps and in ``all_steps``."""

    of: str
    early: float
    all_steps: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.early <= self.allowed


def gaps(folder: Path, results: Sequence[CellResult], precisions: Mapping[str, str]) -> dict[str, Gap]:
    """Returns the gap between each result and the first one with the same ``number_settings``.

    All cells must be done.
    """
    first: dict[tuple[str, ...], tuple[str, list[Row]]] = {}
    out = {}
    for result in results:
        name = result.cell.name
        mine = [row for row in RowReader(folder / name).read() if "loss" in row]
        kind = number_settings(result.cell)
        if kind not in first:
            first[kind] = name, mine
            continue
        of, its = first[kind]
        out[name] = _gap(of, its, mine, TIMES * TOLERANCE[precisions[name]])
    return out


def number_settings(cell: Cell) -> tuple[str, ...]:
    """Returns the overrides of a cell on which its numbers depend: all but those of the layout."""
    return tuple(word for word in cell.overrides if not _of_the_layout(word.lstrip("+~").partition("=")[0]))


def _of_the_layout(key: str) -> bool:
    return key not in SCALE and bool(LAYOUT & {*class_of(GROUPS.get(key, key))})


def _gap(of: str, its: Sequence[Row], mine: Sequence[Row], allowed: float) -> Gap:
    if [row["step"] for row in its] != [row["step"] for row in mine]:
        return Gap(of, inf, inf, allowed)
    errors = [max(_error(a, b, name) for name in COMPARED) for a, b in zip(its, mine, strict=True)]
    return Gap(of, max(islice(errors, EARLY), default=0.0), max(errors, default=0.0), allowed)


def _error(a: Row, b: Row, name: str) -> float:
    """Returns the relative difference; 0 if both are null, infinite if only one is."""
    one, other = a.get(name), b.get(name)
    if one is None or other is None:
        return 0.0 if one is other else inf
    if one == other:
        return 0.0
    error = abs(one - other) / max(abs(one), abs(other))
    return error if isfinite(error) else inf

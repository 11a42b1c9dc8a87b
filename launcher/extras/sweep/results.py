"""The best cell, the Pareto front, differences of losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.forecast import Forecast
from launcher.extras.sweep.metrics_rows import Row, RowReader
from launcher.job import sweep_grid
from launcher.job.sweep_grid import Cell
from launcher.plan.certify_copy import TOLERANCE
from launcher.plan.changed_settings import SCALE, class_of
from launcher.run.curve import Curve

SPEEDS = ("tokens_per_s", "samples_per_s")
MEMORY = "memory_mb"


@dataclass(frozen=True)
class ResultLine:
    """A cell in the results. ``value``: its metric, if it is done and a number. ``curve``: of its loss."""

    result: CellResult
    forecast: Forecast | None
    value: float | None
    curve: Curve

    @property
    def name(self) -> str:
        return self.result.cell.name

    @cached_property
    def values(self) -> Mapping[str, str]:
        """The values of the settings that vary."""
        return sweep_grid.values(self.result.cell)


@dataclass(frozen=True)
class Results:
    """The results. ``lines``: the best cell first, those without a value last."""

    metric: str
    goal: Literal["min", "max"]
    lines: tuple[ResultLine, ...]

    @property
    def best(self) -> ResultLine | None:
        """The first run of the cell with the best mean over its seeds; ``None`` if no run has a value."""
        ranked = [line for line in self.lines if line.value is not None]
        return ranked[0] if ranked else None

    @cached_property
    def groups(self) -> Mapping[tuple[str, ...], tuple[float, float | None]]:
        """Mean and standard deviation over runs that differ only in the seed, by the overrides that vary."""
        values: dict[tuple[str, ...], list[float]] = {}
        for line in self.lines:
            if line.value is not None:
                values.setdefault(line.result.cell.varied, []).append(line.value)
        return {k: (fmean(v), stdev(v) if len(v) > 1 else None) for k, v in values.items()}

    @cached_property
    def front(self) -> tuple[ResultLine, ...]:
        """The Pareto front of metric, speed and memory: no other cell is as good in all and better in one."""
        points = [(line, point) for line in self.lines if (point := self._point(line)) is not None]
        return tuple(
            line
            for line, point in points
            if not any(all(a <= b for a, b in zip(o, point, strict=True)) and o != point for _, o in points)
        )

    def _point(self, line: ResultLine) -> tuple[float, ...] | None:
        """The cell's metric, speed and memory; smaller is better. ``None`` if one is unknown."""
        metrics = line.result.metrics
        speed = next((metrics[name] for name in SPEEDS if name in metrics), None)
        if line.value is None or speed is None or MEMORY not in metrics or line.result.same_as:
            return None
        return self.sign * line.value, -float(speed), float(metrics[MEMORY])

    @property
    def sign(self) -> int:
        return 1 if self.goal == "min" else -1


def results(
    results: Sequence[CellResult],
    forecasts: Mapping[str, Forecast],
    metric: str,
    goal: Literal["min", "max"],
    curves: Mapping[str, Curve],
) -> Results:
    """Ranks the results. ``curves``: of the loss, by names of cells."""
    lines = [
        ResultLine(r, forecasts.get(r.cell.name), value(r, metric), curves.get(r.cell.name, Curve()))
        for r in results
    ]
    unsorted = Results(metric, goal, tuple(lines))

    def place(line: ResultLine) -> tuple[float, tuple[str, ...], int]:
        mean = unsorted.groups.get(line.result.cell.varied, (inf, None))[0] * unsorted.sign
        return (inf if line.value is None else mean), line.result.cell.varied, line.result.cell.repeat

    return Results(metric, goal, tuple(sorted(lines, key=place)))


def loss_curve(rows: Sequence[Row]) -> Curve:
    curve = Curve()
    for row in rows:
        value = row.get("loss")
        if isinstance(value, int | float):
            curve.add(row["step"], float(value))
    return curve


def curves(folder: Path, results: Sequence[CellResult]) -> Iterator[tuple[str, Curve]]:
    """Yields the loss curve of each cell, reading its folder when it is needed."""
    for result in results:
        yield result.cell.name, loss_curve(RowReader(folder / (result.same_as or result.cell.name)).read())


def value(result: CellResult, metric: str) -> float | None:
    """The value by which a cell is ranked; ``None`` unless it is done and the value is a finite number."""
    number = result.seconds if metric == "seconds" else result.metrics.get(metric)
    if result.status != "done" or not isinstance(number, int | float) or not isfinite(number):
        return None
    return float(number)


GROUPS = {"operators": "parallel.operators"}
"""The setting that each group of options sets."""
LAYOUT = {"layout", "derived"}
"""Classes of settings that do not change the numbers of a step."""
COMPARED = ("loss", "grad_norm")
EARLY = 4
"""The number of steps that are compared: later on, training has amplified rounding errors."""
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
    """The gap of each result, all done, to the first of its kind; ``precisions`` by names of cells."""
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
    """The overrides of a cell on which its numbers depend: all but those of the layout."""
    return tuple(word for word in cell.overrides if not _of_the_layout(word.lstrip("+~").partition("=")[0]))


def _of_the_layout(key: str) -> bool:
    return key not in SCALE and bool(LAYOUT & {*class_of(GROUPS.get(key, key))})


def _gap(of: str, its: Sequence[Row], mine: Sequence[Row], allowed: float) -> Gap:
    if [row["step"] for row in its] != [row["step"] for row in mine]:
        return Gap(of, inf, inf, allowed)
    errors = [max(_error(a, b, name) for name in COMPARED) for a, b in zip(its, mine, strict=True)]
    return Gap(of, max(islice(errors, EARLY), default=0.0), max(errors, default=0.0), allowed)


def _error(a: Row, b: Row, name: str) -> float:
    """The relative difference; 0 if both are null, infinite if only one is."""
    one, other = a.get(name), b.get(name)
    if one is None or other is None:
        return 0.0 if one is other else inf
    if one == other:
        return 0.0
    error = abs(one - other) / max(abs(one), abs(other))
    return error if isfinite(error) else inf

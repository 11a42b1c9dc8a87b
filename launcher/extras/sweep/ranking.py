"""Ranks the cells of a sweep: the best one, the Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.forecast import Forecast
from launcher.extras.sweep.metrics_rows import Row, RowReader
from launcher.job import sweep_grid
from launcher.run.curve import Curve

SPEEDS = ("tokens_per_s", "samples_per_s")
MEMORY = "memory_mb"


@dataclass(frozen=True)
class ResultLine:
    """A cell in the results. ``value``: its metric, if the cell is done; ``curve``: the curve of its loss."""

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
        """Returns the cell's metric, speed and memory; smaller is better. ``None`` if one is unknown."""
        metrics = line.result.metrics
        speed = next((metrics[name] for name in SPEEDS if name in metrics), None)
        if line.value is None or speed is None or MEMORY not in metrics or line.result.same_as:
            return None
        return self.sign * line.value, -float(speed), float(metrics[MEMORY])

    @property
    def sign(self) -> int:
        return 1 if self.goal == "min" else -1


def ranked_results(
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
    """Returns the value by which a cell is ranked.

    Returns ``None`` unless it is done and the value is a finite number.
    """
    number = result.seconds if metric == "seconds" else result.metrics.get(metric)
    if result.status != "done" or not isinstance(number, int | float) or not isfinite(number):
        return None
    return float(number)

"""Strategies of operators that follow from the layouts of parameters in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from shlex import quote
from typing import Any

from launcher.errors import Problem
from launcher.plan.tensor_parallel.module_strategies import KEY as OPERATORS
from launcher.plan.tensor_parallel.module_strategies import Operator, resolve, unwrapped
from launcher.plan.tensor_parallel.strategy_lookup import StrategyLookup
from launcher.plan.tensor_parallel.strategy_reader import TP, Axes, axes_text
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout, rank_spans
from launcher.plan.values.model_graph import ModelStructure
from launcher.plan.values.resolved import NO_FILE, Origins, StrategyOrigin

KEY = "parallel.param_strategy.load"
SHARD = "dp_shard"


@dataclass(frozen=True)
class ParamLayouts:
    """The layouts of parameters by name, from the file ``path``."""

    path: str
    layouts: Mapping[str, Layout]


def resolved(
    config: Mapping[str, Any],
    skeleton: ModelStructure,
    grid: Grid,
    file: ParamLayouts,
    origins: Origins = NO_FILE,
) -> tuple[tuple[Operator, ...], list[Problem]]:
    """Returns the operators of ``config``, and one for each other module with a parameter that the file cuts.

    ``origins``: the files that have strategies of ``config``. A parameter in ``config`` and in ``file`` must
    have the same layout in both; everything else is a problem.
    """
    file_axes, problems = _over_tp(file, skeleton, grid)
    if problems:
        return (), problems

    # modules without a strategy in the request follow the file
    config, origins, problems = unwrapped(config, skeleton, origins)
    cut: dict[str, dict[str, Any]] = {}
    lookup = StrategyLookup.from_config(config, origins)
    own = {p.name: file_axes[p.same_as] for p in skeleton.params if p.same_as in file_axes and not p.buffer}
    for name, axes in own.items():
        module, _, parameter = name.rpartition(".")
        if lookup.key(module) is None:
            cut.setdefault(module, {})[parameter] = [list(dim) or None for dim in axes]
    follows = {m: row for m, row in cut.items() if any(any(axes) for axes in row.values())}
    more = dict.fromkeys(follows, StrategyOrigin(KEY, file.path))
    operators, wrong = resolve({**config, **follows}, skeleton, grid, {**origins, **more})
    problems += wrong
    return operators, problems or [*_conflicts(operators, own, file.path)]


def _conflicts(operators: Sequence[Operator], own: Mapping[str, Axes], path: str) -> Iterator[Problem]:
    """Yields parameters that an operator cuts differently from the file, at most one per strategy."""
    reported: set[str] = set()
    for o in operators:
        for parameter, axes in o.weights:
            name = f"{o.module}.{parameter}"
            theirs = own.get(name, axes)
            if theirs == axes or o.key in reported:
                continue
            reported.add(o.key)
            text = f"{name} has two layouts: {axes_text(axes)} here, {axes_text(theirs)} in {path} ({KEY})"
            cure = quote(f"~{o.where}") if o.where.startswith(OPERATORS) else ""
            yield Problem(o.where, text, cure)


def _over_tp(
    file: ParamLayouts, skeleton: ModelStructure, grid: Grid
) -> tuple[dict[str, Axes], list[Problem]]:
    """Returns by first name which dims ``tp`` cuts, and a problem for every layout that is not possible."""
    firsts = {p.name: p.same_as for p in skeleton.params}
    out: dict[str, Axes] = {}
    problems = []
    for name, layout in file.layouts.items():
        if name not in firsts:
            continue
        split = on_grid(layout, grid)
        if split is None or not all(_had(dim, axes) for dim, axes in enumerate(split)):
            text = f"{file.path}: {name} is cut {cut_text(layout)}, which does not fit {_sizes(grid)}: "
            text += f"{TP} can cut one dim, and then {SHARD} dim 0"
            problems.append(Problem(KEY, text))
            continue
        axes = tuple((TP,) if TP in dim else () for dim in split)
        if out.setdefault(firsts[name], axes) != axes:
            text = f"{file.path}: {name} is the same tensor as {firsts[name]}, but is cut differently"
            problems.append(Problem(KEY, text))
    return out, problems


def _had(dim: int, axes: tuple[str, ...]) -> bool:
    return axes in ((), (TP,)) or (dim == 0 and axes in ((SHARD,), (TP, SHARD)))


def cut_text(layout: Layout) -> str:
    """Returns as text into how many parts each dim is cut, and the strides between their ranks.

    >>> cut_text(Layout(Grid.of(x=2, y=4), (8, 8), (("y", "x"), ())))
    '[4 x 2, whole] (ranks [1, 4] apart)'
    """
    cuts = rank_spans(layout)
    parts = ", ".join(" x ".join(str(n) for _, n in dim) or "whole" for dim in cuts)
    apart = [stride for dim in cuts for stride, _ in dim]
    return f"[{parts}] (ranks {apart} apart)"


def _sizes(grid: Grid) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in grid.axes)


def on_grid(layout: Layout, grid: Grid) -> Axes | None:
    """Returns the axes of ``grid`` that cut each dim into the same parts on the same ranks, or ``None``.

    >>> grid = Grid.of(dp=2, tp=4)
    >>> on_grid(Layout(Grid.of(x=8), (8, 8), ((), ("x",))), grid)
    ((), ('dp', 'tp'))
    >>> on_grid(Layout(Grid.of(x=4, y=2), (8, 8), (("x",), ())), grid) is None
    True
    """
    out = []
    for dim in rank_spans(layout):
        axes: list[str] = []
        for span in dim:
            inside = [axis for axis, part in grid.spans.items() if span.includes(part)]
            if prod(grid[axis] for axis in inside) != span.size:
                return None
            axes += inside
        out.append(tuple(axes))
    return tuple(out)


def degree(layouts: Iterable[Layout], *, sharded: bool) -> int:
    """Returns the size of ``tp`` that ``layouts`` need: the largest cut of a dim over consecutive ranks.

    ``sharded``: dim 0 may be sharded over data-parallel ranks, so its cuts do not count.

    >>> grid = Grid.of(dp=2, tp=4)
    >>> degree([Layout(grid, (8, 8), ((), ("tp",))), Layout(grid, (8,), (("dp",),))], sharded=True)
    4
    """
    first = 1 if sharded else 0
    sizes = [n for each in layouts for dim in rank_spans(each)[first:] for stride, n in dim if stride == 1]
    return max(sizes, default=1)


def fits_axes(layouts: Iterable[Layout], tp: int) -> bool:
    """Returns true if ``tp`` consecutive ranks cut at most one dim of each layout, others only dim 0.

    >>> grid = Grid.of(x=2, y=4)
    >>> fits_axes([Layout(grid, (8, 8), (("x",), ("y",)))], tp=4)
    True
    >>> fits_axes([Layout(grid, (8, 8), (("y",), ("x",)))], tp=4)
    False
    """
    return all(_over_axes(layout, tp) for layout in layouts)


def _over_axes(layout: Layout, tp: int) -> bool:
    cut_by_tp = 0
    for d, dim in enumerate(rank_spans(layout)):
        for at, (stride, n) in enumerate(dim):
            if tp > 1 and (stride, n) == (1, tp) and at == 0:
                cut_by_tp += 1
            elif d > 0 or stride < tp or at < len(dim) - 1:
                return False
    return cut_by_tp < 2

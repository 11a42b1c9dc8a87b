"""Layouts and strategies that come from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from shlex import quote
from typing import Any

from launcher.errors import Problem
from launcher.plan.tensor_parallel.operators import KEY as OPERATORS
from launcher.plan.tensor_parallel.operators import (
    Operator,
    StrategyLookup,
    TensorParallelPlan,
    resolve,
    unwrapped,
)
from launcher.plan.tensor_parallel.strategy_reader import TP, Axes, Reading, axes_text
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout, rank_spans
from launcher.plan.values.model_graph import ModelStructure
from launcher.plan.values.resolved import NO_FILE, Origins, StrategyOrigin

FORMAT, VERSION = "launcher.operators", 2
OVER_TP = 1
"""The version before operators could have their own device matrices."""

NAME_KEY = "key"
"""The field of a row with the name or glob under which its strategy was written."""

ASSIGNED = "assigned"
"""The field of a row that marks a strategy as assigned by a mode: no user wrote it."""

SEARCHED = "searched"

Rows = Mapping[str, Mapping[str, Any]]
"""The strategy of each module, in the form of ``parallel.operators``."""


@dataclass(frozen=True)
class Searched:
    """What a search records about the strategies that it chose.

    ``rows`` is their digest, which differs after an edit; ``reasons`` are the search's explanations.
    """

    rows: str
    reasons: tuple[str, ...]


def digest(rows: Rows) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def as_json(flow: TensorParallelPlan, tp: int) -> str:
    """Returns the resolved ``parallel.operators``, without globs and slices, one module per line."""
    return text({s.operator.module: _row(s.operator) for s in flow.spreads}, tp)


def text(rows: Rows, tp: int | None, searched: Searched | None = None) -> str:
    """Returns the text of a file; ``tp``: the size of that axis, if rows name it."""
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION} | ({} if tp is None else {"tp": tp})
    if searched is not None:
        head[SEARCHED] = {"rows": searched.rows, "reasons": searched.reasons}
    lines = [f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items()]
    listed = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return "{\n" + "".join(lines) + '  "operators": {' + (f"\n{listed}\n  " if rows else "") + "}\n}\n"


def _row(o: Operator) -> dict[str, Any]:
    reading = Reading(o.input, o.output, o.weights)
    parts = [*reading.weights, ("input", reading.input), ("output", reading.output)]
    row: dict[str, Any] = {name: _dims(axes) for name, axes in parts if axes is not None}
    return row if o.key == o.module else {**row, NAME_KEY: o.key}


def _dims(axes: Axes) -> list[Any]:
    """Returns ``axes`` in the form of a strategy by axis names."""
    out: list[Any] = []
    for dim in axes:
        if len(dim) > 1:
            out.append(list(dim))
        else:
            out.append(dim[0] if dim else None)
    return out


def parsed(data: Any, setting: str, path: str) -> tuple[int | None, dict[str, Any], Origins]:
    """Returns the size of ``tp``, if the file has one, and the strategy of each module with its origin.

    The strategies are not checked here, but together with those of ``parallel.operators``. ``setting`` names
    the file ``path``. Raises ``ValueError`` if ``data`` is not a file of operator strategies.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError(f'not a file of operator strategies: "format" is not "{FORMAT}"')
    version = data.get("version")
    if type(version) is not int or version not in (OVER_TP, VERSION):
        supported = f"this launcher reads versions {OVER_TP} and {VERSION}"
        raise ValueError(f"version {str(version)[:40]}; {supported}")

    # the axis that the rows name
    tp, operators = data.get("tp"), data.get("operators")
    if (tp is not None or version == OVER_TP) and (type(tp) is not int or tp < 1):
        raise ValueError(f'"tp" is {json.dumps(tp)}: should be a whole number of ranks')
    if not isinstance(operators, Mapping) or not all(isinstance(row, Mapping) for row in operators.values()):
        raise ValueError('"operators" should be an object: {module: strategy}')
    origins = {name: _origin(row, setting, path) for name, row in operators.items()}
    return tp, {name: _strategy(row) for name, row in operators.items()}, origins


def searched(data: Any) -> Searched | None:
    """Returns what a search recorded in a file, or ``None``; its reasons only if the rows are unedited.

    Raises ``ValueError`` if the record has another form.
    """
    record = data.get(SEARCHED)
    if record is None:
        return None
    reasons = record.get("reasons") if isinstance(record, Mapping) else None
    if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
        raise ValueError(f'"{SEARCHED}" should be an object: {{"rows": digest, "reasons": [text]}}')
    rows = digest(data["operators"])
    return Searched(rows, tuple(reasons) if record.get("rows") == rows else ())


def _strategy(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in (NAME_KEY, ASSIGNED)}


def _origin(row: Mapping[str, Any], setting: str, path: str) -> StrategyOrigin:
    key, assigned = str(row.get(NAME_KEY, "")), row.get(ASSIGNED) is True
    return StrategyOrigin(setting, path, key=key, assigned=assigned)


KEY = "parallel.param_strategy.load"
SHARD = "dp_shard"


@dataclass(frozen=True)
class ParamLayouts:
    """The layouts of parameters by name, as the file ``path`` has them."""

    path: str
    layouts: Mapping[str, Layout]


def resolved(
    config: Mapping[str, Any],
    skeleton: ModelStructure,
    grid: Grid,
    file: ParamLayouts,
    origins: Origins = NO_FILE,
) -> tuple[tuple[Operator, ...], list[Problem]]:
    """Returns the operators of ``config``, and one for each other module of which the file cuts a parameter.

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
            text = f"{name} is {axes_text(axes)} here, and {axes_text(theirs)} in {path} of {KEY}"
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
            text = f"{file.path}: {name} is cut {cut_text(layout)}, which is impossible on {_sizes(grid)}: "
            text += f"{TP} cuts one dim, and {SHARD} dim 0 of the shards"
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
    """Whether ``tp`` consecutive ranks cut at most one dim of each layout, data-parallel ranks only dim 0.

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

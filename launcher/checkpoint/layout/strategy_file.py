"""Reads and writes strategies as JSON files, one per pipeline stage, with one tensor per line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from launcher.checkpoint.layout.strategy import Entry, Strategy, row, stages
from launcher.checkpoint.tensorfile.disk import parsed, read_bytes, write_text
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from launcher.untrusted.files import brief

FORMAT, VERSION = "launcher.strategy", 2
ONE_GRID = 1
"""The version of files whose layouts all have one grid; every version of launcher reads it."""
MOST_LISTED = 20  # the most missing stages that a message lists


@dataclass(frozen=True)
class StageStrategy:
    """The content of one file: the tensors that ``stages`` hold. ``origin`` names the file in messages."""

    origin: str
    stages: tuple[int, ...]
    strategy: Strategy


def stage_file(stage: int) -> str:
    """Returns the name of the file of one stage."""
    return f"stage{stage}.json"


def dump(strategy: Strategy, folder: Path) -> tuple[Path, ...]:
    """Writes ``stage<S>.json`` for every stage; a tied tensor is in the file of each stage that holds it."""
    make_folder(folder)
    files = tuple(folder / stage_file(s) for s in range(strategy.stages))
    for stage, path in enumerate(files):
        entries = {n: e for n, e in strategy.entries.items() if stage in stages(e.layout)}
        write_text(path, text(Strategy(strategy.grid, entries), (stage,)))
    return files


def load(path: Path) -> Strategy:
    """Reads a merged file, or a folder with one file per stage. Raises ``ValueError``, see ``merge``."""
    if not path.is_dir():
        return merge([read(path)])
    files = sorted(path.glob("*.json"))
    if not files:
        raise ValueError(f"{path}: no strategy files (*.json) in this folder")
    return merge([read(file) for file in files])


def merge(parts: Sequence[StageStrategy]) -> Strategy:
    """Merges the files of stages into one strategy.

    Raises ``ValueError`` if two files disagree, a stage is missing, or a tensor is missing from the file of
    one of its stages.
    """
    assert parts
    first = parts[0]
    entries: dict[str, Entry] = {}
    origin: dict[str, str] = {}

    # take each tensor from the first file that has it; all other files must agree
    for part in parts:
        if part.strategy.grid != first.strategy.grid:
            axes = [dict(p.strategy.grid.axes) for p in (first, part)]
            raise ValueError(
                f"{first.origin} and {part.origin} disagree on the grid: {axes[0]} and {axes[1]}"
            )

        for name, entry in part.strategy.entries.items():
            if entries.setdefault(name, entry) != entry:
                rows = [json.dumps(_row(e, first.strategy.grid)) for e in (entries[name], entry)]
                raise ValueError(
                    f"{origin[name]} and {part.origin} disagree on {name}: {rows[0]} and {rows[1]}"
                )
            origin.setdefault(name, part.origin)

    # every stage must exist, with all tensors that it holds
    _check_stages(parts, first.strategy.stages)
    strategy = Strategy(first.strategy.grid, entries)
    for part in parts:
        _check_home(part)
    for part in parts:
        _check_listed(part, strategy, origin)
    return strategy


def text(strategy: Strategy, of: tuple[int, ...]) -> str:
    """Returns the content of the file of the stages ``of``.

    It has one tensor per line, so that a change of one layout changes one line.
    """
    version = VERSION if strategy.other_grids else ONE_GRID
    head = {"format": FORMAT, "version": version, "stages": of, "grid": dict(strategy.grid.axes)}
    lines = [f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items()]
    listed = {name: json.dumps(_row(entry, strategy.grid)) for name, entry in strategy.entries.items()}
    rows = ",\n".join(f"    {json.dumps(name)}: {fields}" for name, fields in listed.items())
    tensors = f"{{\n{rows}\n  }}" if rows else "{}"
    return "{\n" + "".join(lines) + f'  "tensors": {tensors}\n' + "}\n"


def _row(entry: Entry, common: Grid) -> dict[str, Any]:
    """Returns the entry as a JSON object, with its grid (outermost axis first) if the file's differs."""
    own = entry.layout.grid
    return row(entry) if own == common else {**row(entry), "grid": dict(own.axes)}


def read(path: Path) -> StageStrategy:
    """Reads one strategy file. Raises ``ValueError`` naming the file if it is not one of ours."""
    return _parse(str(path), parsed(path, read_bytes(path), "not a strategy file: "))


def _parse(origin: str, data: Any) -> StageStrategy:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'{origin}: not a strategy file: "format" is not "{FORMAT}"')
    if type(data.get("version")) is not int or data["version"] not in (ONE_GRID, VERSION):
        version = brief(data.get("version"))
        reason = f"version {version}; this launcher reads versions {ONE_GRID} and {VERSION}"
        raise ValueError(f"{origin}: {reason}")

    try:
        grid = _grid(data["grid"])
        entries = {name: _entry(grid, fields) for name, fields in data["tensors"].items()}
        return StageStrategy(origin, _integers(data["stages"]), Strategy(grid, entries))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{origin}: a field is missing or of the wrong type: {error}") from error
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _grid(sizes: Any) -> Grid:
    return Grid(tuple((str(axis), _integer(n)) for axis, n in sizes.items()))


def _entry(common: Grid, fields: Any) -> Entry:
    split = tuple(map(_texts, fields["split"]))
    at = tuple((axis, _integers(coords)) for axis, coords in fields["at"].items())
    grid = _grid(fields["grid"]) if "grid" in fields else common
    layout = Layout(grid, _integers(fields["shape"]), split, at)
    return Entry(layout, fields["dtype"], fields["kind"], _texts(fields["aliases"]))


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise TypeError(f"{brief(values)} is not a list of names")
    return tuple(values)


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(_integer(n) for n in values)


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{brief(value)} is not a whole number")
    return value


def _check_stages(parts: Sequence[StageStrategy], count: int) -> None:
    """Raises ``ValueError`` if a stage is missing.

    This runs before any other loop over stages. A file may claim any number of stages, but after this check
    each of them is listed in a file, so their number is bounded.
    """
    listed = {stage for part in parts for stage in part.stages}
    missing = list(islice((stage for stage in range(count) if stage not in listed), MOST_LISTED + 1))
    if missing:
        where = ", ".join(part.origin for part in parts)
        more = " and more" if len(missing) > MOST_LISTED else ""
        text = f"{where}: stage {', '.join(map(str, missing[:MOST_LISTED]))}{more} of {count} is missing"
        raise ValueError(f"{text}; put the strategy file of every stage into one folder")


def _check_home(part: StageStrategy) -> None:
    for name, entry in part.strategy.entries.items():
        home = list(stages(entry.layout))
        if not {*part.stages} & {*home}:
            own = f"this file is for stages {list(part.stages)}"
            raise ValueError(f"{part.origin}: {name} belongs to stages {home}, but {own}")


def _check_listed(part: StageStrategy, strategy: Strategy, origin: dict[str, str]) -> None:
    """Raises ``ValueError`` if a tensor of several stages is missing from the file of one of them."""
    for name, entry in strategy.entries.items():
        here = sorted({*part.stages} & {*stages(entry.layout)})
        if here and name not in part.strategy.entries:
            raise ValueError(
                f"{part.origin}: {name} is missing; {origin[name]} says that stage {here[0]} holds it too"
            )

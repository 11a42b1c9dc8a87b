"""Strategies: the layout of every tensor of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import xxhash

from launcher.checkpoint.layout.shards import home
from launcher.plan.values.dtypes import ITEMSIZE
from launcher.plan.values.grid import Grid, RankSpan
from launcher.plan.values.layout import Layout, rank_spans
from launcher.plan.values.tensor_spec import TensorSpec


def meaning(layout: Layout) -> list[object]:
    """Returns for each dim the spans of ranks that cut it, outermost first, then the pinned spans.

    Two layouts with equal results put the same parts on the same ranks.

    >>> from launcher.plan.values.grid import Grid
    >>> a = Layout(Grid.of(pp=2, dp=2, tp=2), (8,), (("dp", "tp"),), (("pp", (1,)),))
    >>> b = Layout(Grid.of(s=2, d0=1, d1=4), (8,), (("d1",),), (("s", (1,)),))
    >>> meaning(a) == meaning(b)
    True
    >>> meaning(a)
    [((RankSpan(stride=1, size=4),),), [(4, 2, (1,))]]
    """
    spans = layout.grid.spans
    pinned = [
        (*spans[axis], coords)
        for axis, coords in layout.at
        if axis in spans and len(coords) < spans[axis].size
    ]
    return [rank_spans(layout), sorted(pinned)]


Kind = Literal["param", "buffer", "optim"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STAGE = "pp"  # the axis whose coordinates are pipeline stages
RANKS = 1 << 20  # the most ranks of a grid: a file that claims more would take too long


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint; ``aliases`` are the further names of a tied tensor."""

    layout: Layout
    dtype: str
    kind: Kind = "param"
    aliases: tuple[str, ...] = ()

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.layout.shape, self.dtype)


@dataclass(frozen=True)
class Strategy:
    """The layouts of all tensors of a checkpoint. Raises ``ValueError`` that lists every flaw.

    ``entries`` are keyed by first name, in definition order. ``grid`` is the grid of most layouts; a layout
    may instead have another one, a device matrix, over the same ranks and with the same stages.
    """

    grid: Grid
    entries: Mapping[str, Entry]

    def __post_init__(self) -> None:
        flaws = [*_flaws(self)]
        if flaws:
            raise ValueError("\n".join(flaws))

    @cached_property
    def named(self) -> Mapping[str, str]:
        """Maps every name, aliases included, to the first name of its tensor."""
        return {n: first for first, entry in self.entries.items() for n in (first, *entry.aliases)}

    @cached_property
    def homes(self) -> Mapping[Grid, Mapping[tuple[tuple[str, int], ...], list[str]]]:
        """The first names by grid, then by ``home`` of their layouts: a rank needs few of these groups."""
        out: dict[Grid, dict[tuple[tuple[str, int], ...], list[str]]] = {}
        for name, entry in self.entries.items():
            of_grid = out.setdefault(entry.layout.grid, {})
            of_grid.setdefault(home(entry.layout), []).append(name)
        return out

    @cached_property
    def other_grids(self) -> tuple[Grid, ...]:
        """The grids of layouts that differ from the strategy's grid."""
        grids = dict.fromkeys(entry.layout.grid for entry in self.entries.values())
        return tuple(grid for grid in grids if grid != self.grid)

    @cached_property
    def digest(self) -> str:
        """A digest of the layouts, in any order."""
        rows = {name: row(entry) for name, entry in self.entries.items()}
        for name, entry in self.entries.items():
            if entry.layout.grid != self.grid:
                rows[name]["grid"] = entry.layout.grid.axes  # a list: the order of axes counts
        return xxhash.xxh3_128_hexdigest(json.dumps([self.grid.axes, rows], sort_keys=True).encode())

    @cached_property
    def meaning(self) -> str:
        """A digest that is equal if two strategies put the same parts of the same tensors on the same ranks.

        It does not depend on the names of axes, on aliases, or on the kinds of tensors, because strategy
        files of other programs do not contain these.
        """
        rows = {n: [e.dtype, list(e.layout.shape), meaning(e.layout)] for n, e in self.entries.items()}
        return xxhash.xxh3_128_hexdigest(json.dumps([self.grid.size, rows], sort_keys=True).encode())

    @property
    def stages(self) -> int:
        return self.grid.sizes.get(STAGE, 1)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of which the checkpoint has a tensor."""
        kinds = {entry.kind for entry in self.entries.values()}
        return tuple(kind for kind in KINDS if kind in kinds)

    def only(self, *kinds: Kind) -> Strategy:
        """Returns the strategy with only the entries of these kinds."""
        return replace(self, entries={n: e for n, e in self.entries.items() if e.kind in kinds})

    def entries_of(self, rank: int) -> dict[str, Entry]:
        """Returns the entries that ``rank`` has in memory, replicas and empty pieces included."""
        return {n: e for n, e in self.entries.items() if e.layout.holds(rank)}


def row(entry: Entry) -> dict[str, Any]:
    """Returns the entry as a JSON object, without the grid of its layout."""
    return {
        "dtype": entry.dtype,
        "shape": list(entry.layout.shape),
        "split": [list(axes) for axes in entry.layout.split],
        "at": {axis: list(coords) for axis, coords in entry.layout.at},
        "kind": entry.kind,
        "aliases": list(entry.aliases),
    }


def stages(layout: Layout) -> tuple[int, ...]:
    """Returns the pipeline stages that hold the tensor; stage 0 if the grid has no stages."""
    count = layout.grid.sizes.get(STAGE, 1)
    return tuple(dict(layout.at).get(STAGE, range(count)))


def single(strategy: Strategy) -> Strategy:
    """Returns the strategy of the same tensors as full tensors on one rank."""
    grid = Grid(tuple((axis, 1) for axis, _ in strategy.grid.axes))
    return Strategy(grid, {name: relaid(entry, grid, (), ()) for name, entry in strategy.entries.items()})


def relaid(
    entry: Entry, grid: Grid, axes: tuple[str, ...], at: tuple[tuple[str, tuple[int, ...]], ...]
) -> Entry:
    """Returns ``entry`` laid out over ``grid``: ``axes`` cut its dim 0, ``at`` pins coordinates."""
    shape = entry.layout.shape
    split = (axes, *((),) * (len(shape) - 1)) if shape else ()
    return replace(entry, layout=Layout(grid, shape, split, at))


def match(src: Strategy, dst: Strategy) -> dict[str, str]:
    """Returns for each entry of ``dst`` the first name of the entry of ``src`` that it is read from.

    Entries match if they have a name in common, aliases included. Raises ``ValueError`` with every name that
    only one side has, and every dtype or shape that differs.
    """
    out = {}
    differences = []
    for name, entry in dst.entries.items():
        firsts = sorted({src.named[n] for n in (name, *entry.aliases) if n in src.named})
        if len(firsts) > 1:
            text = f"{len(firsts)} tensors in the source: {', '.join(firsts)}"
            differences.append(f"{name}: one tied tensor in the destination, but {text}")
        elif firsts:
            out[name] = firsts[0]
            differences += _differences(name, src.entries[firsts[0]].spec, entry.spec)

    # names that only one side has
    lost = sorted(src.entries.keys() - {src.named[n] for n in dst.named if n in src.named})
    if lost:
        differences.append(f"only in the source: {', '.join(lost)}")
    absent = sorted(n for n, e in dst.entries.items() if not src.named.keys() & {n, *e.aliases})
    if absent:
        differences.append(f"only in the destination: {', '.join(absent)}")

    if differences:
        raise ValueError("the strategies do not match:\n" + "\n".join(f"  {f}" for f in differences))
    return out


def _differences(name: str, src: TensorSpec, dst: TensorSpec) -> list[str]:
    out = []
    if src.shape != dst.shape:
        out.append(f"{name}: shape {list(src.shape)} in the source, {list(dst.shape)} in the destination")
    if src.dtype != dst.dtype:
        dtypes = f"{src.dtype} in the source, {dst.dtype} in the destination"
        out.append(f"{name}: {dtypes}; dtypes cannot be changed here")
    return out


def _flaws(strategy: Strategy) -> Iterable[str]:
    sizes = strategy.grid.sizes
    if len(sizes) != len(strategy.grid.axes) or any(n < 1 for n in sizes.values()):
        yield f"grid {dict(strategy.grid.axes)}: axes need different names and sizes of at least 1"
        return
    if strategy.grid.size > RANKS:
        yield f"grid {dict(strategy.grid.axes)}: {strategy.grid.size} ranks; at most {RANKS} are supported"
        return

    seen: set[str] = set()
    for name, entry in strategy.entries.items():
        for n in (name, *entry.aliases):
            if n in seen:
                yield f"{n}: two tensors have this name"
            seen.add(n)
        yield from (f"{name}: {flaw}" for flaw in _entry_flaws(entry, strategy.grid))


def _entry_flaws(entry: Entry, grid: Grid) -> Iterable[str]:
    layout = entry.layout
    sizes = layout.grid.sizes
    pinned = dict(layout.at)
    if layout.grid != grid:
        over = dict(layout.grid.axes)
        if len(sizes) != len(layout.grid.axes) or any(n < 1 for n in sizes.values()):
            yield f"grid {over}: axes need different names and sizes of at least 1"
            return
        if layout.grid.size != grid.size or _stages_at(layout.grid) != _stages_at(grid):
            yield f"its grid {over} has other ranks or stages than the strategy's grid {dict(grid.axes)}"
            return

    # its dtype, kind and rank
    if entry.dtype not in ITEMSIZE:
        yield f"dtype {entry.dtype} is unknown; supported dtypes: {', '.join(ITEMSIZE)}"
    if entry.kind not in KINDS:
        yield f"kind {entry.kind} is not one of {', '.join(KINDS)}"
    if len(layout.split) != len(layout.shape):
        yield f"split has {len(layout.split)} dims, shape {list(layout.shape)} has {len(layout.shape)}"

    # its axes and coordinates
    for axis in sorted({*layout.axes, *pinned} - sizes.keys()):
        yield f"axis {axis} is not in the grid {dict(layout.grid.axes)}"
    for axis in sorted({a for a in layout.axes if layout.axes.count(a) > 1 or a in pinned}):
        yield f"axis {axis} cuts it and is used twice"
    for axis, coords in pinned.items():
        size = sizes.get(axis)
        if size is not None and (not coords or list(coords) != sorted({n for n in coords if n < size})):
            yield f"at {axis} {list(coords)}: it needs coordinates, in ascending order and below {size}"


def _stages_at(grid: Grid) -> RankSpan:
    """Returns the number of stages, and how many ranks apart neighboring stages are."""
    return grid.spans.get(STAGE, RankSpan(grid.size, 1))


def tensor_specs(strategy: Strategy) -> dict[str, TensorSpec]:
    """Returns the specs of full tensors, by every name."""
    return {name: strategy.entries[first].spec for name, first in strategy.named.items()}

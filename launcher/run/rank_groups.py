"""``parallel.group_file``: which ranks communicate with each other, and which share a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.plan.cut.tensor_placement import Placed, Tie
from launcher.plan.values.grid import Grid

FORMAT, VERSION = "launcher.groups", 1
REPLICAS = ("dp_replicate", "dp_shard")
USES = {
    "pp": "activations and their gradients between stages",
    "dp_replicate": "gradients summed over replicas",
    "dp_shard": "sharded parameters gathered, their gradients reduced",
    "dp": "gradients of unsharded parameters summed over all of them",
    "tp": "pieces of cut operators",
    "tied": "gradients of tied parameters summed over stages",
}


@dataclass(frozen=True)
class Groups:
    """The groups of one kind; each rank is in at most one of them."""

    name: str
    axes: tuple[str, ...]
    use: str
    ranks: tuple[tuple[int, ...], ...]


def groups(grid: Grid, ties: Sequence[Tie]) -> tuple[Groups, ...]:
    """Returns the kinds of groups that have more than one rank somewhere."""
    return tuple(g for g in _groups(grid, ties) if any(len(r) > 1 for r in g.ranks))


def _groups(grid: Grid, ties: Sequence[Tie]) -> Iterator[Groups]:
    for axis, _ in grid.axes:
        yield _along(grid, axis, (axis,))
    if all(grid[axis] > 1 for axis in REPLICAS):
        yield _along(grid, "dp", REPLICAS)
    for rows in dict.fromkeys(t.ranks for t in ties):
        coords = [grid.coords(rank) for rank in range(grid.size)]
        ranks = dict.fromkeys(tuple(grid.rank(**at | {"pp": pp}) for pp in rows) for at in coords)
        yield Groups(f"tied {','.join(map(str, rows))}", ("pp",), USES["tied"], tuple(ranks))


def _along(grid: Grid, name: str, axes: tuple[str, ...]) -> Groups:
    ranks = dict.fromkeys(grid.peers(r, *axes) for r in range(grid.size))
    return Groups(name, axes, USES[name], tuple(ranks))


def alike(grid: Grid, params: Sequence[Placed]) -> tuple[tuple[int, ...], ...]:
    """Returns sets of ranks that hold the same pieces of every tensor, so that they share a checkpoint."""
    same: dict[object, list[int]] = {}
    for rank in range(grid.size):
        boxes = tuple(p.layout.box(rank) for p in params)
        same.setdefault(boxes, []).append(rank)
    return tuple(map(tuple, same.values()))


def as_json(grid: Grid, ties: Sequence[Tie], params: Sequence[Placed]) -> str:
    """Returns the groups as JSON, one kind of group a line."""
    head = {"format": FORMAT, "version": VERSION, "grid": dict(grid.axes)}
    lines = [f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in head.items()]
    rows = ",\n".join(f"    {json.dumps(g.__dict__)}" for g in groups(grid, ties))
    listed = f"[\n{rows}\n  ]" if rows else "[]"
    same = json.dumps(alike(grid, params))
    return "{\n" + "".join(lines) + f'  "groups": {listed},\n  "same_checkpoint": {same}\n}}\n'

"""Makes replicas equal: the first rank that holds a shard broadcasts it to the other ranks that hold it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from launcher.errors import RunError
from launcher.parallel import byte_collectives
from launcher.parallel.local_tensors import local
from launcher.parallel.mesh import mine
from launcher.parallel.user_script import Net, parallel_model_in
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout

AT_ONCE = 64 << 20
"""The most bytes of one collective; a larger tensor is sent in a collective of its own."""


@dataclass(frozen=True)
class Sent:
    """Counts what one rank has broadcast or received."""

    tensors: int
    collectives: int
    nbytes: int


def parameter_broadcast(net: nn.Module, layout: Any, cur_rank: int = 0, initial_rank: int = 0) -> Sent:
    """Broadcasts each parameter, within its stage, from the first rank that holds it to its other replicas.

    ``layout`` has the layout of every parameter of the full model: ``{p.name: p.layout for p in
    plan.params}``, or the content of a file: the result of ``launcher.checkpoint.build_searched_strategy``, a
    ``Strategy``, its entries, or the JSON of a strategy file of ours. Every rank calls this with its own rank
    as ``cur_rank`` and the lowest rank of its stage as ``initial_rank``. Raises ``ValueError`` if one of
    these ranks is wrong, and if ``net`` lacks a parameter or has it in another layout. Raises ``RunError`` if
    two replicas differ afterwards.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net: {type(net).__name__} is not a torch.nn.Module")
    net = parallel_model_in(net) or net
    layout = layouts(layout)

    # the layouts describe the ranks of this process group
    rank, world = dist.get_rank(), dist.get_world_size()
    if cur_rank != rank:
        raise ValueError(f"cur_rank: {cur_rank} is not the rank of this process, {rank}")
    grids = dict.fromkeys(lay.grid for lay in layout.values())
    for grid in grids:
        if grid.size != world:
            raise ValueError(f"layout: it describes {grid.size} ranks, but the process group has {world}")
        first = _first_of_stage(grid, rank)
        if initial_rank != first:
            text = f"initial_rank: {initial_rank} is not the first rank of the stage of rank {rank}"
            raise ValueError(f"{text}, {first}")

    # this rank has the tensors that the layouts place here
    local_tensors = _local_copies(net)
    for name, lay in layout.items():
        if lay.holds(rank) and name not in local_tensors:
            near = ", ".join(list(local_tensors)[:3])
            raise ValueError(f"layout: net has no parameter {name} on rank {rank}; it has {near} ...")
    if isinstance(net, Net):
        _check_alike(layout, net)
    return share({n: local_tensors[n] for n, lay in layout.items() if lay.holds(rank)}, layout)


def _first_of_stage(grid: Grid, rank: int) -> int:
    """Returns the lowest rank of the stage of ``rank``; without stages, of all ranks."""
    coords = grid.coords(rank)
    return grid.rank(**{axis: coords[axis] if axis == "pp" else 0 for axis in coords})


def layouts(source: Any) -> dict[str, Layout]:
    """Returns layouts by name, from any form that ``parameter_broadcast`` takes. Raises ``TypeError``."""
    rows = getattr(source, "entries", source)
    grid = None
    if _is_file(rows):
        grid = _grid(rows)
        rows = rows["tensors"]
    if not isinstance(rows, Mapping):
        text = f"expected a mapping of names to layouts, got {type(source).__name__}"
        raise TypeError(f"layout: {text}; launcher.checkpoint.build_searched_strategy reads one from a file")
    return {str(name): _staged(_layout(str(name), row, grid)) for name, row in rows.items()}


def _grid(row: Mapping[str, Any]) -> Grid:
    return Grid(tuple(row["grid"].items()))


def _is_file(rows: Any) -> bool:
    """Returns true if ``rows`` is the JSON of a strategy file of ours."""
    if not isinstance(rows, Mapping):
        return False
    return all(isinstance(rows.get(part), Mapping) for part in ("tensors", "grid"))


def _staged(layout: Layout) -> Layout:
    """Returns a layout in which every stage has its own copy, if the tensor is on all stages."""
    if "pp" not in layout.grid.sizes or "pp" in (*dict(layout.at), *layout.axes):
        return layout
    return replace(layout, at=(("pp", tuple(range(layout.grid["pp"]))), *layout.at))


def _layout(name: str, row: Any, grid: Grid | None) -> Layout:
    layout = getattr(row, "layout", row)
    if isinstance(layout, Layout):
        return layout
    if grid is None or not isinstance(row, Mapping) or not {"shape", "split", "at"} <= row.keys():
        raise TypeError(f"layout: {name}: {type(row).__name__} is not a layout")
    if "grid" in row:
        grid = _grid(row)
    split = tuple(map(tuple, row["split"]))
    at = tuple((axis, tuple(n)) for axis, n in row["at"].items())
    return Layout(grid, tuple(row["shape"]), split, at)


def _check_alike(layout: Mapping[str, Layout], net: Net) -> None:
    """Raises ``ValueError`` if replicas by ``layout`` have different pieces in ``net``.

    The broadcast would overwrite these pieces.
    """
    own = {n: p.layout for p in net.live.plan.params for n in p.names}
    rank = dist.get_rank()
    for name, target in layout.items():
        if name in own and own[name].holds(rank) and not {*target.twins(rank)} <= {*own[name].twins(rank)}:
            difference = f"{name} is replicated on ranks {list(target.twins(rank))}, but net replicates it on"
            raise ValueError(f"layout: {difference} {list(own[name].twins(rank))}")


def _local_copies(net: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    """Returns this rank's copies of every parameter and buffer, by first name and by their own names."""
    own = {
        **dict(net.named_parameters(remove_duplicate=False)),
        **dict(net.named_buffers(remove_duplicate=False)),
    }
    out: dict[str, tuple[Tensor, ...]] = {n: (t,) for n, t in own.items()}
    return out | (net.copies() if isinstance(net, Net) else {})


@torch.no_grad()
def share(local_tensors: Mapping[str, Sequence[Tensor]], layout: Mapping[str, Layout]) -> Sent:
    """Broadcasts each tensor to its replicas. All ranks call this with the same ``layout``.

    ``local_tensors`` has this rank's copies of each tensor. Raises a ``RunError`` that names the tensors and
    ranks that are not bit-equal afterwards.
    """
    rank = dist.get_rank()
    tensors = collectives = nbytes = 0
    wrong: list[str] = []
    for rows, every in _alike(layout).items():
        group = mine(rank, rows)
        names = [n for n in every if n in local_tensors]
        if group is None or dist.get_world_size(group) == 1:
            continue

        # the first copy of each is broadcast; this rank's other copies follow it
        for batch in _batches({n: local(local_tensors[n][0]) for n in names}):
            nbytes += _send(batch, group)
            collectives += 1
        tensors += len(names)
        for n in names:
            for other in local_tensors[n][1:]:
                local(other).copy_(local(local_tensors[n][0]))

        wrong += _differing({n: local(local_tensors[n][0]) for n in names}, group)
        dist.destroy_process_group(group)
    if wrong:
        raise RunError(f"after the broadcast, {'; '.join(wrong)}")
    return Sent(tensors, collectives, nbytes)


def _alike(layout: Mapping[str, Layout]) -> dict[tuple[tuple[int, ...], ...], list[str]]:
    """Returns tensor names by the groups of ranks that hold copies; every rank gets the same order."""
    along: dict[tuple[Grid, tuple[str, ...]], list[str]] = {}
    for name, lay in layout.items():
        along.setdefault((lay.grid, _axes(lay)), []).append(name)

    # axes of two device matrices may stand for the same ranks
    out: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for (grid, axes), names in along.items():
        rows = tuple(dict.fromkeys(grid.peers(r, *axes) for r in range(grid.size)))
        out.setdefault(rows, []).extend(names)
    return dict(sorted(out.items()))


def _axes(layout: Layout) -> tuple[str, ...]:
    """Returns the axes along which the tensor is replicated."""
    pinned = {axis for axis, _ in layout.at}
    return tuple(a for a, n in layout.grid.axes if n > 1 and a not in pinned and a not in layout.axes)


def _batches(tensors: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    out: list[Tensor] = []
    total = 0
    for t in tensors.values():
        if out and total + t.nbytes > AT_ONCE:
            yield out
            out = []
            total = 0
        out.append(t)
        total += t.nbytes
    if total:
        yield out


def _send(batch: list[Tensor], group: dist.ProcessGroup) -> int:
    """Broadcasts the batch as one tensor of bytes, and returns their number.

    gloo supports few dtypes, and -0.0 must stay -0.0.
    """
    flat = torch.cat([_bytes(t) for t in batch])
    dist.broadcast(flat, group_src=0, group=group)
    if dist.get_rank(group) > 0:
        for t, piece in zip(batch, flat.split([t.nbytes for t in batch]), strict=True):
            if t.numel():
                t.copy_(piece.clone().view(t.dtype).view(t.shape))
    return len(flat)


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(-1).view(torch.uint8)


def _differing(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[str]:
    """Returns the names and ranks of unequal tensors, by a 64-bit digest of each tensor."""
    own = {n: xxhash.xxh3_64_hexdigest(_bytes(t).cpu().numpy().tobytes()) for n, t in tensors.items()}
    bodies = byte_collectives.all_gather(json.dumps(own).encode(), group)
    every: list[dict[str, str]] = [json.loads(body) for body in bodies]
    ranks = dist.get_process_group_ranks(group)
    out = []
    for name in own:
        odd = [r for r, digests in zip(ranks, every, strict=True) if digests[name] != every[0][name]]
        if odd:
            plural = "s" if len(odd) > 1 else ""
            out.append(f"{name} on rank{plural} {', '.join(map(str, odd))} differs from rank {ranks[0]}'s")
    return out

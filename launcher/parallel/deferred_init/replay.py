"""Replays the operations of one tensor, with the numbers that the constructor drew."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from launcher.parallel.deferred_init.random_streams import Draw, stream
from launcher.parallel.dispatch.modes import default_dtype, tree_leaves, tree_map_only


class NotReplayable(ValueError):
    """Raised for a tensor whose values no recorded operation makes. The message names it and says why."""


@dataclass(frozen=True)
class Op:
    """A recorded call ``func(*args, **kwargs)``, with the storages that it needs and changes.

    Attributes:
        reads: storages whose values it reads.
        shapes: storages of which it needs no values, such as those that it fills or takes a shape from.
        writes: storages that it changes.
        fills: the storages of ``writes`` that it overwrites completely.
        makes: its results, with ``None`` for tensors that existed before.
        draw: its place in a random stream, if it is random.
        blank: whether it allocates memory without writing it.
        dtype: the default dtype at the time.
    """

    func: Any
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    reads: frozenset[int] = frozenset()
    shapes: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    fills: frozenset[int] = frozenset()
    makes: tuple[torch.Tensor | None, ...] = ()
    draw: Draw | None = None
    blank: bool = False
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @property
    def made(self) -> frozenset[int]:
        """The storages that it makes."""
        return frozenset(key(t) for t in self.makes if t is not None)


@dataclass
class OpLog:
    """The operations in order, and the places of those that made or changed each storage."""

    ops: list[Op] = field(default_factory=list)
    touched: dict[int, list[int]] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        place = len(self.ops)
        for at in op.writes | op.made:
            self.touched.setdefault(at, []).append(place)
        if op.draw and op.draw.root:
            op.draw.root.places.setdefault(op.draw.at, place)
        self.ops.append(op)

    def doubtful(self) -> set[int]:
        """Returns the storages that may contain unwritten memory.

        ``replay`` decides about those filled in part.
        """
        bad: set[int] = set()
        for op in self.ops:
            if op.blank or op.reads & bad:
                bad |= op.made | op.writes
            else:
                bad -= op.fills
        return bad

    def origin(self, todo: Sequence[tuple[int, int]], name: str) -> list[int]:
        """Returns, in order, the places of the operations that compute the values of ``todo``.

        ``todo`` has pairs of a storage and a place: the values that the storage has before that place.
        """
        chosen: set[int] = set()
        todo = list(todo)
        while todo:
            at, before = todo.pop()
            for place in set(self._past(at, before, name)) - chosen:
                op = self.ops[place]
                chosen.add(place)
                todo += [(r, place) for r in op.reads]
                todo += [(s, self.touched[s][0] + 1) for s in op.shapes if s in self.touched]
        return sorted(chosen)

    def _past(self, at: int, before: int, name: str) -> list[int]:
        """Returns the places before ``before`` that made or changed storage ``at``, from the last fill on."""
        places = self.touched.get(at, [])
        places = places[: bisect_left(places, before)]
        if not places:
            raise NotReplayable(f"{name}: no operation of the constructor made its values")
        last = next((i for i in range(len(places) - 1, 0, -1) if at in self.ops[places[i]].fills), 0)
        return [places[0], *places[max(last, 1) :]]


def key(t: torch.Tensor) -> int:
    """Returns the key of the storage behind ``t``."""
    return int(t.untyped_storage()._cdata)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors among the leaves of ``tree``."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def replay(log: OpLog, target: torch.Tensor, name: str, seed: int, fill: int | None = None) -> torch.Tensor:
    """Returns the full ``target`` with its values, on the CPU.

    Two tensors made from one draw agree. With ``fill``, every byte of unwritten memory has that value;
    otherwise it is undefined. Raises ``NotReplayable``.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        places = log.origin([(key(target), len(log.ops))], name)
        return _with_values(_run(log, places, seed, fill), target.detach())


def start(log: OpLog, draw: Draw, seed: int) -> None:
    """Sets the default generator to the state at which ``draw`` begins."""
    if draw.root is None:
        torch.default_generator.manual_seed(stream(seed, str(draw.at)))
        return
    states = draw.root.states
    for at in range(max(n for n in states if n <= draw.at), draw.at):
        _run(log, log.origin([], "") + _with(log, draw.root.places[at]), seed, None)
        states[at + 1] = torch.default_generator.get_state()
    torch.default_generator.set_state(states[draw.at])


def _with(log: OpLog, place: int) -> list[int]:
    """Returns the places of the operations that the one at ``place`` needs, and ``place`` at the end."""
    op = log.ops[place]
    made = [(s, log.touched[s][0] + 1) for s in op.shapes if s in log.touched]
    return [*log.origin([*((r, place) for r in op.reads), *made], "a draw"), place]


def _run(log: OpLog, places: Sequence[int], seed: int, fill: int | None) -> dict[int, torch.Tensor]:
    """Returns the content of each storage after the operations at ``places``."""
    real: dict[int, torch.Tensor] = {}
    with default_dtype(torch.get_default_dtype()):
        for place in places:
            op = log.ops[place]
            if op.draw:
                start(log, op.draw, seed)
            _do(op, real, fill)
    return real


def _do(op: Op, real: dict[int, torch.Tensor], fill: int | None) -> None:
    """Repeats one operation, in real memory."""
    torch.set_default_dtype(op.dtype)
    args, kwargs = tree_map_only(torch.Tensor, lambda t: _with_values(real, t), (op.args, op.kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    out = op.func(*args, **kwargs)

    # keep its results
    if not op.makes:
        return
    for made, t in zip(op.makes, tensors(out), strict=True):
        if made is not None:
            real[key(made)] = _laid_out(t, made)
            if op.blank and fill is not None:
                real[key(made)].untyped_storage().fill_(fill)  # type: ignore[attr-defined]


def _laid_out(t: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """Returns ``t`` with the memory layout that was recorded, which later views rely on.

    Kernels of the CPU (LAPACK, fft) may lay a result out differently from those of the meta device. Raises
    ``NotReplayable`` if shape or dtype differ, because no memory layout makes them equal then.
    """
    if t.shape != recorded.shape or t.dtype != recorded.dtype:
        was, now = (f"{str(a.dtype).removeprefix('torch.')} {list(a.shape)}" for a in (recorded, t))
        raise NotReplayable(
            f"an operation of the constructor makes {now} on the CPU, but {was} on the meta device"
        )
    t = t.resolve_conj().resolve_neg()
    place, nbytes = (recorded.stride(), recorded.storage_offset()), recorded.untyped_storage().nbytes()
    if (t.stride(), t.storage_offset()) == place:
        if t.untyped_storage().nbytes() < nbytes:  # a later ``out=`` or ``resize_`` has made it larger
            t.untyped_storage().resize_(nbytes)
        return t
    made = torch.empty(nbytes, dtype=torch.uint8).view(t.dtype) if t.numel() else t.new_empty(0)
    return made.as_strided(t.shape, *place).copy_(t)


def _with_values(real: dict[int, torch.Tensor], t: torch.Tensor) -> torch.Tensor:
    """Returns ``t`` with its values: the same bytes, read as ``t`` reads them.

    A view may have another dtype (``.real``, ``.view(torch.int32)``), or be conjugated or negative.
    """
    at = real.get(key(t))
    if at is None:
        return t
    place = (t.shape, t.stride(), t.storage_offset())
    if at.dtype == t.dtype:
        view = at.as_strided(*place)
    else:
        view = torch.empty(0, dtype=t.dtype).set_(at.untyped_storage(), t.storage_offset(), *place[:2])
    if t.is_conj():
        view = torch._conj(view)
    return torch._neg_view(view) if t.is_neg() else view

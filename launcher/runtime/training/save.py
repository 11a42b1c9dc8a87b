"""Checkpoints of a model in training: written while all wait, or by a thread while training goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from launcher.checkpoint import store
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.tensorfile.blob import Blob
from launcher.checkpoint.write import check_pieces, shares, write_share
from launcher.errors import RunError, said
from launcher.parallel.trace.model_facts import spec
from launcher.runtime.cluster.world import World
from launcher.runtime.training.session import Session
from launcher.runtime.training.state import blob, extra, strategy, tensors

T = TypeVar("T")


class Unsaved(RunError):
    """A checkpoint that the file system would not take: nothing of it is left, and all ranks know."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a checkpoint, and what rank 0 says of the whole."""

    final: Path
    layout: Strategy
    tensors: Mapping[str, Blob]
    extra: Mapping[str, Blob]
    state: Mapping[str, Any]
    key: str | None


def save(s: Session, keep: int | None) -> Path:
    """Write a complete checkpoint or none, once the one before is written. All ranks call it."""
    finish(s)
    shot = _snapshot(s, lambda _, t: t)
    _write(shot, s.world, None, keep)
    return shot.final


def begin(s: Session, keep: int | None) -> None:
    """As ``save``, of a copy in host memory: returns when that is made; ``s.saver`` tells when the write has failed."""
    assert s.saver is not None
    finish(s)
    shot, group = _snapshot(s, s.saver.host), s.saver.group
    s.saver.start(lambda: _write(shot, s.world, group, keep))


def attempt(s: Session, keep: int | None) -> None:
    """As ``save``, or ``begin`` where there is a thread for it; ``s.spare`` of them go on without."""
    with _spared(s):
        (save if s.saver is None else begin)(s, keep)


def finish(s: Session) -> None:
    """Until the thread has written what it writes."""
    if s.saver is not None:
        with _spared(s):
            s.saver.wait()


def check(s: Session) -> None:
    """Whether the thread has failed, without waiting for it."""
    if s.saver is not None:
        with _spared(s):
            s.saver.check()


@contextmanager
def _spared(s: Session) -> Iterator[None]:
    try:
        yield
    except Unsaved as error:
        if not s.spare:
            raise
        s.unsaved += 1
        last = store.latest(s.folder / "checkpoints")
        s.results.pop("saved_step", None)
        if last is not None and (step := store.step_of(last)) is not None:
            s.results["saved_step"] = step
        if s.world.rank == 0:
            s.emit({"text": f"{error}; training goes on without it (checkpoint.on_error=continue)"})


def _snapshot(s: Session, place: Callable[[str, Tensor], Tensor]) -> Snapshot:
    """``place`` says where a tensor stays while it is written; what other ranks write is left out."""
    s.results["saved_step"] = s.step
    layout = strategy(s)
    held = tensors(s)
    check_pieces(s.world.rank, layout, {n: spec(t) for n, t in held.items()})
    mine = [n for share in shares(layout, s.world.rank).values() for n in share]
    blobs = {n: blob(place(n, held[n])) for n in mine}
    state = {"step": s.step, "seed": s.plan.seed, "name": s.plan.name, "batch_size": s.plan.sizes.global_batch,
             "settings": dict(s.settings), "results": dict(s.results),
             "loss_scale": [s.scaling.factor, s.scaling.good]}  # fmt: skip
    return Snapshot(store.step_folder(s.folder / "checkpoints", s.step), layout, blobs, extra(s), state, s.trust.key)


def _write(shot: Snapshot, world: World, group: dist.ProcessGroup | None, keep: int | None) -> None:
    """All ranks write; when their files are on the disk rank 0 puts the manifest and renames; then all return.

    When one of them fails nothing is left of it: the disk may be full.
    """
    new = store.partial(shot.final)

    def discard() -> None:
        if world.rank == 0:
            shutil.rmtree(new, ignore_errors=True)

    try:
        _write_all(shot, new, world, group, keep)
    except RunError:  # on every rank, so nobody is writing any more
        _all(world, group, shot, discard)
        raise


def _write_all(shot: Snapshot, new: Path, world: World, group: dist.ProcessGroup | None, keep: int | None) -> None:
    records = _all(
        world, group, shot, lambda: write_share(new, world.rank, shot.layout, shot.tensors, shot.extra, shot.key)
    )

    def commit() -> None:
        if world.rank == 0:
            store.commit(new, shot.final, records, shot.state)
            if keep is not None:
                store.prune(shot.final.parent, keep)

    _all(world, group, shot, commit)


def _all(world: World, group: dist.ProcessGroup | None, shot: Snapshot, act: Callable[[], T]) -> list[T]:
    """What ``act`` returned on every rank. If it failed on any, all raise ``RunError``: none waits for the dead."""
    error: Exception | None = None
    mine: tuple[T | None, str | None]
    try:
        mine = act(), None
    except Exception as raised:
        name = "" if isinstance(raised, OSError | ValueError) else f"{type(raised).__name__}: "
        mine, error = (None, f"{name}{said(raised)}"), raised
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, (*mine, isinstance(error, OSError)), group=group)
    failed = [(f"rank {rank}: {text}", system) for rank, (_, text, system) in enumerate(every) if text is not None]
    if failed:
        kind = Unsaved if all(system for _, system in failed) else RunError
        text = "; ".join(text for text, _ in failed)
        raise kind(f"checkpoint {shot.final.name} was not written: {text}") from error
    return [value for value, _, _ in every]

"""Saves checkpoints of a model in training: synchronously, or in a thread while training continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launcher.checkpoint import store
from launcher.checkpoint.tensorfile import disk
from launcher.checkpoint.tensorfile.safetensors import Blob
from launcher.checkpoint.write import RankRecord, RankWriter, in_memory
from launcher.errors import RunError, error_text
from launcher.parallel import byte_collectives
from launcher.parallel.trace.tensor_specs import spec
from launcher.runtime.cluster.messages import decode, encode
from launcher.runtime.cluster.world import World
from launcher.runtime.training import module_state
from launcher.runtime.training.checkpoint_tensors import blob, extra, states, strategy, tensors
from launcher.runtime.training.monitored_metrics import forget_absent
from launcher.runtime.training.replicas import check_replicas
from launcher.runtime.training.save_thread import Saver
from launcher.runtime.training.session import Session

_Outcome = tuple[RankRecord | None, str | None, bool]
"""A rank's result of a save: its record, or its error, and whether the file system caused the error."""


class Unsaved(RunError):
    """Raised on all ranks if the file system could not store a checkpoint; no part of it is left."""


@dataclass(frozen=True)
class CheckpointWriters:
    """All ranks, which write the checkpoint ``name``; ``group``: that of their threads, if threads write."""

    world: World
    group: dist.ProcessGroup | None
    name: str

    def first(self, act: Callable[[], None]) -> None:
        """Runs ``act`` on rank 0; all ranks return after it, or raise as ``all`` does."""

        def nothing() -> None:
            """Does nothing: the part of the other ranks."""

        self.all(act if self.world.rank == 0 else nothing)

    def all(self, act: Callable[[], RankRecord | None]) -> list[RankRecord | None]:
        """Returns what ``act`` returned on every rank.

        If it failed on any rank, all ranks raise ``RunError``, so that none waits for a failed one.
        """
        error: Exception | None = None
        try:
            mine = encode((act(), None, False), _Outcome)
        except Exception as raised:
            kind = "" if isinstance(raised, OSError | ValueError) else f"{type(raised).__name__}: "
            mine = encode((None, f"{kind}{error_text(raised)}", isinstance(raised, OSError)), _Outcome)
            error = raised

        # a failed rank reports that here, instead of not arriving
        every: list[_Outcome] = [decode(b, _Outcome) for b in byte_collectives.all_gather(mine, self.group)]

        failed = [
            (f"rank {rank}: {text}", system)
            for rank, (_, text, system) in enumerate(every)
            if text is not None
        ]
        if failed:
            only_the_file_system = all(system for _, system in failed)
            text = f"checkpoint {self.name} was not written: {'; '.join(text for text, _ in failed)}"
            raise (Unsaved if only_the_file_system else RunError)(text) from error
        return [value for value, _, _ in every]


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a checkpoint, all ``ranks``, and what rank 0 does with the complete checkpoint.

    ``put`` writes this rank's files into ``folder``, which becomes ``final`` once all ranks have written
    theirs.
    """

    final: Path
    folder: Path
    put: Callable[[], RankRecord]
    ranks: CheckpointWriters
    state: Mapping[str, Any]
    keep: int | None
    best: int | None

    def write(self) -> None:
        """Writes the files; once all ranks have, rank 0 writes the manifest and renames the folder.

        Ranks return only after that. If a rank fails, the files are removed, as the disk may be full.
        """
        try:
            records = [r for r in self.ranks.all(self.put) if r is not None]
            self.ranks.first(partial(self.commit, records))
        except RunError:  # raised on every rank, so no rank writes any more
            self.ranks.first(self.discard)
            raise

    def commit(self, records: Sequence[RankRecord]) -> None:
        """Completes the checkpoint, and deletes all but the newest ``keep``.

        Call it once every rank has written its files. The checkpoint of step ``best`` is kept.
        """
        store.commit(self.folder, self.final, records, self.state)
        if self.keep is not None:
            store.prune(self.final.parent, self.keep, self.best)

    def discard(self) -> None:
        disk.discard(self.folder)


def save(s: Session, keep: int | None, saver: Saver | None = None) -> Path:
    """Writes a complete checkpoint or none, once the previous one is written. All ranks call it.

    Raises ``RunError`` if the copies of a weight on several ranks differ. A ``saver`` writes the checkpoint
    from a copy in host memory: this returns once the copy is made, and ``finish`` and ``check`` raise the
    error of a failed write.
    """
    finish(s)
    check_replicas(s)
    report_late_state(s)
    return save_unchecked(s, keep, saver)


def save_unchecked(s: Session, keep: int | None, saver: Saver | None = None) -> Path:
    """Like ``save``, but does not compare copies: the caller compares all weights itself."""
    finish(s)
    shot = _snapshot(s, keep, saver)
    if saver is None:
        shot.write()
        s.writing = shot.final
        _tell(s)
    else:
        saver.start(shot.write)
        s.writing = shot.final
    return shot.final


def report_late_state(s: Session) -> None:
    """Reports state of the model and of callbacks that no checkpoint contains; every rank calls it."""
    texts = s.late_state.notes(s.model)
    if s.callbacks is not None:
        texts += s.callbacks.unsaved()
    if s.world.rank == 0:
        for text in texts:
            s.emit({"text": text})


def _tell(s: Session) -> None:
    """Notifies callbacks of the last checkpoint, if it is complete and they have not been notified."""
    if s.writing is None or (s.saver is not None and s.saver.busy):
        return
    saved, s.writing = s.writing, None
    if s.callbacks is not None:
        s.callbacks.call("on_save", store.step_of(saved) or 0, s.results, checkpoint=saved)


def attempt(s: Session, keep: int | None) -> None:
    """Saves in the session's thread, if it has one; with ``s.spare`` training continues if saving fails."""
    with _spared(s):
        save(s, keep, s.saver)


def finish(s: Session) -> None:
    """Waits until the thread has finished writing."""
    if s.saver is not None:
        with _spared(s):
            s.saver.wait()
        _tell(s)


def check(s: Session) -> None:
    """Raises the error of a failed write, without waiting for the thread."""
    if s.saver is not None:
        with _spared(s):
            s.saver.check()
        _tell(s)


@contextmanager
def _spared(s: Session) -> Iterator[None]:
    try:
        yield
    except Unsaved as error:
        if not s.spare:
            raise
        s.unsaved += 1
        s.writing = None

        # the run can only resume from the previous checkpoint
        last = store.latest(s.folder / "checkpoints")
        s.results.pop("saved_step", None)
        step = None if last is None else store.step_of(last)
        if step is not None:
            s.results["saved_step"] = step
        forget_absent(s)

        if s.world.rank == 0:
            s.emit({"text": f"{error}; training continues without it (checkpoint.on_error=continue)"})


def _snapshot(s: Session, keep: int | None, saver: Saver | None) -> Snapshot:
    """Returns this rank's share of a checkpoint, without what other ranks write.

    It refers to the model's own memory; with a ``saver``, to a copy.
    """
    s.results["saved_step"] = s.step
    final = store.step_folder(s.folder / "checkpoints", s.step)
    group = None if saver is None else saver.group
    optimizer_states = states(s)
    writer = RankWriter(store.partial(final), s.world.rank, strategy(s, optimizer_states), s.trust.key)

    # check that this rank has all tensors that the strategy assigns to it
    local_tensors = tensors(s, optimizer_states)
    writer.check({name: spec(t) for name, t in local_tensors.items()})

    # select the part that no lower rank writes
    blobs = {}
    for name in chain.from_iterable(writer.boxes.values()):
        own = local_tensors[name] if saver is None else saver.host(name, local_tensors[name])
        blobs[name] = blob(own)

    # the checkpoint's description of itself
    state = {
        "step": s.step,
        store.TRAINING: s.training,
        "seed": s.plan.seed,
        "name": s.plan.name,
        "batch_size": s.plan.sizes.global_batch,
        "settings": dict(s.settings),
        "results": dict(s.results),
        "loss_scale": [s.scaling.factor, s.scaling.good],
        "skipped": s.scaling.skipped,
        "modules": module_state.gather_extra_states(s.model),
        "loaded": s.loaded,
        "at": s.at,
        "stream": s.feed.stream.place() if s.feed.stream is not None and s.world.rank == 0 else None,
    }
    ranks = CheckpointWriters(s.world, group, final.name)
    best = s.results.get("best_step")
    return Snapshot(
        final, writer.folder, _put(s, writer, blobs), ranks, state=state, keep=keep,
        best=None if best is None else int(best),
    )  # fmt: skip


def _put(s: Session, writer: RankWriter, blobs: Mapping[str, Blob]) -> Callable[[], RankRecord]:
    """Returns the function that writes this rank's files; in a drill it may fail on purpose."""
    if s.drill is not None:
        return s.drill.put(s.step, writer, in_memory(blobs), extra(s))
    return partial(writer.write, in_memory(blobs), extra(s))

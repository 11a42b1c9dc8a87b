"""One rank's files of a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

from launcher.checkpoint.layout import strategy_file
from launcher.checkpoint.layout.shards import saved_at_home
from launcher.checkpoint.layout.strategy import Strategy
from launcher.checkpoint.manifest import EXTRA, FILE_OF, rank_file, stamp, text_record
from launcher.checkpoint.tensorfile.blob import Blob, described
from launcher.checkpoint.tensorfile.durable import sync
from launcher.checkpoint.tensorfile.keys import load_key
from launcher.checkpoint.tensorfile.safetensors import FileRecord, sliced, write_stream
from launcher.checkpoint.tensorfile.write_behind import WriteBehind, now
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.layout import Box

Chunks = Callable[[str, Box], Iterable[memoryview]]
"""The bytes of a box of the tensor of this name, in order; a chunk may be reused after."""


@dataclass(frozen=True)
class RankRecord:
    """What ``rank`` wrote, for ``commit``; ``strategy`` is a digest, ``files`` are by path within the folder.

    ``key`` says where the key is that the files are encrypted with.
    """

    rank: int
    world: int
    strategy: str
    files: Mapping[str, FileRecord]
    key: str | None = None


def write_rank(
    folder: Path,
    rank: int,
    strategy: Strategy,
    tensors: Mapping[str, Blob],
    extra: Mapping[str, Blob] | None = None,
    key: str | None = None,
) -> RankRecord:
    """Save this rank's share of what it holds: ``tensors`` are its pieces by first name, copies included.

    ``extra`` (random states, say) belongs to no layout and comes back to the same rank only.
    ``folder`` is ``partial(final)``; ``commit`` makes it a checkpoint once every rank has returned.
    Everything is checked first.
    """
    writer = RankWriter(folder, rank, strategy, key)
    writer.check({name: blob.spec for name, blob in tensors.items()})
    return writer.write(in_memory(tensors), extra or {})


def in_memory(tensors: Mapping[str, Blob]) -> Chunks:
    """The chunks of boxes that are in memory already, each as the blob of its name."""
    return lambda name, _: sliced(tensors[name].data)


@dataclass(frozen=True)
class RankWriter:
    """Writes the files of one ``rank`` of ``strategy`` into ``folder``, which is ``partial(final)``.

    ``key`` says where the key is to encrypt them with. They are on the disk when ``write`` returns, or, with
    ``behind``, when that is done.
    """

    folder: Path
    rank: int
    strategy: Strategy
    key: str | None = None
    behind: WriteBehind | None = None

    @cached_property
    def boxes(self) -> dict[str, dict[str, Box]]:
        """What this rank saves, by file."""
        return saved_boxes(self.strategy, self.rank)

    def check(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Raises ``ValueError`` unless they are what the rank holds, copies included, by first name."""
        if not 0 <= self.rank < self.strategy.grid.size:
            raise ValueError(f"rank {self.rank} is not in the strategy's world of {self.strategy.grid.size}")
        found = [*_flaws(self.rank, self.strategy, tensors)]
        if found:
            raise ValueError(f"rank {self.rank} cannot be saved:\n" + "\n".join(f"  {f}" for f in found))

    def write(self, chunks: Chunks, extra: Mapping[str, Blob] | None = None) -> RankRecord:
        """Nothing is checked here; what was written goes when it fails. ``extra`` is as in ``write_rank``."""
        home = self.folder / f"rank_{self.rank}"
        do = now if self.behind is None else self.behind.do
        with _gone_if_it_fails(home):
            secret = None if self.key is None else load_key(self.key)
            mark = stamp(self.rank, self.strategy.grid.size, self.strategy.digest)
            stream = partial(write_stream, metadata=mark, key=secret, behind=self.behind)
            files: dict[str, FileRecord] = {}

            # what the strategy puts here, one file for each kind
            every = {name: box for boxes in self.boxes.values() for name, box in boxes.items()}
            for file, boxes in self.boxes.items():
                specs = {
                    name: TensorSpec(box.shape, self.strategy.entries[name].dtype)
                    for name, box in boxes.items()
                }
                done = stream(home / file, specs, lambda name: chunks(name, every[name]))
                files[rank_file(self.rank, file)] = done

            # what belongs to this rank alone
            alone = extra or {}
            if alone:
                specs = {name: blob.spec for name, blob in alone.items()}
                done = stream(home / EXTRA, specs, lambda name: sliced(alone[name].data))
                files[rank_file(self.rank, EXTRA)] = done

            # the names of these files, after the files
            do(partial(sync, home))

            # the strategy, once for all ranks
            if self.rank == 0:
                written = strategy_file.dump(self.strategy, self.folder / "strategy")
                files |= {f"strategy/{path.name}": text_record(path) for path in written}
        return RankRecord(self.rank, self.strategy.grid.size, self.strategy.digest, files, key=self.key)


@contextmanager
def _gone_if_it_fails(folder: Path) -> Iterator[None]:
    """Around what fills ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def saved_boxes(
    strategy: Strategy, rank: int, files: Collection[str] | None = None
) -> dict[str, dict[str, Box]]:
    """What each of these ``files`` of ``rank`` holds, of all that it has unless some are named."""
    homes = []
    for grid, of_grid in strategy.homes.items():
        where = grid.coords(rank)
        homes += [names for at, names in of_grid.items() if all(where[axis] == n for axis, n in at)]

    out: dict[str, dict[str, Box]] = {file: {} for file in files or rank_files(strategy)}
    for name in chain.from_iterable(homes):
        entry = strategy.entries[name]
        boxes = out.get(FILE_OF[entry.kind])
        if boxes is None:
            continue
        box = saved_at_home(entry.layout, rank)
        if box is not None:
            boxes[name] = box
    return out


def rank_files(strategy: Strategy) -> tuple[str, ...]:
    """The file of a kind is there on every rank, or on none if no tensor is of it; the model's always is."""
    return tuple(dict.fromkeys(FILE_OF[kind] for kind in ("param", *strategy.kinds)))


def _flaws(rank: int, strategy: Strategy, tensors: Mapping[str, TensorSpec]) -> Iterator[str]:
    """Why ``tensors`` are not what ``rank`` holds."""
    # names that only one side has
    held = strategy.held(rank)
    absent = sorted(held.keys() - tensors.keys())
    if absent:
        yield f"the strategy has it here, it was not given: {', '.join(absent)}"
    unknown = sorted(tensors.keys() - held.keys())
    if unknown:
        yield f"given, but the strategy does not have it here: {', '.join(unknown)}"

    # and the shapes and dtypes of the others
    for name, entry in held.items():
        box = entry.layout.box(rank)
        assert box is not None
        want = TensorSpec(box.shape, entry.dtype)
        if name in tensors and tensors[name] != want:
            yield f"{name}: {described(tensors[name])} was given, its piece is {described(want)}"

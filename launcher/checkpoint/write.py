"""Writes the files of one rank of a checkpoint."""

from __future__ import annotations

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
from launcher.checkpoint.tensorfile.disk import WriteBehind, discard, run_at_once, sync
from launcher.checkpoint.tensorfile.encryption import load_key
from launcher.checkpoint.tensorfile.safetensors import Blob, FileRecord, described, sliced, write_stream
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.plan.values.layout import Box
from launcher.plan.values.tensor_spec import TensorSpec

Chunks = Callable[[str, Box], Iterable[memoryview]]
"""Returns the bytes of a box of the named tensor, in order; each chunk is valid until the next one."""


@dataclass(frozen=True)
class RankRecord:
    """The files that ``rank`` wrote, for ``commit``.

    ``strategy`` is the digest of the strategy; ``files`` are keyed by their path within the folder. ``key``
    is the place of the key with which the files are encrypted, and ``None`` for plain files.
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
    """Saves this rank's share of a checkpoint: the pieces that no lower rank saves.

    Everything is checked before anything is written. ``commit`` makes the folder a checkpoint once every rank
    has returned.

    Args:
        folder: ``partial(final)`` of the checkpoint.
        rank: This rank.
        strategy: The layouts of all tensors.
        tensors: All pieces that this rank holds, by first name, replicas included.
        extra: Tensors outside every layout, such as random states; only the same rank reads them back.
        key: The place of the key to encrypt the files with; ``None`` writes plain files.

    Raises:
        ValueError: ``tensors`` are not the pieces that ``rank`` holds by ``strategy``.
    """
    writer = RankWriter(folder, rank, strategy, key)
    writer.check({name: blob.spec for name, blob in tensors.items()})
    return writer.write(in_memory(tensors), extra or {})


def in_memory(tensors: Mapping[str, Blob]) -> Chunks:
    """Returns the chunks of pieces that are in memory: ``tensors`` has the blob of each name."""
    return lambda name, _: sliced(tensors[name].data)


@dataclass(frozen=True)
class RankWriter:
    """Writes the files of one ``rank`` of ``strategy`` into ``folder``, which is ``partial(final)``.

    ``key`` is the place of the key to encrypt them with. The files are synced to disk when ``write`` returns
    or, with ``behind``, when ``behind.wait`` returns.
    """

    folder: Path
    rank: int
    strategy: Strategy
    key: str | None = None
    behind: WriteBehind | None = None

    @cached_property
    def boxes(self) -> dict[str, dict[str, Box]]:
        """The boxes that this rank saves: by file, then by name."""
        return saved_boxes(self.strategy, self.rank)

    def check(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Raises ``ValueError`` unless ``tensors`` are all pieces that the rank holds, by first name.

        Replicas are included.
        """
        if not 0 <= self.rank < self.strategy.grid.size:
            raise ValueError(f"rank {self.rank} is not in the strategy of {self.strategy.grid.size} ranks")
        flaws = [*_flaws(self.rank, self.strategy, tensors)]
        if flaws:
            raise ValueError(f"rank {self.rank} cannot be saved:\n" + "\n".join(f"  {f}" for f in flaws))

    def write(self, chunks: Chunks, extra: Mapping[str, Blob] | None = None) -> RankRecord:
        """Writes the files without checking ``chunks``. If it fails, it deletes the rank's folder.

        ``extra`` is as in ``write_rank``.
        """
        home = self.folder / f"rank_{self.rank}"
        do = run_at_once if self.behind is None else self.behind.do
        with _gone_if_it_fails(home):
            secret = None if self.key is None else load_key(self.key)
            mark = stamp(self.rank, self.strategy.grid.size, self.strategy.digest)
            stream = partial(write_stream, metadata=mark, key=secret, behind=self.behind)
            files: dict[str, FileRecord] = {}

            # the pieces that this rank saves, in one file per kind
            every = {name: box for boxes in self.boxes.values() for name, box in boxes.items()}
            for file, boxes in self.boxes.items():
                specs = {
                    name: TensorSpec(box.shape, self.strategy.entries[name].dtype)
                    for name, box in boxes.items()
                }
                done = stream(home / file, specs, lambda name: chunks(name, every[name]))
                files[rank_file(self.rank, file)] = done

            # the tensors that belong to this rank alone
            alone = extra or {}
            if alone:
                specs = {name: blob.spec for name, blob in alone.items()}
                done = stream(home / EXTRA, specs, lambda name: sliced(alone[name].data))
                files[rank_file(self.rank, EXTRA)] = done

            # sync the folder's entries after the files themselves
            do(partial(sync, home))

            # the strategy, once for all ranks
            if self.rank == 0:
                written = strategy_file.dump(self.strategy, self.folder / "strategy")
                files |= {f"strategy/{path.name}": text_record(path) for path in written}
        return RankRecord(self.rank, self.strategy.grid.size, self.strategy.digest, files, key=self.key)


@contextmanager
def _gone_if_it_fails(folder: Path) -> Iterator[None]:
    """Makes ``folder`` for the block to fill; deletes it if the block raises."""
    make_folder(folder)
    try:
        yield
    except BaseException:
        discard(folder)
        raise


def saved_boxes(
    strategy: Strategy, rank: int, files: Collection[str] | None = None
) -> dict[str, dict[str, Box]]:
    """Returns the boxes that ``rank`` saves, by file, then by name; ``files`` limits the files to return."""
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
    """Returns the tensor files that every rank has.

    Every rank has the file of a kind if any tensor is of that kind; the model's file always exists.
    """
    return tuple(dict.fromkeys(FILE_OF[kind] for kind in ("param", *strategy.kinds)))


def _flaws(rank: int, strategy: Strategy, tensors: Mapping[str, TensorSpec]) -> Iterator[str]:
    """Yields the reasons why ``tensors`` are not the pieces that ``rank`` holds."""
    # names that only the strategy or only the argument has
    entries = strategy.entries_of(rank)
    absent = sorted(entries.keys() - tensors.keys())
    if absent:
        yield f"missing tensors, which the strategy has on this rank: {', '.join(absent)}"
    unknown = sorted(tensors.keys() - entries.keys())
    if unknown:
        yield f"unexpected tensors, which the strategy does not have on this rank: {', '.join(unknown)}"

    # the shapes and dtypes of the others
    for name, entry in entries.items():
        box = entry.layout.box(rank)
        assert box is not None
        expected = TensorSpec(box.shape, entry.dtype)
        if name in tensors and tensors[name] != expected:
            yield f"{name}: {described(tensors[name])} was passed, its piece is {described(expected)}"

"""Reads other programs' checkpoints, and imports them as checkpoints of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import numpy.typing as npt

from launcher.checkpoint.box_bytes import stream_box
from launcher.checkpoint.foreign.hugging_face import INDEX, SINGLE_FILE, read_hf
from launcher.checkpoint.foreign.names import Table, kind_of, renamed
from launcher.checkpoint.foreign.recognize_strategy import open_strategy
from launcher.checkpoint.foreign.torch_dcp import METADATA_FILE, read_dcp
from launcher.checkpoint.full_tensors import Blobs, FullTensors, RenamedTensors, chunks
from launcher.checkpoint.layout.strategy import Entry, Strategy, match
from launcher.checkpoint.store import check_apart, check_destination, fresh, newest_in, seal
from launcher.checkpoint.tensorfile.disk import WriteBehind
from launcher.checkpoint.tensorfile.mmap_window import Window
from launcher.checkpoint.tensorfile.safetensors import Blob
from launcher.checkpoint.transform import PEAK, Report, is_checkpoint
from launcher.checkpoint.write import RankRecord, RankWriter
from launcher.optional import mindspore
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.untrusted.files import irregular, stands, without_collection
from launcher.untrusted.hub_name_hint import download_hint

ForeignForm = Literal["hf", "mindspore", "dcp"]
FileState = tuple[str, int, int, int]


@dataclass(frozen=True)
class Incoming:
    """The tensors of another program's checkpoint.

    ``tensors`` are keyed by their new names and stay on disk. ``left`` are the old names that no row of the
    table matches; ``others`` are entries that are not tensors.
    """

    tensors: FullTensors
    left: tuple[str, ...]
    others: tuple[str, ...] = ()


def _pickle(path: Path) -> str:
    """Returns a note on how to convert a file of ``torch.save``; "" for any other file."""
    if path.suffix not in (".pt", ".pth", ".bin"):
        return ""
    return "; a pickle is never loaded: write its state dict with save_file of safetensors.torch"


def form_of(path: Path) -> ForeignForm:
    """Returns the format of ``path``, by the files that exist.

    Raises ``ValueError`` naming ``path`` if it cannot be imported.
    """
    if kind := irregular(path):
        raise ValueError(f"{path}: {kind}")
    if path.is_file():
        if path.suffix not in (".safetensors", ".ckpt"):
            raise ValueError(f"{path}: neither a .safetensors nor a .ckpt file{_pickle(path)}")
        return "hf" if path.suffix == ".safetensors" else "mindspore"

    # a folder: each format has files of a certain name
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder{download_hint(path, 'model')}")
    own = path if is_checkpoint(path) else newest_in(path)
    if own is not None:
        subject = "it is" if own == path else f"{own} in it is"
        raise ValueError(
            f"{path}: {subject} a checkpoint of this launcher and needs no import; "
            "use it as checkpoint.resume"
        )
    if stands(path / SINGLE_FILE) or stands(path / INDEX) or any(path.glob("pytorch_model*.bin")):
        return "hf"  # if there are only pickles, its reader raises with the way out
    if stands(path / METADATA_FILE):
        return "dcp"
    if any(path.glob("rank_*")):
        return "mindspore"

    hugging_face = f"a Hugging Face folder ({SINGLE_FILE} or {INDEX})"
    raise ValueError(f"{path}: not {hugging_face}, a torch DCP folder ({METADATA_FILE}) or rank_<k> folders")


def is_foreign(path: Path, strategy: str | None) -> bool:
    """Returns true if ``foreign`` can read ``path``; false for an unfinished checkpoint of ours."""
    if is_checkpoint(path) or not path.exists():
        return False
    if strategy is None and any(path.glob("rank_*/model.safetensors")):
        return False
    try:
        form_of(path)
    except ValueError:
        return False
    return True


def outline(path: Path, strategy: Path | None = None) -> dict[str, TensorSpec]:
    """Returns the specs of ``read_incoming``'s tensors, by old name, from headers only. Raises as it does.

    Unchanged files are read once: a request is checked again for each cure that is tried, and it takes
    seconds to read a header with 200,000 names.
    """
    files = (*_files(path), *(() if strategy is None else _files(strategy)))
    return dict(_outline(path, strategy, files))


@lru_cache(maxsize=2)
@without_collection()
def _outline(path: Path, strategy: Path | None, files: tuple[FileState, ...]) -> Mapping[str, TensorSpec]:
    if strategy is None and form_of(path) == "hf":
        return read_hf(path).specs  # ``foreign`` would also make a layout, and map the files
    return foreign(path, strategy, verify=False).read_full().specs


def _files(path: Path) -> Iterator[FileState]:
    """Yields the name, inode, size and modification time of every file at ``path`` or below."""
    paths = [path] if not path.is_dir() else [p for p in sorted(path.rglob("*")) if p.is_file()]
    for file in paths:
        with suppress(OSError):  # the reader of the file raises the error
            about = file.stat()
            yield str(file), about.st_ino, about.st_size, about.st_mtime_ns


def read_incoming(
    path: Path, names: Table | None = None, *, strategy: Path | None = None, strict: bool = True
) -> Incoming:
    """Opens ``path`` as full tensors, even if its files contain slices or chunks of them.

    ``names`` maps its names to ours, see ``renamed``. ``strategy`` is MindSpore's strategy file, for rank
    folders. Raises ``ValueError`` naming the file.
    """
    checkpoint = foreign(path, strategy)
    source = checkpoint.read_full()
    new = renamed(source.specs, names, strict=strict)
    tensors = RenamedTensors(source, {name: old for old, name in new.names.items()})
    return Incoming(tensors, new.unmatched, checkpoint.others)


@dataclass(frozen=True)
class Foreign:
    """Another program's checkpoint.

    ``read_full`` returns all full tensors, for use by one thread; ``strategy`` is their layout in the files.
    ``loose`` are tensors of one element that ``strategy`` does not list; ``others`` are entries that are not
    tensors.
    """

    read_full: Callable[[], FullTensors]
    strategy: Strategy
    loose: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def foreign(path: Path, strategy: Path | None = None, *, verify: bool = True) -> Foreign:
    """Opens ``path`` and checks everything; without ``verify``, it reads only headers.

    Raises ``ValueError`` naming the file.
    """
    form = form_of(path)
    if strategy is not None and not (form == "mindspore" and path.is_dir()):
        raise ValueError(f"{path}: it has full tensors, which need no strategy; leave strategy out")
    if form == "hf":
        blobs = read_hf(path)
        return _from_full_tensors(lambda: Blobs(blobs))
    if form == "dcp":
        folder = read_dcp(path)
        return _from_full_tensors(folder.apart, folder.others)

    # MindSpore: pieces that a strategy joins, or one file of full tensors
    if strategy is not None:
        files, full_tensors = mindspore.open_full_tensors(path, strategy, verify=verify)
        return Foreign(full_tensors, files.strategy, tuple(files.loose), tuple(files.texts))
    file = _one_file(path, verify) if path.is_dir() else mindspore.open_source(path, verify=verify)
    return _from_full_tensors(lambda: _File(file), tuple(file.texts))


def _from_full_tensors(full_tensors: Callable[[], FullTensors], others: tuple[str, ...] = ()) -> Foreign:
    grid = Grid(())
    specs = full_tensors().specs
    entries = {
        n: Entry(Layout(grid, s.shape, ((),) * len(s.shape)), s.dtype, kind_of(n, specs))
        for n, s in specs.items()
    }
    return Foreign(full_tensors, Strategy(grid, entries), (), others)


def _one_file(path: Path, verify: bool) -> mindspore.RankSource:
    """Returns the file of rank 0, if rank folders have no strategy and all ranks have copies of one file."""
    files = {
        rank: mindspore.open_source(file, verify=verify) for rank, file in mindspore.rank_paths(path).items()
    }
    return mindspore.full_copy(f"{path}: no strategy file", files, verify=verify)


@dataclass(frozen=True)
class _File:
    file: mindspore.RankSource
    window: Window = field(default_factory=Window)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.file.specs

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        self.file.fill(self.window, name, part, out)


def import_full(
    src: Mapping[str, Blob],
    dst: Path,
    target: Strategy,
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    key: str | None = None,
) -> Report:
    """Writes the tensors of ``src`` as the checkpoint ``dst``.

    Everything is checked before the first byte is written. Raises as ``transform`` does.

    Args:
        src: The result of ``read_full`` or ``read_hf``, or blobs in memory. It may have a tied tensor under
            any of its names, or under several if the values are equal.
        dst: The folder to write.
        target: The layout to write.
        state: The checkpoint's state: any value that JSON can represent.
        overwrite: Replace a checkpoint at ``dst``.
        key: Where the key to encrypt ``dst`` with is; ``None`` writes plain files.
    """
    return import_tensors(Blobs(src), dst, target, state, overwrite=overwrite, key=key)


def import_tensors(
    src: FullTensors,
    dst: Path,
    target: Strategy,
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    key: str | None = None,
    beside: Sequence[FullTensors] = (),
) -> Report:
    """Does the same as ``import_full`` for any source.

    ``beside`` are further objects for the same source, each for one more thread. One rank is written at a
    time by each thread.
    """
    check_destination(dst, overwrite, is_checkpoint, "checkpoint")
    specs = src.specs
    names = _names(src, specs, target)
    workers = 1 + len(beside)

    def cut(source: FullTensors, name: str, box: Box) -> Iterator[memoryview]:
        return stream_box(box, specs[names[name]].dtype, partial(source.fill, names[name]))

    # a source serves one thread at a time
    free = SimpleQueue[FullTensors]()
    for source in (src, *beside):
        free.put(source)
    with fresh(dst) as new, WriteBehind() as behind:

        def write(rank: int) -> RankRecord:
            source = free.get()
            try:
                return RankWriter(new, rank, target, key=key, behind=behind).write(partial(cut, source))
            finally:
                free.put(source)

        with ThreadPoolExecutor(workers) as pool:
            records = list(pool.map(write, range(target.grid.size)))
        behind.wait()
        seal(new, records, state)

    files = {path: record for r in records for path, record in r.files.items()}
    read = sum(specs[theirs].nbytes for theirs in names.values())
    written = sum(f.size for f in files.values())
    return Report(dst, len(files), bytes_read=read, bytes_written=written, peak=workers * PEAK)


def to_checkpoint(
    src: Path,
    dst: Path,
    to: mindspore.StrategyInput | mindspore.Layouts,
    strategy: str | None,
    *,
    overwrite: bool = False,
    key: str | None = None,
    workers: int = 1,
) -> Report:
    """Writes a foreign checkpoint ``src`` as our checkpoint ``dst`` of step 0. Raises as ``transform`` does.

    The report's ``left`` lists the entries of ``src`` that are not tensors.
    """
    check_apart(src, dst)
    source, target = open_source_and_layout(src, to, strategy)
    sources = [source.read_full() for _ in range(workers)]
    report = import_tensors(
        sources[0], dst, target, {"step": 0}, overwrite=overwrite, key=key, beside=sources[1:]
    )
    return replace(report, left=source.others)


def open_source_and_layout(
    src: Path, to: mindspore.StrategyInput | mindspore.Layouts, strategy: str | None, *, verify: bool = True
) -> tuple[Foreign, Strategy]:
    """Opens ``src`` and returns it together with the layout to write.

    Tensors that the strategies do not list are in the layout as full tensors on every rank.
    """
    stage = None
    if not callable(to) and strategy is not None and src.is_dir():
        files = {
            rank: mindspore.open_source(path, verify=False).specs
            for rank, path in mindspore.rank_paths(src).items()
        }
        stage = mindspore.by_stage(open_strategy("src_strategy", strategy), to, files)
    if stage is not None:
        text = f"the source is only stage {stage} of a pipeline, not a full model"
        raise ValueError(f"{text}; give format ckpt or safetensors for rank files")

    source = foreign(src, None if strategy is None else Path(strategy), verify=verify)
    target = mindspore.laid_out(to, source.strategy)
    match(source.strategy, target)

    # tensors that the strategies do not list are full on every rank
    specs = source.read_full().specs if source.loose else {}
    loose = {
        n: Entry(Layout(target.grid, specs[n].shape, ((),) * len(specs[n].shape)), specs[n].dtype)
        for n in source.loose
    }
    return source, Strategy(target.grid, {**target.entries, **loose})


def pieces_of_rank(src: FullTensors, target: Strategy, rank: int) -> Iterator[tuple[str, Blob]]:
    """Yields the name and the piece of each tensor that ``rank`` of ``target`` holds, each in its own memory.

    Raises ``ValueError`` as ``import_full`` does.
    """
    specs = src.specs
    names = _names(src, specs, target)
    for name, entry in target.entries_of(rank).items():
        box = entry.layout.box(rank)
        assert box is not None
        spec = specs[names[name]]
        data = bytearray()
        for chunk in stream_box(box, spec.dtype, partial(src.fill, names[name])):
            data += chunk
        yield name, Blob.of(spec.dtype, box.shape, data)


def _names(src: FullTensors, specs: Mapping[str, TensorSpec], target: Strategy) -> dict[str, str]:
    """Returns for each entry of ``target`` the name in ``src``."""
    source_names = {n: [a for a in (n, *e.aliases) if a in specs] for n, e in target.entries.items()}
    if unequal := [*unequal_ties(src, target)]:
        text = "in the destination, but their values differ in the source"
        raise ValueError("\n".join(f"{name}: tied to {first} {text}" for first, name in unequal))
    twins = {n for names in source_names.values() for n in names[1:]}

    grid = Grid(())
    entries = {
        n: Entry(Layout(grid, s.shape, ((),) * len(s.shape)), s.dtype)
        for n, s in specs.items()
        if n not in twins
    }
    return match(Strategy(grid, entries), target)


def unequal_ties(src: FullTensors, target: Strategy) -> Iterator[tuple[str, str]]:
    """Yields pairs of names of one tensor of ``target`` under which ``src`` has different values.

    Files are read up to the first difference.
    """
    specs = src.specs
    for first, entry in target.entries.items():
        names = [name for name in (first, *entry.aliases) if name in specs]
        for name in names[1:]:
            if specs[names[0]] != specs[name] or not _same(src, names[0], name):
                yield names[0], name


def _same(src: FullTensors, a: str, b: str) -> bool:
    return all(x == y for x, y in zip(chunks(src, a), chunks(src, b), strict=True))

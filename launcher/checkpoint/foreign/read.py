"""Reads other programs' checkpoints as full tensors by name: Hugging Face, MindSpore, torch DCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from launcher.checkpoint.foreign.dcp import read_dcp
from launcher.checkpoint.foreign.dcp.metadata import NAME as METADATA
from launcher.checkpoint.foreign.hf_read import INDEX, ONE, read_hf
from launcher.checkpoint.foreign.rename import Table, renamed
from launcher.checkpoint.full_tensors import Blobs, FullTensors, RenamedTensors
from launcher.checkpoint.layout.strategy import Entry, Strategy
from launcher.checkpoint.mindspore.formats.to_ours import kind_of
from launcher.checkpoint.mindspore.rank_conversion import whole_tensors
from launcher.checkpoint.mindspore.rank_files import full_copy
from launcher.checkpoint.mindspore.rank_folders import rank_paths
from launcher.checkpoint.mindspore.rank_source import RankSource, open_source
from launcher.checkpoint.tensorfile.mmap_window import Window
from launcher.checkpoint.transform import is_checkpoint
from launcher.plan.values.facts import TensorSpec
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Box, Layout
from launcher.untrusted.files import irregular, stands

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


def form_of(path: Path) -> ForeignForm:
    """Returns the format of ``path``, by the files that exist.

    Raises ``ValueError`` naming ``path`` if it is nothing that can be imported.
    """
    if kind := irregular(path):
        raise ValueError(f"{path}: {kind}")
    if path.is_file():
        if path.suffix not in (".safetensors", ".ckpt"):
            raise ValueError(f"{path}: neither a .safetensors nor a .ckpt file")
        return "hf" if path.suffix == ".safetensors" else "mindspore"

    # a folder: each format has files of a certain name
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    if is_checkpoint(path):
        raise ValueError(f"{path}: a checkpoint of ours, which needs no import; give it as checkpoint.resume")
    if stands(path / ONE) or stands(path / INDEX) or any(path.glob("pytorch_model*.bin")):
        return "hf"  # if there are only pickles, its reader raises with the way out
    if stands(path / METADATA):
        return "dcp"
    if any(path.glob("rank_*")):
        return "mindspore"

    forms = f"a Hugging Face folder ({ONE} or {INDEX}), a torch DCP folder ({METADATA}), rank_<k> folders"
    raise ValueError(f"{path}: none of {forms}")


def outline(path: Path, strategy: Path | None = None) -> dict[str, TensorSpec]:
    """Returns the specs of ``read_incoming``'s tensors, by old name, from headers alone. Raises as it does.

    Unchanged files are read once: a request is checked again for each cure that is tried, and a header with
    200,000 names takes seconds to read.
    """
    files = (*_files(path), *(() if strategy is None else _files(strategy)))
    return dict(_outline(path, strategy, files))


@lru_cache(maxsize=2)
def _outline(path: Path, strategy: Path | None, files: tuple[FileState, ...]) -> Mapping[str, TensorSpec]:
    return foreign(path, strategy, verify=False).whole().specs


def _files(path: Path) -> Iterator[FileState]:
    """Yields name, inode, size and modification time of every file at ``path`` or below."""
    there = [path] if not path.is_dir() else [p for p in sorted(path.rglob("*")) if p.is_file()]
    for file in there:
        with suppress(OSError):  # the reader of the file raises the error
            about = file.stat()
            yield str(file), about.st_ino, about.st_size, about.st_mtime_ns


def read_incoming(
    path: Path, names: Table | None = None, *, strategy: Path | None = None, strict: bool = True
) -> Incoming:
    """Opens ``path`` as full tensors, however they are cut or chunked there.

    ``names`` maps its names to ours, see ``renamed``. ``strategy`` is MindSpore's strategy file, for rank
    folders. Raises ``ValueError`` naming the file.
    """
    found = foreign(path, strategy)
    source = found.whole()
    new = renamed(source.specs, names, strict=strict)
    tensors = RenamedTensors(source, {name: old for old, name in new.names.items()})
    return Incoming(tensors, new.unmatched, found.others)


@dataclass(frozen=True)
class Foreign:
    """Another program's checkpoint.

    ``whole`` returns all full tensors, for use by one thread; ``strategy`` is their layout in the files.
    ``loose`` are tensors of one element that it does not list; ``others`` are entries that are not tensors.
    """

    whole: Callable[[], FullTensors]
    strategy: Strategy
    loose: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def foreign(path: Path, strategy: Path | None = None, *, verify: bool = True) -> Foreign:
    """Opens ``path`` and checks everything; without ``verify`` only headers are read.

    Raises ``ValueError`` naming the file.
    """
    form = form_of(path)
    if strategy is not None and not (form == "mindspore" and path.is_dir()):
        raise ValueError(f"{path}: whole tensors, which have no strategy; leave strategy out")
    if form == "hf":
        blobs = read_hf(path)
        return _of_whole(lambda: Blobs(blobs))
    if form == "dcp":
        folder = read_dcp(path)
        return _of_whole(folder.apart, folder.others)

    # MindSpore's: pieces that a strategy joins, or one file of full tensors
    if strategy is not None:
        files, whole = whole_tensors(path, strategy, verify=verify)
        return Foreign(whole, files.strategy, tuple(files.loose), tuple(files.texts))
    file = _one_file(path, verify) if path.is_dir() else open_source(path, verify=verify)
    return _of_whole(lambda: _File(file), tuple(file.texts))


def _of_whole(whole: Callable[[], FullTensors], others: tuple[str, ...] = ()) -> Foreign:
    grid = Grid(())
    specs = whole().specs
    entries = {
        n: Entry(Layout(grid, s.shape, ((),) * len(s.shape)), s.dtype, kind_of(n, specs))
        for n, s in specs.items()
    }
    return Foreign(whole, Strategy(grid, entries), (), others)


def _one_file(path: Path, verify: bool) -> RankSource:
    """Returns the file of rank 0 of rank folders without a strategy: all data-parallel ranks have copies."""
    files = {rank: open_source(file, verify=verify) for rank, file in rank_paths(path).items()}
    return full_copy(f"{path}: no strategy file", files, verify=verify)


@dataclass(frozen=True)
class _File:
    file: RankSource
    window: Window = field(default_factory=Window)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.file.specs

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        self.file.fill(self.window, name, part, out)

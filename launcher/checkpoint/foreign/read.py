"""Other programs' checkpoints as whole tensors by name: Hugging Face, MindSpore, torch DCP."""

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
    """``tensors`` by new name, which stay on disk.

    ``left`` are the old names that no row is about, ``others`` are entries that are no tensors.
    """

    tensors: FullTensors
    left: tuple[str, ...]
    others: tuple[str, ...] = ()


def form_of(path: Path) -> ForeignForm:
    """Told by what is there.

    Raises ``ValueError`` naming ``path`` when it is nothing that can be imported.
    """
    if kind := irregular(path):
        raise ValueError(f"{path}: {kind}")
    if path.is_file():
        if path.suffix not in (".safetensors", ".ckpt"):
            raise ValueError(f"{path}: neither a .safetensors nor a .ckpt file")
        return "hf" if path.suffix == ".safetensors" else "mindspore"

    # a folder, by the files that each form must have
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    if is_checkpoint(path):
        raise ValueError(f"{path}: a checkpoint of ours, which needs no import; give it as checkpoint.resume")
    if stands(path / ONE) or stands(path / INDEX) or any(path.glob("pytorch_model*.bin")):
        return "hf"  # of pickles alone its reader says what to do
    if stands(path / METADATA):
        return "dcp"
    if any(path.glob("rank_*")):
        return "mindspore"

    forms = f"a Hugging Face folder ({ONE} or {INDEX}), a torch DCP folder ({METADATA}), rank_<k> folders"
    raise ValueError(f"{path}: none of {forms}")


def outline(path: Path, strategy: Path | None = None) -> dict[str, TensorSpec]:
    """The tensors that ``read_incoming`` finds, by old name, from heads alone. Raises as it does.

    Files that have not changed are read once: a request is judged again for each cure that it is shown, and a
    head with 200,000 names takes seconds.
    """
    files = (*_files(path), *(() if strategy is None else _files(strategy)))
    return dict(_outline(path, strategy, files))


@lru_cache(maxsize=2)
def _outline(path: Path, strategy: Path | None, files: tuple[FileState, ...]) -> Mapping[str, TensorSpec]:
    return foreign(path, strategy, verify=False).whole().specs


def _files(path: Path) -> Iterator[FileState]:
    """Every file at ``path`` or below: its name, its inode, its size and when it was written."""
    there = [path] if not path.is_dir() else [p for p in sorted(path.rglob("*")) if p.is_file()]
    for file in there:
        with suppress(OSError):  # whoever reads it says why it cannot be read
            about = file.stat()
            yield str(file), about.st_ino, about.st_size, about.st_mtime_ns


def read_incoming(
    path: Path, names: Table | None = None, *, strategy: Path | None = None, strict: bool = True
) -> Incoming:
    """The tensors of ``path``, each whole, however it is cut or chunked there.

    ``strategy`` is MindSpore's for rank folders. Raises ``ValueError`` naming the file.
    """
    found = foreign(path, strategy)
    source = found.whole()
    new = renamed(source.specs, names, strict=strict)
    tensors = RenamedTensors(source, {name: old for old, name in new.names.items()})
    return Incoming(tensors, new.unmatched, found.others)


@dataclass(frozen=True)
class Foreign:
    """``whole`` gives all tensors, each time for one thread; ``strategy`` is how they lie in the files.

    ``loose`` are those that it does not list, of one element each; ``others`` entries that are no tensors.
    """

    whole: Callable[[], FullTensors]
    strategy: Strategy
    loose: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def foreign(path: Path, strategy: Path | None = None, *, verify: bool = True) -> Foreign:
    """Everything checked. ``verify``: False where heads alone shall be read."""
    form = form_of(path)
    if strategy is not None and not (form == "mindspore" and path.is_dir()):
        raise ValueError(f"{path}: whole tensors, which have no strategy; leave strategy out")
    if form == "hf":
        blobs = read_hf(path)
        return _of_whole(lambda: Blobs(blobs))
    if form == "dcp":
        folder = read_dcp(path)
        return _of_whole(folder.apart, folder.others)

    # MindSpore's: pieces that a strategy brings together, or one file of whole tensors
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
    """Of rank folders that need no strategy: those of data-parallel ranks, which are copies."""
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

"""Other programs' checkpoints as whole tensors by name: Hugging Face, MindSpore, torch DCP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from launcher.checkpoint.dcp import read_dcp
from launcher.checkpoint.dcp.metadata import NAME as METADATA
from launcher.checkpoint.hf import INDEX, ONE, read_hf
from launcher.checkpoint.names import Table, renamed
from launcher.checkpoint.peer import whole_tensors
from launcher.checkpoint.rank_folders import rank_paths
from launcher.checkpoint.rank_source import RankSource, open_source
from launcher.checkpoint.transform import is_checkpoint
from launcher.checkpoint.whole import Blobs, Chosen, Whole
from launcher.checkpoint.window import Window
from launcher.plan.facts import TensorSpec
from launcher.plan.layout import Box
from launcher.untrusted_file import irregular, stands

Form = Literal["hf", "mindspore", "dcp"]


@dataclass(frozen=True)
class Incoming:
    """``tensors`` by new name, which stay on disk.

    ``left`` are the old names that no row is about, ``others`` are entries that are no tensors.
    """

    tensors: Whole
    left: tuple[str, ...]
    others: tuple[str, ...] = ()


def form_of(path: Path) -> Form:
    """Told by what is there. Raises ``ValueError`` naming ``path`` when it is nothing that can be imported."""
    if kind := irregular(path):
        raise ValueError(f"{path}: {kind}")
    if path.is_file():
        if path.suffix not in (".safetensors", ".ckpt"):
            raise ValueError(f"{path}: neither a .safetensors nor a .ckpt file")
        return "hf" if path.suffix == ".safetensors" else "mindspore"
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
    raise ValueError(
        f"{path}: none of a Hugging Face folder ({ONE} or {INDEX}), a torch DCP folder ({METADATA}), rank_<k> folders"
    )


def outline(path: Path, strategy: Path | None = None) -> dict[str, TensorSpec]:
    """The tensors that ``read_incoming`` finds, by old name, from heads alone. Raises as it does."""
    return dict(_source(path, strategy, verify=False)[0].specs)


def read_incoming(
    path: Path, names: Table | None = None, *, strategy: Path | None = None, strict: bool = True
) -> Incoming:
    """The tensors of ``path``, each whole, however it is cut or chunked there.

    ``strategy`` is MindSpore's for rank folders. Raises ``ValueError`` naming the file.
    """
    source, others = _source(path, strategy, verify=True)
    found = renamed(source.specs, names, strict=strict)
    return Incoming(Chosen(source, {name: old for old, name in found.names.items()}), found.unmatched, others)


def _source(path: Path, strategy: Path | None, *, verify: bool) -> tuple[Whole, tuple[str, ...]]:
    """With the entries that are no tensors. ``verify``: False where heads alone shall be read."""
    form = form_of(path)
    if strategy is not None and not (form == "mindspore" and path.is_dir()):
        raise ValueError(f"{path}: whole tensors, which have no strategy; leave strategy out")
    if form == "hf":
        return Blobs(read_hf(path)), ()
    if form == "dcp":
        folder = read_dcp(path)
        return folder, folder.others
    if strategy is not None:
        return whole_tensors(path, strategy, verify=verify), ()
    return _File(open_source(_one_file(path) if path.is_dir() else path, verify=verify)), ()


def _one_file(path: Path) -> Path:
    """Of rank folders that need no strategy."""
    files = rank_paths(path)
    if [*files] != [0]:
        told = f"ranks {', '.join(map(str, files))}"
        raise ValueError(f"{path}: pieces of {told}; give the strategy file that they were saved with")
    return files[0]


@dataclass(frozen=True)
class _File:
    file: RankSource
    window: Window = field(default_factory=Window)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self.file.specs

    def fill(self, name: str, part: Box, out: npt.NDArray[Any]) -> None:
        self.file.fill(self.window, name, part, out)

"""Other programs' checkpoints as whole tensors by name: Hugging Face, MindSpore, torch DCP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.checkpoint.blob import Blob
from launcher.checkpoint.dcp import read_dcp
from launcher.checkpoint.dcp.metadata import NAME as METADATA
from launcher.checkpoint.files import write_stream
from launcher.checkpoint.hf import INDEX, ONE, read_hf
from launcher.checkpoint.names import Table
from launcher.checkpoint.peer import transform_checkpoints, whole_tensors
from launcher.checkpoint.rank_folders import rank_paths
from launcher.checkpoint.rank_source import open_source
from launcher.checkpoint.transform import is_checkpoint
from launcher.plan.facts import TensorSpec

Form = Literal["hf", "mindspore", "dcp"]


@dataclass(frozen=True)
class Incoming:
    """``tensors`` by new name, read from disk when looked at.

    ``left`` are the old names that no row is about, ``others`` are entries that are no tensors.
    """

    tensors: Mapping[str, Blob]
    left: tuple[str, ...]
    others: tuple[str, ...] = ()


def form_of(path: Path) -> Form:
    """Told by what is there. Raises ``ValueError`` naming ``path`` when it is nothing that can be imported."""
    if path.is_file():
        if path.suffix not in (".safetensors", ".ckpt"):
            raise ValueError(f"{path}: neither a .safetensors nor a .ckpt file")
        return "hf" if path.suffix == ".safetensors" else "mindspore"
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    if is_checkpoint(path):
        raise ValueError(f"{path}: a checkpoint of ours, which needs no import; give it as checkpoint.resume")
    if (path / ONE).is_file() or (path / INDEX).is_file() or any(path.glob("pytorch_model*.bin")):
        return "hf"  # of pickles alone its reader says what to do
    if (path / METADATA).is_file():
        return "dcp"
    if any(path.glob("rank_*")):
        return "mindspore"
    raise ValueError(
        f"{path}: none of a Hugging Face folder ({ONE} or {INDEX}), a torch DCP folder ({METADATA}), rank_<k> folders"
    )


def outline(path: Path, strategy: Path | None = None) -> dict[str, TensorSpec]:
    """The tensors that ``read_incoming`` finds, by old name, from heads alone. Raises as it does."""
    form = form_of(path)
    _check_strategy(path, form, strategy)
    if form == "hf":
        return dict(read_hf(path).specs)
    if form == "dcp":
        return dict(read_dcp(path).specs)
    if path.is_dir() and strategy is not None:
        return whole_tensors(path, strategy)
    return dict(open_source(_one_file(path) if path.is_dir() else path, verify=False).specs)


def read_incoming(
    path: Path, scratch: Path, names: Table | None = None, *, strategy: Path | None = None, strict: bool = True
) -> Incoming:
    """The tensors of ``path``. What is cut or chunked there is put together in ``scratch``, an empty folder.

    ``strategy`` is MindSpore's for rank folders. Raises ``ValueError`` naming the file.
    """
    form = form_of(path)
    _check_strategy(path, form, strategy)
    if form == "mindspore":
        path = _whole_folder(path, scratch, strategy) if path.is_dir() else _whole_file(path, scratch)
    others: tuple[str, ...] = ()
    if form == "dcp":
        path, others = _whole_dcp(path, scratch)
    found = read_hf(path, names, strict=strict)
    return Incoming(found, found.unmatched, others)


def _check_strategy(path: Path, form: Form, strategy: Path | None) -> None:
    if strategy is not None and not (form == "mindspore" and path.is_dir()):
        raise ValueError(f"{path}: whole tensors, which have no strategy; leave strategy out")


def _whole_dcp(path: Path, scratch: Path) -> tuple[Path, tuple[str, ...]]:
    folder, out = read_dcp(path), scratch / ONE
    write_stream(out, folder.specs, folder.chunks, {}, digested=False)
    return out, folder.others


def _whole_folder(path: Path, scratch: Path, strategy: Path | None) -> Path:
    if strategy is None:
        file = _one_file(path)
        return _whole_file(file, scratch) if file.suffix == ".ckpt" else file
    transform_checkpoints(path, scratch / "whole", "whole", strategy)
    return scratch / "whole" / "rank_0" / "whole0.safetensors"


def _one_file(path: Path) -> Path:
    """Of rank folders that need no strategy."""
    files = rank_paths(path)
    if [*files] != [0]:
        told = f"ranks {', '.join(map(str, files))}"
        raise ValueError(f"{path}: pieces of {told}; give the strategy file that they were saved with")
    return files[0]


def _whole_file(path: Path, scratch: Path) -> Path:
    source, out = open_source(path), scratch / ONE
    write_stream(out, source.specs, lambda name: (memoryview(c) for c in source.chunks(name)), {}, digested=False)
    return out

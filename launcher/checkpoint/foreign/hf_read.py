"""Reads Hugging Face folders: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher.checkpoint.foreign.rename import Table, renamed
from launcher.checkpoint.tensorfile.blob import Blob
from launcher.checkpoint.tensorfile.header import Header, read_header
from launcher.checkpoint.tensorfile.safetensors import blob_at, mapped
from launcher.plan.values.facts import TensorSpec
from launcher.untrusted.files import RefusedFile, read_json, stands

CONFIG = "config.json"
ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OPEN = 64  # shards mapped at once


class HfFolder(Mapping[str, Blob]):
    """Every tensor by name, except those that the table leaves out. Bytes are read from disk on first access.

    ``unmatched`` are the names in the folder that no row of the table matches.
    """

    def __init__(self, headers: Mapping[Path, Header], table: Table | None, *, strict: bool) -> None:
        where = {name: path for path, header in headers.items() for name in header.entries}
        new = renamed(where, table, strict=strict)
        self.unmatched = new.unmatched
        self._headers = headers
        self._where = {name: (where[old], old) for old, name in new.names.items()}
        self._map = lru_cache(maxsize=OPEN)(mapped)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: self._headers[path].entries[old].spec for name, (path, old) in self._where.items()}

    def __getitem__(self, name: str) -> Blob:
        path, old = self._where[name]
        return blob_at(self._map(path), self._headers[path], old)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def read_hf(path: Path, names: Table | None = None, *, strict: bool = True) -> HfFolder:
    """Opens the folder ``path``, or one safetensors file. ``names`` maps its names to ours, see ``renamed``.

    Every header is read and checked. Raises ``ValueError`` naming the file, with ``strict`` also for
    unmatched names.
    """
    if stands(path):
        return HfFolder({path: read_header(path)}, names, strict=strict)
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")

    # one file, or several with an index
    one = path / ONE
    index = path / INDEX
    if stands(one) and stands(index):
        raise ValueError(f"{path}: both {ONE} and {INDEX} are there, which may differ; remove one of them")
    if stands(one):
        return HfFolder({one: read_header(one)}, names, strict=strict)
    if stands(index):
        return HfFolder(_shards(index), names, strict=strict)

    if pickles := sorted(p.name for p in path.glob("*.bin")):
        raise ValueError(
            f"{path}: only {', '.join(pickles)}, pickled, which is never loaded; save it as safetensors first"
        )
    raise ValueError(f"{path}: neither {ONE} nor {INDEX} is there")


def model_type(folder: Path) -> object:
    """Returns ``model_type`` of the folder's ``config.json``. Raises as ``read_json`` does."""
    data = read_json(folder / CONFIG, unique=True)
    return data.get("model_type") if isinstance(data, dict) else None


def named_dtype(folder: Path) -> str | None:
    """Returns the dtype in the folder's ``config.json``: ``dtype`` or, in older ones, ``torch_dtype``."""
    data = read_json(folder / CONFIG, unique=True)
    inner = data.get("text_config") if isinstance(data, dict) else None
    of = [part for part in (data, inner) if isinstance(part, dict)]
    found = (part.get(key) for part in of for key in ("dtype", "torch_dtype"))
    return next((name for name in found if isinstance(name, str)), None)


def _shards(index: Path) -> dict[Path, Header]:
    weights = _weight_map(index)
    for file in dict.fromkeys(weights.values()):
        if not _plain(file):
            raise ValueError(f"{index}: {file} is not the name of a .safetensors file in this folder")
        if not stands(index.parent / file):
            raise ValueError(f"{index}: shard {file} is missing")

    headers = {file: read_header(index.parent / file) for file in sorted({*weights.values()})}
    found = [*_differences(weights, headers)]
    if found:
        raise ValueError("\n".join(f"{index}: {f}" for f in found))
    return {index.parent / file: header for file, header in headers.items()}


def _differences(weights: Mapping[str, str], headers: Mapping[str, Header]) -> Iterator[str]:
    homes: dict[str, list[str]] = {}
    for file, header in headers.items():
        for name in header.entries:
            homes.setdefault(name, []).append(file)

    for name, files in homes.items():
        if len(files) > 1:
            yield f"tensor {name} is in {' and in '.join(files)}"
        elif name not in weights:
            yield f"tensor {name} of {files[0]} is not listed"
    for name, file in weights.items():
        if name not in headers[file].entries:
            yield f"tensor {name} is not in {file}"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        data: Any = read_json(index, unique=True)
    except RefusedFile:
        raise
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{index}: no JSON") from error
    except ValueError as error:
        raise ValueError(f"{index}: {error}") from error
    found = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
        raise ValueError(f"{index}: weight_map is not a mapping of tensor names to file names")
    return found


def _plain(file: str) -> bool:
    return file.endswith(".safetensors") and "/" not in file and "\\" not in file and "\0" not in file

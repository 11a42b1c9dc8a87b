"""What a complete checkpoint folder consists of: the manifest, which is written last."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoint.durable import write_text
from launcher.checkpoint.keys import is_place
from launcher.checkpoint.strategy import Kind

FORMAT, VERSION = "launcher.checkpoint", 1
NAME = "manifest.json"
FILE_OF: Mapping[Kind, str] = {
    "param": "model.safetensors",
    "buffer": "model.safetensors",
    "optim": "optimizer.safetensors",
}
EXTRA = "extra.safetensors"  # tensors of one rank, outside every layout
_FILE = re.compile(r"rank_\d+/(model|optimizer|extra)\.safetensors|strategy/stage\d+\.json|state\.json")


@dataclass(frozen=True)
class FileRecord:
    """``digest`` is that of the whole file (SHA-256), of the header alone where each of ``tensors`` has its own.

    ``salt`` is that of an encrypted file, which no other file has.
    """

    size: int
    digest: str
    tensors: Mapping[str, str]
    salt: str | None = None


@dataclass(frozen=True)
class Manifest:
    """``strategy`` is the digest of the strategy; ``files`` are by path within the folder.

    ``key``: where the key of the tensor files is; ``None``: they are not encrypted. ``mac``: as ``authentic.mac`` makes
    it of all the rest with that key.
    """

    world: int
    strategy: str
    files: Mapping[str, FileRecord]
    key: str | None = None
    mac: str | None = None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_text(folder / NAME, json.dumps(stated(manifest), indent=1) + "\n")


def stated(manifest: Manifest) -> dict[str, Any]:
    """What the file says, in its order."""
    files = {path: _given(vars(manifest.files[path])) for path in sorted(manifest.files)}
    return {"format": FORMAT, "version": VERSION, **_given(vars(manifest)), "files": files}


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def read_manifest(folder: Path) -> Manifest:
    """Raises ``ValueError`` unless the folder is complete: the manifest there, and each file there at its size."""
    manifest = parse_manifest(folder)
    check_files(folder, manifest)
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """What it says; nothing else is looked at. Raises ``ValueError``."""
    path = folder / NAME
    if not folder.is_dir():
        raise ValueError(f"{folder}: no checkpoint: no such folder")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: incomplete checkpoint: it has no {NAME}, which is written last") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON") from error
    return _parse(path, data)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises ``ValueError`` unless each file is there at its size."""
    for name, record in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder}: incomplete checkpoint: {name} is missing")
        if (size := file.stat().st_size) != record.size:
            raise ValueError(f"{folder}: incomplete checkpoint: {name} has {size} bytes, {NAME} says {record.size}")


def _parse(path: Path, data: Any) -> Manifest:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'{path}: not a checkpoint manifest: "format" is not "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ValueError(f"{path}: version {data.get('version')}; this launcher reads version {VERSION}")
    try:
        files = {
            str(name): FileRecord(int(r["size"]), str(r["digest"]), dict(r["tensors"]), _text(r.get("salt")))
            for name, r in data["files"].items()
        }
        manifest = Manifest(
            int(data["world"]), str(data["strategy"]), files, _place(data.get("key")), _text(data.get("mac"))
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: a field is missing or of the wrong type: {error}") from error
    for name in files:
        if not _FILE.fullmatch(name):
            raise ValueError(f"{path}: {name} is not the name of a checkpoint file")
    return manifest


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _place(key: Any) -> str | None:
    if key is not None and not (isinstance(key, str) and is_place(key)):
        raise ValueError("key does not say where a key is")
    return key


def rank_file(rank: int, file: str) -> str:
    """Its path within the folder."""
    return f"rank_{rank}/{file}"


def stamp(rank: int, world: int, strategy: str) -> dict[str, str]:
    """What each file says of itself, so that one in another's place is noticed."""
    return {"format": "pt", "launcher.rank": str(rank), "launcher.world": str(world), "launcher.strategy": strategy}

"""What a complete checkpoint folder consists of: the manifest, which is written last."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.checkpoint.layout.strategy import Kind
from launcher.checkpoint.tensorfile.durable import write_text
from launcher.checkpoint.tensorfile.json_file import parsed, read_bytes
from launcher.checkpoint.tensorfile.keys import is_place
from launcher.checkpoint.tensorfile.safetensors import FileRecord

FORMAT, VERSION = "launcher.checkpoint", 2
UNDIGESTED = 1
"""The version before manifests had a digest of themselves.

Such checkpoints are read: what is wrong with their tensors and texts is noticed all the same, what is wrong
with the manifest not always.
"""
NAME = "manifest.json"
FILE_OF: Mapping[Kind, str] = {
    "param": "model.safetensors",
    "buffer": "model.safetensors",
    "optim": "optimizer.safetensors",
}
EXTRA = "extra.safetensors"  # tensors of one rank, outside every layout
_FILE = re.compile(r"rank_\d+/(model|optimizer|extra)\.safetensors|strategy/stage\d+\.json|state\.json")


@dataclass(frozen=True)
class Manifest:
    """``strategy`` is the digest of the strategy; ``files`` are by path within the folder.

    ``key``: where the key of the tensor files is; ``None``: they are not encrypted. ``digest``: of all the
    rest, as ``digested`` makes it; ``mac``: of the rest and the digest, as ``manifest_mac.mac`` makes it with
    that key.
    """

    world: int
    strategy: str
    files: Mapping[str, FileRecord]
    key: str | None = None
    digest: str | None = None
    mac: str | None = None
    version: int = VERSION


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_text(folder / NAME, json.dumps(stated(manifest), indent=1) + "\n")


def stated(manifest: Manifest) -> dict[str, Any]:
    """What the file says, in its order."""
    files = {path: _set_fields(vars(manifest.files[path])) for path in sorted(manifest.files)}
    return {"format": FORMAT, "version": manifest.version, **_set_fields(vars(manifest)), "files": files}


def canonical(manifest: Manifest) -> bytes:
    """What it says, the same bytes for the same value."""
    return json.dumps(stated(manifest), sort_keys=True, separators=(",", ":")).encode()


def digested(manifest: Manifest) -> Manifest:
    """With the SHA-256 of all that it says; the MAC covers the digest too."""
    bare = canonical(replace(manifest, digest=None, mac=None))
    return replace(manifest, digest=hashlib.sha256(bare).hexdigest())


def _set_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def read_manifest(folder: Path) -> Manifest:
    """Raises ``ValueError`` unless the folder is complete: the manifest is there, each file has its size."""
    manifest = parse_manifest(folder)
    check_files(folder, manifest)
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """What it says; nothing else is looked at. Raises ``ValueError``."""
    path = folder / NAME
    if not folder.is_dir():
        raise ValueError(f"{folder}: no checkpoint: no such folder")
    try:
        data = read_bytes(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder}: incomplete checkpoint: it has no {NAME}, which is written last"
        ) from error
    return _parse(path, parsed(path, data))


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises ``ValueError`` unless each file is there at its size."""
    for name, record in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder}: incomplete checkpoint: {name} is missing")
        size = file.stat().st_size
        if size != record.size:
            raise ValueError(
                f"{folder}: incomplete checkpoint: {name} has {size} bytes, {NAME} says {record.size}"
            )


def _parse(path: Path, data: Any) -> Manifest:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'{path}: not a checkpoint manifest: "format" is not "{FORMAT}"')
    version = data.get("version")
    if type(version) is not int or version not in (UNDIGESTED, VERSION):
        raise ValueError(
            f"{path}: version {version}; this launcher reads versions {UNDIGESTED} and {VERSION}"
        )
    try:
        manifest = _manifest(data, version)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: a field is missing or of the wrong type: {error}") from error

    for name in manifest.files:
        if not _FILE.fullmatch(name):
            raise ValueError(f"{path}: {name} is not the name of a checkpoint file")
    if version != UNDIGESTED and manifest.digest != digested(manifest).digest:
        raise ValueError(f"{path}: damaged: its digest is not that of what it says")
    return manifest


def _manifest(data: dict[str, Any], version: int) -> Manifest:
    more = () if version == UNDIGESTED else ("digest",)
    _check_fields(data, ("format", "version", "world", "strategy", "files", *more), ("key", "mac"))
    files = {name: _record(fields) for name, fields in data["files"].items()}
    key = _place(data.get("key"))
    digest = _text(data.get("digest"))
    mac = _text(data.get("mac"))
    world = _whole(data["world"])
    strategy = _known_text(data["strategy"])
    return Manifest(world, strategy, files, key=key, digest=digest, mac=mac, version=version)


def _record(fields: Any) -> FileRecord:
    _check_fields(fields, ("size", "digest", "tensors"), ("salt",))
    tensors = {name: _known_text(digest) for name, digest in fields["tensors"].items()}
    size = _whole(fields["size"])
    digest = _known_text(fields["digest"])
    return FileRecord(size, digest, tensors, salt=_text(fields.get("salt")))


def _check_fields(data: Any, needed: Collection[str], more: Collection[str]) -> None:
    if not isinstance(data, dict):
        raise TypeError(f"{type(data).__name__} is no mapping")
    absent = [name for name in needed if name not in data]
    if absent:
        raise ValueError(f"{absent[0]} is missing")
    unknown = [name for name in data if name not in (*needed, *more)]
    if unknown:
        raise ValueError(f"{unknown[0]} is not known")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{type(value).__name__} is no whole number")
    return value


def _known_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is no text")
    return value


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


def text_record(path: Path) -> FileRecord:
    """Its digest is one that nobody can make another text for: these files have no seal of their own."""
    return record_of(read_bytes(path))


def record_of(data: bytes) -> FileRecord:
    """That of a file of text with these bytes."""
    return FileRecord(len(data), hashlib.sha256(data).hexdigest(), {})


def stamp(rank: int, world: int, strategy: str) -> dict[str, str]:
    """What each file says of itself, so that one in another's place is noticed."""
    return {
        "format": "pt",
        "launcher.rank": str(rank),
        "launcher.world": str(world),
        "launcher.strategy": strategy,
    }

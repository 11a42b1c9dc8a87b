"""The manifest of a checkpoint: it is written last, and has a MAC if the checkpoint is encrypted."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.checkpoint.layout.strategy import Kind
from launcher.checkpoint.tensorfile.disk import parsed, read_bytes, write_text
from launcher.checkpoint.tensorfile.encryption import ANOTHER, FORMS, check_key, derived, is_place, load_key
from launcher.checkpoint.tensorfile.safetensors import FileRecord
from launcher.plan.resolve.encryption import Trust

FORMAT, VERSION = "launcher.checkpoint", 2
UNDIGESTED = 1
"""The version of manifests that contain no digest of themselves.

Such checkpoints can still be read. Damage to their tensors and text files is always noticed; damage to the
manifest may not be.
"""
MANIFEST = "manifest.json"
FILE_OF: Mapping[Kind, str] = {
    "param": "model.safetensors",
    "buffer": "model.safetensors",
    "optim": "optimizer.safetensors",
}
EXTRA = "extra.safetensors"  # tensors that belong to one rank and to no layout
_FILE = re.compile(r"rank_\d+/(model|optimizer|extra)\.safetensors|strategy/stage\d+\.json|state\.json")


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    ``world`` is the number of ranks, ``strategy`` the digest of the strategy; ``files`` are keyed by their
    path within the folder. ``key`` says where the key of the tensor files is, and is ``None`` if they are not
    encrypted. ``digest`` covers all other fields except ``mac`` (see ``digested``); ``mac`` covers all other
    fields, the digest included (see ``mac``).
    """

    world: int
    strategy: str
    files: Mapping[str, FileRecord]
    key: str | None = None
    digest: str | None = None
    mac: str | None = None
    version: int = VERSION


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_text(folder / MANIFEST, json.dumps(stated(manifest), indent=1) + "\n")


def stated(manifest: Manifest) -> dict[str, Any]:
    """Returns the JSON object that the file contains, its keys in the file's order."""
    files = {path: _set_fields(vars(manifest.files[path])) for path in sorted(manifest.files)}
    return {"format": FORMAT, "version": manifest.version, **_set_fields(vars(manifest)), "files": files}


def canonical(manifest: Manifest) -> bytes:
    """Returns the manifest as canonical JSON: equal manifests give equal bytes."""
    return json.dumps(stated(manifest), sort_keys=True, separators=(",", ":")).encode()


def digested(manifest: Manifest) -> Manifest:
    """Returns ``manifest`` with its digest, the SHA-256 of all other fields except the MAC.

    The MAC covers the digest too.
    """
    bare = canonical(replace(manifest, digest=None, mac=None))
    return replace(manifest, digest=hashlib.sha256(bare).hexdigest())


def _set_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class NoManifest(ValueError):
    """Raised if ``folder`` has no manifest: it is no checkpoint, or one that was never completed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder}: incomplete checkpoint: it has no {MANIFEST}, which is written last")
        self.folder = folder


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a complete folder.

    Raises ``ValueError`` unless the manifest exists and each file that it lists exists at the listed size.
    """
    manifest = parse_manifest(folder)
    check_files(folder, manifest)
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """Returns the manifest without looking at any other file. Raises ``ValueError``."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ValueError(f"{folder}: no checkpoint: no such folder")
    try:
        data = read_bytes(path)
    except FileNotFoundError as error:
        raise NoManifest(folder) from error
    return _parse(path, parsed(path, data))


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises ``ValueError`` unless each listed file exists at its listed size."""
    for name, record in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder}: incomplete checkpoint: {name} is missing")
        size = file.stat().st_size
        if size != record.size:
            raise ValueError(
                f"{folder}: incomplete checkpoint: {name} has {size} bytes, {MANIFEST} says {record.size}"
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
        raise ValueError(f"{path}: damaged: its digest does not match its content")
    return manifest


def _manifest(data: dict[str, Any], version: int) -> Manifest:
    more = () if version == UNDIGESTED else ("digest",)
    _check_fields(data, ("format", "version", "world", "strategy", "files", *more), ("key", "mac"))
    files = {name: _record(fields) for name, fields in data["files"].items()}
    key = _place(data.get("key"))
    digest = _text(data.get("digest"))
    mac = _text(data.get("mac"))
    world = _integer(data["world"])
    strategy = _known_text(data["strategy"])
    return Manifest(world, strategy, files, key=key, digest=digest, mac=mac, version=version)


def _record(fields: Any) -> FileRecord:
    _check_fields(fields, ("size", "digest", "tensors"), ("salt",))
    tensors = {name: _known_text(digest) for name, digest in fields["tensors"].items()}
    size = _integer(fields["size"])
    digest = _known_text(fields["digest"])
    return FileRecord(size, digest, tensors, salt=_text(fields.get("salt")))


def _check_fields(data: Any, needed: Collection[str], more: Collection[str]) -> None:
    if not isinstance(data, dict):
        raise TypeError(f"{type(data).__name__} is not a mapping")
    absent = [name for name in needed if name not in data]
    if absent:
        raise ValueError(f"{absent[0]} is missing")
    unknown = [name for name in data if name not in (*needed, *more)]
    if unknown:
        raise ValueError(f"{unknown[0]} is not known")


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{type(value).__name__} is not a whole number")
    return value


def _known_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is not text")
    return value


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _place(key: Any) -> str | None:
    if key is not None and not (isinstance(key, str) and is_place(key)):
        raise ValueError("key is not the place of a key")
    return key


def rank_file(rank: int, file: str) -> str:
    """Returns the path of a rank's file within the checkpoint folder."""
    return f"rank_{rank}/{file}"


def text_record(path: Path) -> FileRecord:
    """Returns the record of a text file.

    Its digest is cryptographic (SHA-256), because a text file has no authentication tag of its own.
    """
    return record_of(read_bytes(path))


def record_of(data: bytes) -> FileRecord:
    """Returns the record of a text file with these bytes."""
    return FileRecord(len(data), hashlib.sha256(data).hexdigest(), {})


def stamp(rank: int, world: int, strategy: str) -> dict[str, str]:
    """Returns the metadata that identifies a tensor file, so that a misplaced file is noticed."""
    return {
        "format": "pt",
        "launcher.rank": str(rank),
        "launcher.world": str(world),
        "launcher.strategy": strategy,
    }


INFO = b"launcher checkpoint manifest"
_CURE = f"restore the {MANIFEST} that was saved with this checkpoint, or use another checkpoint"


@dataclass(frozen=True)
class Opened:
    """The key of a checkpoint, and the place that it was loaded from."""

    place: str
    key: bytes = field(repr=False)


def authentic(manifest: Manifest, key: bytes) -> Manifest:
    """Returns ``manifest`` with its MAC."""
    return replace(manifest, mac=mac(manifest, key))


def mac(manifest: Manifest, key: bytes) -> str:
    """Returns the HMAC-SHA256 of all other fields of the manifest, in hexadecimal.

    It covers every file: tensor files by their salt, the others by their SHA-256. It covers nothing outside
    the folder: if a newer checkpoint is replaced by a complete older one, the MAC still matches, but the
    state has the older step.
    """
    content = canonical(replace(manifest, mac=None))
    return hmac.new(derived(key, b"", INFO, 32), content, hashlib.sha256).hexdigest()


def opened(folder: Path, manifest: Manifest, trust: Trust) -> Opened | None:
    """Returns the key if the checkpoint is encrypted, else ``None``.

    Raises ``ValueError`` unless the manifest is authentic under a key that ``trust`` accepts.
    """
    path = folder / MANIFEST
    if manifest.key is None:
        if manifest.mac is not None:
            raise ValueError(
                f"{path}: tampered with: it has a MAC but does not say where the key is; {_CURE}"
            )
        if trust.key is not None and not trust.plain:
            raise ValueError(
                f"{folder}: it is not encrypted but checkpoint.encrypt is set: "
                "it cannot be verified; checkpoint.accept_plain=true reads it anyway"
            )
        return None

    if manifest.mac is None:
        raise ValueError(
            f"{path}: it says that the checkpoint is encrypted but has no MAC: "
            f"it may have been changed; {_CURE}"
        )
    secret = _key(folder, manifest, places(manifest.key, trust))
    if not hmac.compare_digest(mac(manifest, secret.key), manifest.mac):
        raise ValueError(f"{path}: damaged or tampered with: its MAC does not match its content; {_CURE}")
    return secret


def unvouched(folder: Path, trust: Trust) -> str:
    """Returns a note for messages if the checkpoint is plain but ``trust`` names a key, else ``""``."""
    if trust.key is None or parse_manifest(folder).key is not None:
        return ""
    return "; it is not encrypted, so it cannot be verified"


def places(named: str | None, trust: Trust) -> tuple[str, ...]:
    """Returns the places to look for the key, in order.

    The place ``named`` by the manifest is used only if neither ``trust`` nor the environment names one.
    """
    configured = tuple(place for place in (trust.key, os.environ.get(ANOTHER)) if place)
    if configured:
        return configured
    return () if named is None else (named,)


def _key(folder: Path, manifest: Manifest, places: tuple[str, ...]) -> Opened:
    """Returns the first key whose id the first tensor file has. That file is not authenticated yet.

    Raises ``ValueError`` if no place has such a key.
    """
    files = sorted(folder / name for name in manifest.files if name.startswith("rank_"))
    errors = []
    for place in places:
        try:
            key = load_key(place)
            for path in files[:1]:
                if path.is_file():
                    check_key(path, key)
        except ValueError as error:
            errors.append(str(error))
        else:
            return Opened(place, key)

    reasons = "; ".join(errors)
    raise ValueError(f"{folder}: it is encrypted: {reasons}; set {ANOTHER} to the place of the key: {FORMS}")

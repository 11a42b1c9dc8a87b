"""The MAC of the manifest of an encrypted checkpoint: it proves that a holder of the key wrote it."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.checkpoint.manifest import NAME, Manifest, canonical, parse_manifest
from launcher.checkpoint.tensorfile.encryption import check_key, derived
from launcher.checkpoint.tensorfile.keys import ANOTHER, FORMS, load_key
from launcher.plan.values.trust import Trust

INFO = b"launcher checkpoint manifest"
_CURE = f"put back the {NAME} that was written with it, or use another checkpoint"


@dataclass(frozen=True)
class Opened:
    """The key of a checkpoint and where it was found."""

    place: str
    key: bytes = field(repr=False)


def authentic(manifest: Manifest, key: bytes) -> Manifest:
    """Returns ``manifest`` with its MAC."""
    return replace(manifest, mac=mac(manifest, key))


def mac(manifest: Manifest, key: bytes) -> str:
    """Returns the HMAC-SHA256 of all other fields of the manifest, in hexadecimal.

    It covers every file: tensor files by their salt, the others by their SHA-256. It covers nothing outside
    the folder: a complete older checkpoint in the place of a newer one still passes, but its state has its
    own step.
    """
    said = canonical(replace(manifest, mac=None))
    return hmac.new(derived(key, b"", INFO, 32), said, hashlib.sha256).hexdigest()


def opened(folder: Path, manifest: Manifest, trust: Trust) -> Opened | None:
    """Returns the key if the checkpoint is encrypted, else ``None``.

    Raises ``ValueError`` unless the manifest is authentic under a key that ``trust`` accepts.
    """
    path = folder / NAME
    if manifest.key is None:
        if manifest.mac is not None:
            raise ValueError(
                f"{path}: tampered with: it has a MAC, and does not say where the key is; {_CURE}"
            )
        if trust.key is not None and not trust.plain:
            raise ValueError(
                f"{folder}: it is not encrypted, and checkpoint.encrypt is set: "
                "nothing vouches for what it holds; checkpoint.accept_plain=true reads it all the same"
            )
        return None

    if manifest.mac is None:
        raise ValueError(
            f"{path}: it says that the checkpoint is encrypted, and has no MAC: "
            f"nothing tells whether it is as it was written; {_CURE}"
        )
    found = _key(folder, manifest, places(manifest.key, trust))
    if not hmac.compare_digest(mac(manifest, found.key), manifest.mac):
        raise ValueError(f"{path}: damaged or tampered with: its MAC is not that of what it says; {_CURE}")
    return found


def unvouched(folder: Path, trust: Trust) -> str:
    """Returns a remark for messages if the checkpoint is plain but ``trust`` names a key, else ``""``."""
    if trust.key is None or parse_manifest(folder).key is not None:
        return ""
    return "; it is not encrypted, nothing vouches for what it holds"


def places(named: str | None, trust: Trust) -> tuple[str, ...]:
    """Returns the places to look for the key, in order.

    The place ``named`` by the manifest is used only if neither ``trust`` nor the environment names one.
    """
    given = tuple(place for place in (trust.key, os.environ.get(ANOTHER)) if place)
    if given:
        return given
    return () if named is None else (named,)


def _key(folder: Path, manifest: Manifest, places: tuple[str, ...]) -> Opened:
    """Returns the first key whose id is in the first tensor file, which is not authenticated yet.

    Raises ``ValueError`` if no place has such a key.
    """
    files = sorted(folder / name for name in manifest.files if name.startswith("rank_"))
    found = []
    for place in places:
        try:
            key = load_key(place)
            for path in files[:1]:
                if path.is_file():
                    check_key(path, key)
        except ValueError as error:
            found.append(str(error))
        else:
            return Opened(place, key)

    told = "; ".join(found)
    raise ValueError(f"{folder}: it is encrypted: {told}; {ANOTHER}={FORMS} says where the key is now")

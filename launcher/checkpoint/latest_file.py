"""The file ``latest`` beside checkpoints: which of them is the newest, and which of a higher step are older.

A line a checkpoint, and last the SHA-256 of the lines above it; where checkpoints are encrypted, their MAC.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.manifest import Manifest, canonical
from launcher.checkpoint.manifest_mac import opened, places
from launcher.checkpoint.tensorfile.durable import write_text
from launcher.checkpoint.tensorfile.encryption import derived
from launcher.checkpoint.tensorfile.json_file import read_bytes
from launcher.checkpoint.tensorfile.keys import ANOTHER, FORMS, load_key
from launcher.plan.values.trust import Trust

LATEST = "latest"
STEP = re.compile(r"step-(\d+)")
LONGEST = 1 << 20  # bytes
_INFO = b"launcher checkpoint latest"
_OLDER = re.compile(rf"older ({STEP.pattern}) ([0-9a-f]{{64}})")
_LAST = re.compile(r"(sha256|hmac-sha256) ([0-9a-f]{64})")
_CURE = "without this file the checkpoint of the highest step is the newest"


@dataclass(frozen=True)
class Latest:
    """``older``: the checkpoints of a higher step than ``name``, by ``identity``; a run begun anew has some.

    ``digest`` covers ``text``; ``None``: as launchers wrote it before, the name alone. ``mac``: it is one.
    """

    name: str
    older: Mapping[str, str]
    text: str
    digest: str | None = None
    mac: bool = False


def identity(manifest: Manifest) -> str:
    """Tells a checkpoint from every other, also from one of the same step."""
    return hashlib.sha256(canonical(manifest)).hexdigest()


def write(checkpoints: Path, name: str, older: Mapping[str, str], place: str | None) -> None:
    """``place`` says where the key is that the checkpoints are encrypted with."""
    text = "".join([f"{name}\n", *(f"older {other} {found}\n" for other, found in older.items())])
    key = None if place is None else load_key(place)
    last = f"sha256 {_sha256(text)}" if key is None else f"hmac-sha256 {_mac(text, key)}"
    write_text(checkpoints / LATEST, f"{text}{last}\n")


def read(checkpoints: Path) -> Latest | None:
    """``None``: there is none. Raises ``ValueError`` when it cannot have been written so."""
    path = checkpoints / LATEST
    try:
        lines = read_bytes(path, LONGEST).decode().split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        lines = []

    # the last line ends too
    if not lines or lines.pop() or not lines or not STEP.fullmatch(lines[0]):
        raise damaged(path)
    if len(lines) == 1:
        return Latest(lines[0], {}, "")

    last = _LAST.fullmatch(lines[-1])
    older = [_OLDER.fullmatch(line) for line in lines[1:-1]]
    if last is None or None in older:
        raise damaged(path)
    text = "".join(f"{line}\n" for line in lines[:-1])
    above = {match[1]: match[3] for match in older if match}
    return Latest(lines[0], above, text, digest=last[2], mac=last[1] != "sha256")


def check(found: Latest, folder: Path, newest: Manifest, trust: Trust) -> None:
    """Raises ``ValueError`` when it is damaged or, of encrypted checkpoints, nobody vouches whom we trust.

    ``folder`` is the newest checkpoint, ``newest`` its manifest.
    """
    path = folder.parent / LATEST
    if found.mac:
        opened(folder, newest, trust)  # it says better that the key is another
        macs = [_mac(found.text, key) for key in _keys(path, newest, trust)]
        if not any(hmac.compare_digest(mac, str(found.digest)) for mac in macs):
            raise ValueError(
                f"{path}: damaged or tampered with: its MAC is not that of what it says; {_CURE}"
            )
    elif newest.key is not None:
        raise ValueError(
            f"{path}: it has no MAC, and the checkpoints are encrypted: nobody vouches for it; {_CURE}"
        )
    elif found.digest is not None and found.digest != _sha256(found.text):
        raise damaged(path)


def _keys(path: Path, newest: Manifest, trust: Trust) -> list[bytes]:
    """Those that there are; raises ``ValueError`` when there is none."""
    keys = []
    wrong = []
    for place in places(newest.key, trust):
        try:
            keys.append(load_key(place))
        except ValueError as error:
            wrong.append(str(error))
    if not keys:
        told = "; ".join(wrong) or f"{ANOTHER}={FORMS} says where it is"
        raise ValueError(f"{path}: its MAC needs the key: {told}")
    return keys


def damaged(path: Path) -> ValueError:
    return ValueError(f"{path}: damaged: it does not say which checkpoint is the newest; {_CURE}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _mac(text: str, key: bytes) -> str:
    return hmac.new(derived(key, b"", _INFO, 32), text.encode(), hashlib.sha256).hexdigest()

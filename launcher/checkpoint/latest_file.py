"""The file ``latest`` beside checkpoints: it names the newest one, and the older ones of a higher step.

The file has one line per checkpoint. Its last line is the SHA-256 of the lines above it or, if the
checkpoints are encrypted, their MAC.
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
LONGEST = 1 << 20  # the most bytes of the file
_INFO = b"launcher checkpoint latest"
_OLDER = re.compile(rf"older ({STEP.pattern}) ([0-9a-f]{{64}})")
_LAST = re.compile(r"(sha256|hmac-sha256) ([0-9a-f]{64})")
_CURE = "without this file the checkpoint of the highest step is the newest"


@dataclass(frozen=True)
class Latest:
    """The content of the file ``latest``.

    ``name`` is the newest checkpoint. ``older`` maps the name of each older checkpoint of a higher step,
    which a run that began anew left behind, to its ``identity``. ``digest`` covers ``text``; it is ``None``
    in a file of an earlier launcher, which contains the name alone. ``mac``: the digest is a MAC.
    """

    name: str
    older: Mapping[str, str]
    text: str
    digest: str | None = None
    mac: bool = False


def identity(manifest: Manifest) -> str:
    """Returns a digest that differs for every checkpoint, even for two of the same step."""
    return hashlib.sha256(canonical(manifest)).hexdigest()


def write(checkpoints: Path, name: str, older: Mapping[str, str], place: str | None) -> None:
    """Writes the file ``latest`` of the folder ``checkpoints``.

    ``place`` says where the key is that the checkpoints are encrypted with; ``None``: they are not encrypted.
    """
    text = "".join([f"{name}\n", *(f"older {other} {found}\n" for other, found in older.items())])
    key = None if place is None else load_key(place)
    last = f"sha256 {_sha256(text)}" if key is None else f"hmac-sha256 {_mac(text, key)}"
    write_text(checkpoints / LATEST, f"{text}{last}\n")


def read(checkpoints: Path) -> Latest | None:
    """Reads the file ``latest``; ``None`` if it does not exist. Raises ``ValueError`` if it is malformed."""
    path = checkpoints / LATEST
    try:
        lines = read_bytes(path, LONGEST).decode().split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        lines = []

    # the last line ends with a newline too
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
    """Raises ``ValueError`` if the file is damaged or its MAC is not authentic.

    If the checkpoints are encrypted, the file must have a MAC made with a key that ``trust`` accepts.
    ``folder`` is the newest checkpoint, ``newest`` its manifest.
    """
    path = folder.parent / LATEST
    if found.mac:
        opened(folder, newest, trust)  # raises the clearer error if the key is the wrong one
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
    """Returns the keys that can be loaded; raises ``ValueError`` if none can."""
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

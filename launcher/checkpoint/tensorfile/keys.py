"""Loads the keys of encrypted checkpoints from environment variables or files, and never shows them."""

from __future__ import annotations

import base64
import binascii
import os
import string
from importlib.util import find_spec
from pathlib import Path

from launcher.optional_packages import install_command
from launcher.plan.values.trust import PLACE, told
from launcher.untrusted.files import opened

ANOTHER = "LAUNCHER_CHECKPOINT_KEY"
"""An environment variable: the place of the key now, if it has moved since the checkpoint was written."""
SIZE = 32  # bytes of an AES-256 key
FORMS = "env:NAME (an environment variable) or file:PATH"


def is_place(text: str) -> bool:
    """Whether ``text`` says where a key is: ``env:NAME`` or ``file:PATH``."""
    return PLACE.fullmatch(text) is not None


def load_key(place: str) -> bytes:
    """Returns the key at ``place``.

    Raises ``ValueError`` if there is no valid key or cryptography is not installed. No message shows a key.
    """
    if find_spec("cryptography") is None:
        raise ValueError(
            "encrypted checkpoints need the package cryptography, which is not installed: "
            + install_command("crypto")
        )

    # read the key's bytes
    match = PLACE.fullmatch(place)
    if match is None:
        raise ValueError(f"the place of a key is {FORMS}")
    raw = _of_variable(place, match[2]) if match[1] else _of_file(place, Path(match[4]))

    # 32 printable characters are a passphrase, not a key: 32 random bytes are practically never all printable
    as_it_is = match[3] and len(raw) == SIZE and not set(raw) <= set(string.printable.encode())
    key = raw if as_it_is else _decoded(raw.strip())
    if key is None or len(key) != SIZE:
        raise ValueError(
            f"{told(place)}: no key of AES-256: it has {len(raw)} bytes; wanted are {SIZE} random bytes, "
            "as 64 hexadecimal digits (openssl rand -hex 32), as base64 or, in a file, as they are"
        )
    return key


def _of_variable(place: str, name: str) -> bytes:
    value = os.environ.get(name)
    if not value:
        text = "this environment variable is not set; it must hold the key (openssl rand -hex 32)"
        raise ValueError(f"{told(place)}: {text}")
    return os.fsencode(value)


def _of_file(place: str, path: Path) -> bytes:
    try:
        with opened(path) as file:
            return file.read(1024)
    except OSError as error:
        raise ValueError(f"{told(place)}: the key cannot be read: {error.strerror}") from error


def _decoded(text: bytes) -> bytes | None:
    try:
        if len(text) == 2 * SIZE:
            return bytes.fromhex(text.decode("ascii"))
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None

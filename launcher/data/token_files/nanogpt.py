"""The ``.bin`` files of nanoGPT, which have no header, and of llm.c and modded-nanogpt, which have one."""

from __future__ import annotations

import struct
from pathlib import Path

from launcher.data.files.bad_file import BadFile
from launcher.data.token_files.token_file import TokenFile

HEADER = 256 * 4  # bytes: 256 numbers of int32
FORMS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""The version, which is the header's second number, and the dtype, by its first number."""
ITEMSIZE = {"uint16": 2, "uint32": 4}


def has_header(start: bytes) -> bool:
    return len(start) >= 4 and int.from_bytes(start[:4], "little") in FORMS


def with_header(path: Path, start: bytes, size: int) -> TokenFile:
    """Reads the header of an llm.c file. Raises ``BadFile``."""
    if len(start) < HEADER:
        raise BadFile(f"cut off inside its header of {HEADER} bytes")
    magic, version, tokens = struct.unpack_from("<3i", start)
    known, dtype = FORMS[magic]
    if version != known:
        raise BadFile(f"version {version} of llm.c's files with {magic}; this launcher reads version {known}")
    need = HEADER + tokens * ITEMSIZE[dtype]
    if tokens < 0 or size != need:
        raise BadFile(f"its header promises {tokens} tokens of {dtype}, {need} bytes with it; it has {size}")
    return TokenFile(path, dtype, HEADER, tokens)


def without_header(path: Path, size: int, dtype: str) -> TokenFile:
    """A file of nanoGPT: tokens only. Raises ``BadFile``."""
    if size % ITEMSIZE[dtype]:
        raise BadFile(f"{size} bytes are no whole number of tokens of data.dtype={dtype}")
    return TokenFile(path, dtype, 0, size // ITEMSIZE[dtype])

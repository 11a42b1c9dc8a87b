"""The header of a ``.tokens`` file: 64 bytes, little-endian, before the tokens themselves."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash

from launcher.data.files.bad_file import BadFile
from launcher.data.token_files.token_file import TokenFile

MAGIC = b"\x89TOKENS\n"  # the first byte is invalid in UTF-8, so no text starts like this
VERSION = 1
DTYPES = {2: "uint16", 4: "uint32"}
"""The dtype by the bytes per token."""
_FIELDS = struct.Struct("<8sIIQQq16s")
_DIGEST = 8  # bytes; xxh3 (64 bits) of the fields, stored after them
SIZE = _FIELDS.size + _DIGEST
NONE = -1  # stored if no token ends documents


@dataclass(frozen=True)
class TokenHeader:
    """A header. ``itemsize``: bytes per token; ``digest``: xxh3 (128 bits) of the bytes of all tokens."""

    itemsize: int
    tokens: int
    vocab_size: int
    end_of_document: int | None
    digest: bytes

    def packed(self) -> bytes:
        end = NONE if self.end_of_document is None else self.end_of_document
        numbers = (self.itemsize, self.tokens, self.vocab_size, end)
        fields = _FIELDS.pack(MAGIC, VERSION, *numbers, self.digest)
        return fields + xxhash.xxh3_64_digest(fields)


def parsed(data: bytes) -> TokenHeader:
    """Parses the first bytes of a file. Raises ``BadFile``."""
    if data[: len(MAGIC)] != MAGIC:
        raise BadFile("not a .tokens file: it does not start as one")
    if len(data) < SIZE:
        raise BadFile(f"cut off inside its header of {SIZE} bytes")
    fields, digest = data[: _FIELDS.size], data[_FIELDS.size : SIZE]
    _, version, itemsize, tokens, vocab_size, end, payload = _FIELDS.unpack(fields)
    if version != VERSION:
        raise BadFile(f"version {version} of .tokens files; this launcher reads version {VERSION}")
    if xxhash.xxh3_64_digest(fields) != digest:
        raise BadFile("its header is damaged: it has another digest than it says")

    # a header with the right digest may still be invalid
    if itemsize not in DTYPES:
        raise BadFile(f"tokens of {itemsize} bytes; there are those of 2 and of 4")
    if not 1 <= vocab_size <= 256**itemsize:
        raise BadFile(f"vocab_size {vocab_size} does not go with tokens of {itemsize} bytes")
    if not NONE <= end < vocab_size:
        raise BadFile(f"token {end} ends documents, and vocab_size is {vocab_size}")
    return TokenHeader(itemsize, tokens, vocab_size, None if end == NONE else end, payload)


def token_file(path: Path, start: bytes, size: int) -> TokenFile:
    """The tokens of a file of ``size`` bytes that begins with ``start``. Raises ``BadFile``."""
    head = parsed(start)
    need = SIZE + head.tokens * head.itemsize
    if size != need:
        text = f"its header promises {head.tokens} tokens, {need} bytes with the header"
        raise BadFile(f"{'cut off' if size < need else 'too long'}: {text}; it has {size}")
    dtype, digest = DTYPES[head.itemsize], head.digest.hex()
    return TokenFile(path, dtype, SIZE, head.tokens, head.vocab_size, digest, head.end_of_document)

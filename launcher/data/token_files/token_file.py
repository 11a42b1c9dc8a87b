"""Describes where the tokens of one file are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TokenFile:
    """``tokens`` numbers of ``dtype``, little-endian, from byte ``offset`` of the file.

    ``vocab_size``: every token is below it; ``digest``: xxh3 (128 bits) of their bytes, hexadecimal;
    ``end_of_document``: the token that ends each document. ``None`` if the file does not store it.
    """

    path: Path
    dtype: str
    offset: int
    tokens: int
    vocab_size: int | None = None
    digest: str | None = None
    end_of_document: int | None = None

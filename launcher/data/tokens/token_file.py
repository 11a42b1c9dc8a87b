"""Where the tokens of a file are, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TokenFile:
    """``tokens`` numbers of ``dtype``, little-endian, from byte ``offset`` of the file.

    Every token is below ``vocab_size``. ``digest`` is the xxh3 (128 bits) of their bytes, hexadecimal.
    ``end_of_document`` is the token that ends each document. Each of them is ``None`` if it is unknown.
    """

    path: Path
    dtype: str
    offset: int
    tokens: int
    vocab_size: int | None = None
    digest: str | None = None
    end_of_document: int | None = None

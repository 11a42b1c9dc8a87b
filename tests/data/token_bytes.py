"""Files of tokens byte by byte, as their formats are published, without the code of the readers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash

CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "d": 6, "f": 7, "H": 8}
"""The dtype codes of Megatron's index, by the letter that ``struct`` has for the dtype."""


def little(letter: str, tokens: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(tokens)}{letter}", *tokens)


def own(
    tokens: Sequence[int],
    vocab_size: int = 300,
    *,
    version: int = 1,
    width: int = 2,
    count: int | None = None,
    end: int = -1,
    letter: str = "H",
) -> bytes:
    """A file in the format of the table in docs/data.md."""
    payload = little(letter, tokens)
    head = b"\x89TOKENS\n"
    head += version.to_bytes(4, "little") + width.to_bytes(4, "little")
    head += (len(tokens) if count is None else count).to_bytes(8, "little") + vocab_size.to_bytes(8, "little")
    head += end.to_bytes(8, "little", signed=True)
    head += bytes.fromhex(xxhash.xxh3_128_hexdigest(payload))
    return head + bytes.fromhex(xxhash.xxh3_64_hexdigest(head)) + payload


def llm_c(
    tokens: Sequence[int], *, magic: int = 20240520, version: int = 1, count: int | None = None, letter: str = "H"
) -> bytes:
    """A file as ``write_datafile`` of llm.c's dev/data/data_common.py writes it."""
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    return little("i", header) + little(letter, tokens)


def megatron(
    path: Path,
    sequences: Sequence[Sequence[int]],
    *,
    letter: str = "H",
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int | None = None,
    sizes: Sequence[int] | None = None,
    pointers: Sequence[int] | None = None,
    documents: Sequence[int] | None = None,
) -> Path:
    """``path`` and the ``.idx`` beside it, as megatron/core/datasets/indexed_dataset.py writes them."""
    width = struct.calcsize(letter)
    lengths = [len(s) for s in sequences]
    starts = [width * sum(lengths[:k]) for k in range(len(lengths))]
    ends = list(range(len(sequences) + 1)) if documents is None else documents
    head = magic + version.to_bytes(8, "little") + bytes([CODES[letter] if code is None else code])
    head += len(sequences).to_bytes(8, "little") + len(ends).to_bytes(8, "little")
    index = head + little("i", lengths if sizes is None else sizes)
    index += little("q", starts if pointers is None else pointers) + little("q", ends)
    path.write_bytes(b"".join(little(letter, s) for s in sequences))
    path.with_suffix(".idx").write_bytes(index)
    return path

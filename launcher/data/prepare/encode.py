"""Encodes documents as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from launcher.data import text_tokenizer
from launcher.data.bounded_tokenizer import native_errors
from launcher.data.prepare.documents import text_split_point

PIECE = 1 << 20  # characters encoded at once


@dataclass(frozen=True)
class Recipe:
    """The settings of an encoder.

    ``tokenizer`` is the content of a tokenizer.json, or ``None`` for bytes. ``end`` is the token that ends
    each document. ``file`` is what errors call the tokenizer.
    """

    tokenizer: str | None
    end: int
    file: str = text_tokenizer.TOKENIZER


class Encoder:
    """Encodes documents of any length, about ``PIECE`` characters at a time.

    Raises ``TokenizerError`` if the tokenizer library fails.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._end = np.array([recipe.end], np.uint32)
        self._file = recipe.file
        self._tokenizer = None
        if recipe.tokenizer is not None:
            self._tokenizer = Tokenizer.from_str(recipe.tokenizer)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()

    def __call__(self, texts: Sequence[str], end: bool) -> NDArray[np.uint32]:
        """Encodes all ``texts``; if ``end``, an end token follows each of them."""
        return np.concatenate(
            [np.zeros(0, np.uint32), *(self._batch(batch, end) for batch in _batches(texts))]
        )

    def _batch(self, batch: list[tuple[str, bool]], end: bool) -> NDArray[np.uint32]:
        """Encodes pieces; the flag of a piece says whether its text ends there."""
        parts = []
        for ids, (_, last) in zip(self._ids([piece for piece, _ in batch]), batch, strict=True):
            parts += [ids, self._end] if last and end else [ids]
        return np.concatenate(parts)

    def _ids(self, pieces: list[str]) -> Iterator[NDArray[np.uint32]]:
        if self._tokenizer is None:
            yield from (np.frombuffer(piece.encode(), np.uint8).astype(np.uint32) for piece in pieces)
            return
        with native_errors(self._file):
            rows = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        for row in rows:
            yield np.array(row.ids, np.uint32)


def _batches(texts: Sequence[str]) -> Iterator[list[tuple[str, bool]]]:
    """Yields batches of about ``PIECE`` characters. The flag of a piece says whether its text ends there."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        for piece, last in _pieces(text):
            batch.append((piece, last))
            size += len(piece)
            if size >= PIECE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Splits a long text where ``text_split_point`` allows it."""
    if len(text) <= PIECE:
        yield text, True
        return
    data: Any = text.encode()
    while len(data) > PIECE:
        at = text_split_point(data[:PIECE])
        yield data[:at].decode(), False
        data = data[at:]
    yield data.decode(), True

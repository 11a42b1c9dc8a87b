"""Documents as tokens, each with the token that ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from launcher.data.files import bpe
from launcher.data.prepare.blocks import inside_text

PIECE = 1 << 20  # characters that are encoded at once


@dataclass(frozen=True)
class Recipe:
    """``tokenizer``: what a tokenizer.json says; ``None``: bytes. ``end`` ends each document."""

    tokenizer: str | None
    end: int


class Encoder:
    """Takes as much memory as ``PIECE`` characters need, whatever a document has."""

    def __init__(self, recipe: Recipe) -> None:
        self.end = np.array([recipe.end], np.uint32)
        self._tokenizer = None if recipe.tokenizer is None else Tokenizer.from_str(recipe.tokenizer)

    def __call__(self, texts: Sequence[str], end: bool) -> NDArray[np.uint32]:
        """The tokens of all ``texts``; behind each the one that ends it, if ``end``."""
        parts = [np.zeros(0, np.uint32)]
        for batch in _batches(texts):
            for (_, last), ids in zip(batch, self._ids([piece for piece, _ in batch]), strict=True):
                parts.append(ids)
                if last and end:
                    parts.append(self.end)
        return np.concatenate(parts)

    def lines(self, text: str) -> NDArray[np.uint32]:
        """Its tokens, encoded line by line."""
        assert self._tokenizer is not None
        return bpe.encode(self._tokenizer, text).astype(np.uint32)

    def _ids(self, pieces: list[str]) -> Iterator[NDArray[np.uint32]]:
        if self._tokenizer is None:
            yield from (np.frombuffer(piece.encode(), np.uint8).astype(np.uint32) for piece in pieces)
            return
        for row in self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False):
            yield np.array(row.ids, np.uint32)


def _batches(texts: Sequence[str]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces that have ``PIECE`` characters together, and of each whether its text ends with it."""
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
    """A long text is cut where ``inside_text`` says that it may be."""
    if len(text) <= PIECE:
        yield text, True
        return
    data: Any = text.encode()
    while len(data) > PIECE:
        at = inside_text(data[:PIECE])
        yield data[:at].decode(), False
        data = data[at:]
    yield data.decode(), True

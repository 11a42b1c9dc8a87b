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
from launcher.data.prepare.split_pattern import word_pattern
from launcher.data.prepare.word_table import WordTable

PIECE = 1 << 20  # characters that are encoded at once


@dataclass(frozen=True)
class Recipe:
    """``tokenizer``: what a tokenizer.json says; ``None``: bytes. ``end`` ends each document.

    ``cuts``: what is longer than the tokenizer.json allows is cut off, as ``data=text`` does to lines.
    """

    tokenizer: str | None
    end: int
    cuts: bool = False


class Encoder:
    """Takes as much memory as ``PIECE`` characters and a table of words need, whatever a document has."""

    def __init__(self, recipe: Recipe) -> None:
        self._end = np.array([recipe.end], np.uint32)
        self._tokenizer, self._words = None, None
        if recipe.tokenizer is not None:
            self._tokenizer = Tokenizer.from_str(recipe.tokenizer)
            if not recipe.cuts:
                self._tokenizer.no_truncation()
                self._tokenizer.no_padding()
            pattern = word_pattern(self._tokenizer)
            self._words = None if pattern is None else WordTable(self._tokenizer, pattern)

    def __call__(self, texts: Sequence[str], end: bool) -> NDArray[np.uint32]:
        """The tokens of all ``texts``; behind each the one that ends it, if ``end``."""
        return np.concatenate(
            [np.zeros(0, np.uint32), *(self._batch(batch, end) for batch in _batches(texts))]
        )

    def lines(self, text: str) -> NDArray[np.uint32]:
        """Its tokens, encoded line by line."""
        assert self._tokenizer is not None
        if self._words is None:
            return bpe.encode(self._tokenizer, text).astype(np.uint32)
        return self._batch([(line, False) for line in text.splitlines(keepends=True)], end=False)

    def _batch(self, batch: list[tuple[str, bool]], end: bool) -> NDArray[np.uint32]:
        """Of pieces, and of each whether its text ends with it."""
        if self._words is not None:
            return self._by_words(self._words, batch, end)
        parts = []
        for ids, (_, last) in zip(self._ids([piece for piece, _ in batch]), batch, strict=True):
            parts += [ids, self._end] if last and end else [ids]
        return np.concatenate(parts)

    def _by_words(self, words: WordTable, batch: list[tuple[str, bool]], end: bool) -> NDArray[np.uint32]:
        words.fresh()
        ending = np.array([words.add(self._end.tolist())])
        parts = []
        for piece, last in batch:
            parts += words.rows(piece)
            if last and end:
                parts.append(ending)
        return words.tokens(parts)

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

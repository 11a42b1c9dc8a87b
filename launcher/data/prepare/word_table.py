"""Caches the tokens of words: most words of a text repeat, and encoding one takes ten times as long."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from launcher.data.prepare.split_pattern import LINE, UNSAFE

ROWS = 500_000  # after which the table is cleared: about 100 MB
KNOWN = 48  # characters of a word that is cached


class WordTable(dict[str, int]):
    """Maps a word to its row. Rows are valid until the next call of ``fresh``."""

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str]) -> None:
        super().__init__()
        self._tokenizer, self._find = tokenizer, pattern.findall
        names = sorted(added.content for added in tokenizer.get_added_tokens_decoder().values())
        self._added = re.compile("|".join(map(re.escape, names))) if names else None
        self._begin()

    def fresh(self) -> None:
        """Clears the table if it is full."""
        if len(self._starts) > ROWS:
            self.clear()
            self._begin()

    def rows(self, text: str) -> list[NDArray[np.int64]]:
        """The rows of the words of ``text``; runs of unsupported lines are one row each."""
        if not self._is_odd(text):
            return [self._of_words(text)]
        runs = ((odd, "".join(lines)) for odd, lines in groupby(LINE.split(text), self._is_odd))
        return [self._of_whole(run) if odd else self._of_words(run) for odd, run in runs]

    def add(self, ids: Iterable[int]) -> int:
        """Adds a row that is not cached under a word."""
        self._starts.append(len(self._tokens))
        self._tokens.extend(ids)
        return len(self._starts) - 1

    def tokens(self, rows: Sequence[NDArray[np.int64]]) -> NDArray[np.uint32]:
        """Concatenates the tokens of the rows."""
        which = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        starts = self._bounds()
        counts = starts[which + 1] - starts[which]
        ends = np.cumsum(counts)
        at = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts[which] - (ends - counts), counts)
        return np.frombuffer(self._tokens, np.uint32)[at] if len(at) else np.zeros(0, np.uint32)

    def _is_odd(self, text: str) -> bool:
        return bool(UNSAFE.search(text) or (self._added is not None and self._added.search(text)))

    def _of_words(self, text: str) -> NDArray[np.int64]:
        words = self._find(text)
        return np.fromiter(map(self.__getitem__, words), np.int64, len(words))

    def _of_whole(self, text: str) -> NDArray[np.int64]:
        return np.array([self.add(self._tokenizer.encode(text, add_special_tokens=False).ids)])

    def __missing__(self, word: str) -> int:
        row = self.add(self._tokenizer.encode(word, add_special_tokens=False).ids)
        if len(word) <= KNOWN:
            self[word] = row
        return row

    def _begin(self) -> None:
        self._starts, self._tokens = array("q"), array("I")

    def _bounds(self) -> NDArray[np.int64]:
        """The start of each row, and the end of the last one."""
        begin = np.frombuffer(self._starts, np.int64) if self._starts else np.zeros(0, np.int64)
        return np.append(begin, len(self._tokens))

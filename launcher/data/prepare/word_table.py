"""The tokens of words that were seen: in text most words were, and encoding one takes ten times as long."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from launcher.data.prepare.split_pattern import LINE, UNSAFE

ROWS = 500_000  # of a table, which then begins anew: about 100 MB
KNOWN = 48  # characters of a word that may come again


class WordTable(dict[str, int]):
    """By a word its row. ``rows`` are of this table until the next ``fresh``."""

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str]) -> None:
        super().__init__()
        self._tokenizer, self._find = tokenizer, pattern.findall
        names = sorted(added.content for added in tokenizer.get_added_tokens_decoder().values())
        self._added = re.compile("|".join(map(re.escape, names))) if names else None
        self._begin()

    def fresh(self) -> None:
        """Where the table is full, nothing is known any more."""
        if len(self._starts) > ROWS:
            self.clear()
            self._begin()

    def rows(self, text: str) -> list[NDArray[np.int64]]:
        """Of the words of ``text``; lines with characters or tokens that are no such words are one each."""
        if not self._is_odd(text):
            return [self._of_words(text)]
        runs = ((odd, "".join(lines)) for odd, lines in groupby(LINE.split(text), self._is_odd))
        return [self._of_whole(run) if odd else self._of_words(run) for odd, run in runs]

    def add(self, ids: Iterable[int]) -> int:
        """The row of tokens of which nobody asks again."""
        self._starts.append(len(self._tokens))
        self._tokens.extend(ids)
        return len(self._starts) - 1

    def tokens(self, rows: Sequence[NDArray[np.int64]]) -> NDArray[np.uint32]:
        """Those of each row, one after the other."""
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
        """Where each row begins, and where the last one ends."""
        begin = np.frombuffer(self._starts, np.int64) if self._starts else np.zeros(0, np.int64)
        return np.append(begin, len(self._tokens))

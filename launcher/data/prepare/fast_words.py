"""A cache of encoded words.

A word is encoded the same everywhere, so a known word needs no encoding. Only the characters ``SAFE`` are
supported: a test on each of them shows whether ``tokenizers`` splits the same words.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern that ``ByteLevel`` splits by."""

_RANGES = ((0x0000, 0x052F), (0x2000, 0x206F), (0x20A0, 0x20BF), (0x2100, 0x22FF))
SAFE = tuple(chr(c) for first, last in _RANGES for c in range(first, last + 1))
"""European scripts, punctuation, currencies, arrows and mathematical signs."""
UNSAFE = re.compile("[^" + "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in _RANGES) + "]")
_PRINTED = "".join(map(chr, range(0x21, 0x7F)))
LINE = re.compile(r"(?<=[!-~]\n)(?=[A-Za-z0-9])")
"""The end of a line that does not end in a space: both sides can be encoded separately."""
SPACES = "\t\n\x0b\x0c\r \x85\xa0\u2028\u2029\u202f\u205f" + "".join(chr(c) for c in range(0x2000, 0x200B))
_PART = re.compile(r"\\p\{(?P<category>[A-Z][a-z]?)\}|\\(?P<escape>.)|(?P<bracket>[\[\]])")
_AROUND = (
    "{}",
    "a{}",
    "{}a",
    " {}",
    "{} ",
    "1{}2",
    "{0}{0}",
    ".{}.",
    "\n{}\n",
    "'{}",
    "{}\r\n",
    "  {}  a",
    "S{}s'S",
)


def word_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern whose ``findall`` splits a text of ``SAFE`` into words; ``None`` if there is none."""
    said = json.loads(tokenizer.to_str())
    theirs = _theirs(said)
    ours = None if theirs is None else _translated(theirs)
    whole = said["truncation"] is None and said["padding"] is None
    if ours is None or not whole or not _byte_pairs(said["model"]) or not _agree(ours, tokenizer):
        return None
    return ours


def _theirs(said: dict[str, Any]) -> str | None:
    """The pattern by which a tokenizer.json splits; ``None`` if it changes the text in any other way."""
    split = said["pre_tokenizer"]
    if said["normalizer"] is not None or split is None:
        return None
    if split["type"] == "ByteLevel":
        return GPT2 if split["use_regex"] and not split["add_prefix_space"] else None
    if split["type"] != "Sequence" or [p["type"] for p in split["pretokenizers"]] != ["Split", "ByteLevel"]:
        return None
    first, then = split["pretokenizers"]
    plain = first["behavior"] == "Isolated" and not first["invert"]
    plain = plain and not then["use_regex"] and not then["add_prefix_space"]
    pattern = first["pattern"].get("Regex") if plain else None
    return pattern if isinstance(pattern, str) else None


def _byte_pairs(model: dict[str, Any]) -> bool:
    """Whether the model is deterministic BPE without prefixes or suffixes of words."""
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return model["type"] == "BPE" and not any(model.get(key) for key in odd)


def _translated(pattern: str) -> re.Pattern[str] | None:
    """Translates a pattern for ``re``, which lacks categories and has other spaces; ``None`` if it cannot."""
    out, at, inside = [], 0, False
    for part in _PART.finditer(pattern):
        out.append(pattern[at : part.start()])
        at = part.end()
        if part["bracket"]:
            inside = part["bracket"] == "["
            out.append(part["bracket"])
        elif part["category"]:
            chars = _of_category(part["category"])
            out.append(chars if inside else f"[{chars}]")
        elif part["escape"] == "s":
            out.append(_escaped(SPACES) if inside else f"[{_escaped(SPACES)}]")
        elif part["escape"] == "S" and not inside:
            out.append(f"[^{_escaped(SPACES)}]")
        elif part["escape"] in "rntvf" or not part["escape"].isalnum():
            out.append(part[0])
        else:
            return None
    try:
        return re.compile("".join((*out, pattern[at:])))
    except re.error:
        return None


@cache
def _of_category(name: str) -> str:
    return _escaped("".join(c for c in SAFE if unicodedata.category(c).startswith(name)))


def _escaped(chars: str) -> str:
    return "".join(map(re.escape, chars))


def _agree(ours: re.Pattern[str], tokenizer: Tokenizer) -> bool:
    """Whether both split the same words around each character, and ``ours`` splits at each ``LINE``."""
    apart = ((f"{a}{c}\n", f"{b}b") for c in _PRINTED for a in ("", "x", "1", " ") for b in "aA1")
    return all(ours.findall(text) == words for text, words in _seen(tokenizer)) and all(
        ours.findall(head + tail) == [*ours.findall(head), *ours.findall(tail)] for head, tail in apart
    )


def _seen(tokenizer: Tokenizer) -> Iterator[tuple[str, list[str]]]:
    for form in _AROUND:
        for char in SAFE:
            text = form.format(char)
            spans = (span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text))
            yield text, [text[a:b] for a, b in spans]


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

"""Checks that ids in token files are below the vocabulary size, where no header guarantees it.

The plan reads the ids before anything starts: in training, an id that is too large would end the run after
hours, and on a GPU the error would be a device-side assertion. The check takes bounded time. If the files
together have at most ``READ`` bytes, it reads all of them, else ``READ`` bytes in evenly spread blocks. The
ranks check the rest as they read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from launcher.data.tokens.corpus import Corpus, corpus
from launcher.data.tokens.token_file import TokenFile
from launcher.errors import Problem
from launcher.job.schema.data import Tokens
from launcher.untrusted.files import opened

KEY = "data.vocab_size"
READ = 1 << 28
"""The maximum number of bytes to read from all files together. A slow disk reads them in about a second."""
BLOCK = 1 << 20  # bytes read at once


@dataclass(frozen=True)
class IdRange:
    """The smallest and the largest id of the tokens read, and the number of the first token that has each."""

    least: int
    least_at: int
    most: int
    most_at: int


def check_ids(made: Corpus) -> Iterator[Problem]:
    """Yields a problem for the first file with an id outside the vocabulary. Raises ``OSError``."""
    files = _unpromised(made)
    outside = [(file, ids) for file, ids in _ranges(files) if not _fits(ids, made.vocab_size)]
    if not outside:
        return
    file, ids = outside[0]
    number, at = (ids.least, ids.least_at) if ids.least < 0 else (ids.most, ids.most_at)
    text = f"{made.vocab_size}: token {at} of {file.path} is {number}"
    if number < 0:
        yield Problem(KEY, f"{text}; ids count from 0, so the file has another dtype or another format")
        return

    # a larger vocabulary is a cure only if all ids are known
    need = 1 + max(ids.most for _, ids in outside)
    reason = f"{text}, and ids must be below {KEY}, the number of tokens of the tokenizer that wrote the file"
    known = all(ids.least >= 0 for _, ids in outside) and _bytes(files) <= READ
    yield Problem(KEY, reason, f"{KEY}={need}" if known else "")


def partly_checked(settings: Tokens) -> str:
    """Returns a note if the files are too large to read all of their ids, else ""."""
    made, _ = corpus(settings)
    if made is None:
        return ""
    size = _bytes(_unpromised(made))
    if size <= READ:
        return ""
    part = f"{READ / size:.1%} of {size / 1e9:.1f} GB"
    text = f"{made.vocab_size}: no header guarantees that ids are below it; {part}"
    return f"{text} were read, evenly spread, and have no larger id; the ranks check the rest as they read it"


def _unpromised(made: Corpus) -> list[TokenFile]:
    """Returns the files whose header records no vocabulary size and whose dtype allows ids outside it."""
    parts = [part for source in (*made.train, made.val) for part in source]
    files = dict.fromkeys(part.file for part in parts)
    return [file for file in files if file.vocab_size is None and _may_be_outside(file, made.vocab_size)]


def _may_be_outside(file: TokenFile, vocab_size: int) -> bool:
    numbers = np.iinfo(file.dtype)
    return bool(file.tokens) and (numbers.min < 0 or numbers.max >= vocab_size)


def _fits(ids: IdRange, vocab_size: int) -> bool:
    return ids.least >= 0 and ids.most < vocab_size


def _bytes(files: Sequence[TokenFile]) -> int:
    return sum(file.tokens * np.dtype(file.dtype).itemsize for file in files)


def _ranges(files: Sequence[TokenFile]) -> Iterator[tuple[TokenFile, IdRange]]:
    """Yields the range of ids of each file. The bytes read of a file are in proportion to its size."""
    share = min(READ / max(_bytes(files), 1), 1.0)
    for file in files:
        status = os.stat(file.path)
        yield file, _range(file, share, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _range(file: TokenFile, share: float, size: int, changed: int) -> IdRange:
    """Returns the range of ids of a file. It is cached because a sweep makes many plans for one file.

    ``size`` and ``changed`` are part of the cache's key, so that a changed file is read again.
    """
    dtype = np.dtype(file.dtype).newbyteorder("<")
    step = BLOCK // dtype.itemsize
    blocks = -(-file.tokens // step)
    ids: IdRange | None = None
    with opened(file.path) as stream:
        for block in _spread(blocks, max(int(blocks * share), min(blocks, 2))):
            first = block * step
            stream.seek(file.offset + first * dtype.itemsize)
            tokens = np.frombuffer(stream.read(min(step, file.tokens - first) * dtype.itemsize), dtype)
            if not len(
                tokens
            ):  # the file was truncated after it was opened; the code that reads it reports that
                break
            least, most = int(tokens.argmin()), int(tokens.argmax())
            here = IdRange(int(tokens[least]), first + least, int(tokens[most]), first + most)
            ids = here if ids is None else _wider(ids, here)
    return ids or IdRange(0, 0, 0, 0)


def _wider(a: IdRange, b: IdRange) -> IdRange:
    low, high = min(a, b, key=lambda one: one.least), max(a, b, key=lambda one: one.most)
    return IdRange(low.least, low.least_at, high.most, high.most_at)


def _spread(blocks: int, count: int) -> Sequence[int]:
    """Returns ``count`` numbers of ``blocks``, evenly spread, the first and the last included.

    >>> [*_spread(9, 3)]
    [0, 4, 8]
    """
    return range(blocks) if count >= blocks else [k * (blocks - 1) // (count - 1) for k in range(count)]

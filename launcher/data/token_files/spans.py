"""Windows over files: which tokens a sample is, where files are many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from launcher.data.token_files.shard import Shard


@dataclass(frozen=True)
class Span:
    """``windows`` windows of a file from number ``first`` on."""

    shard: Shard
    first: int
    windows: int


def spans(shards: Sequence[Shard], seq_len: int) -> list[Span]:
    """All windows of each file: ``seq_len`` tokens and the next one; what is left at its end is not read."""
    return [Span(shard, 0, max(shard.tokens - 1, 0) // seq_len) for shard in shards]


def count(parts: Sequence[Span]) -> int:
    return sum(part.windows for part in parts)


def split(parts: Sequence[Span], share: float) -> tuple[list[Span], list[Span]]:
    """Those trained on, and the last ``share`` of the windows, rounded up, which are held out."""
    total = count(parts)
    kept = total - ceil(total * share)
    return list(_cut(parts, 0, kept)), list(_cut(parts, kept, total))


def _cut(parts: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Windows ``[start, stop)`` of all, counted from the first."""
    at = 0
    for part in parts:
        a, b = max(start - at, 0), min(stop - at, part.windows)
        if a < b:
            yield Span(part.shard, part.first + a, b - a)
        at += part.windows

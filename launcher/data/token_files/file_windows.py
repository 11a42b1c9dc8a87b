"""Windows of ``seq_len`` tokens over many files, and their split into training and validation data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from launcher.data.token_files.token_file import TokenFile


@dataclass(frozen=True)
class FileWindows:
    """``count`` windows of a file, starting with window number ``first``."""

    file: TokenFile
    first: int
    count: int


def windows(files: Sequence[TokenFile], seq_len: int) -> list[FileWindows]:
    """All windows of each file: ``seq_len`` tokens and the next one; the rest of the file is not read."""
    return [FileWindows(file, 0, max(file.tokens - 1, 0) // seq_len) for file in files]


def total(parts: Sequence[FileWindows]) -> int:
    return sum(part.count for part in parts)


def split(parts: Sequence[FileWindows], share: float) -> tuple[list[FileWindows], list[FileWindows]]:
    """Splits windows: returns those for training, and the last ``share``, rounded up, for validation."""
    end = total(parts)
    kept = end - ceil(end * share)
    return list(_cut(parts, 0, kept)), list(_cut(parts, kept, end))


def _cut(parts: Sequence[FileWindows], start: int, stop: int) -> Iterator[FileWindows]:
    """Windows ``[start, stop)`` of all ``parts``, counted from the first."""
    at = 0
    for part in parts:
        a, b = max(start - at, 0), min(stop - at, part.count)
        if a < b:
            yield FileWindows(part.file, part.first + a, b - a)
        at += part.count

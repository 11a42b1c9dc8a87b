"""Reads a file a range of bytes at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from launcher.untrusted.files import check

PAGE = 1 << 16  # bytes read ahead, for headers


class ByteSource(Protocol):
    """Bytes to read. ``size`` and offsets count plain bytes, for an encrypted file the decrypted ones."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes | memoryview: ...


class PlainFile:
    """A file on disk. It is opened for each read, so that thousands of these objects keep no file open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check(path)
        self.size = path.stat().st_size
        self._at = 0
        self._page = memoryview(b"")

    def read(self, start: int, stop: int) -> memoryview:
        if not self._at <= start <= stop <= self._at + len(self._page):
            if stop - start > PAGE:
                return memoryview(self._load(start, stop))
            self._page = memoryview(self._load(start, min(start + PAGE, self.size)))
            self._at = start
        return self._page[start - self._at : stop - self._at]

    def _load(self, start: int, stop: int) -> bytes:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            out = os.pread(fd, stop - start, start)
            while len(out) < stop - start:
                at = start + len(out)
                piece = os.pread(fd, stop - at, at)
                if not piece:
                    raise ValueError(f"{self.path}: truncated while it was read: it ends at byte {at}")
                out += piece
            return out
        finally:
            os.close(fd)

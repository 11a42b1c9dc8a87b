"""Writes a ``.tokens`` file incrementally, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from launcher.data.token_files.own_format import DTYPES, SIZE, TokenHeader

CHUNK = 1 << 20  # tokens converted at once


class TokenWriter:
    """Writes a file; it appears only if the ``with`` block ends without error and all of it is on disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TokenWriter(Path(folder, "a.tokens"), vocab_size=50257, end_of_document=50256) as file:
    ...         file.append([15496, 995, 50256])
    ...     Path(folder, "a.tokens").stat().st_size
    70
    """

    def __init__(self, path: Path, vocab_size: int, end_of_document: int | None = None) -> None:
        """Tokens take two bytes if ``vocab_size`` is at most 65536, otherwise four. Raises ``ValueError``."""
        self.itemsize = 2 if vocab_size <= 1 << 16 else 4
        if not 1 <= vocab_size <= 256**self.itemsize:
            raise ValueError(f"vocab_size={vocab_size} is not from 1 to {256**4}")
        if end_of_document is not None and not 0 <= end_of_document < vocab_size:
            raise ValueError(f"end_of_document={end_of_document} is not below vocab_size={vocab_size}")
        self.path, self.vocab_size, self.end_of_document = path, vocab_size, end_of_document
        self.tokens = 0
        self._digest = xxhash.xxh3_128()
        self._new = path.with_name(f".{path.name}.{os.getpid()}")
        self._file = self._new.open("wb")
        self._file.write(bytes(SIZE))  # the header is known at the end

    def append(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Appends tokens. Raises ``ValueError``, writing none, if one is not below ``vocab_size``."""
        given = np.asarray(tokens)
        if not given.size:
            return
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise ValueError(f"tokens are whole numbers in one row, not {given.dtype} {list(given.shape)}")
        wrong = (given < 0) | (given >= self.vocab_size)
        if wrong.any():
            k = int(wrong.argmax())
            text = f"token {self.tokens + k} is {given[k]}"
            raise ValueError(f"{self.path}: {text}, which is not from 0 to {self.vocab_size - 1}")

        dtype = np.dtype(DTYPES[self.itemsize]).newbyteorder("<")
        for at in range(0, len(given), CHUNK):
            data = given[at : at + CHUNK].astype(dtype).tobytes()
            self._digest.update(data)
            self._file.write(data)
        self.tokens += len(given)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            with self._file as file:
                if kind is None:
                    file.seek(0)
                    file.write(self._header().packed())
                    file.flush()
                    os.fsync(file.fileno())
            if kind is None:
                self._new.replace(self.path)
                _sync(self.path.parent)
        finally:
            self._new.unlink(missing_ok=True)

    def _header(self) -> TokenHeader:
        digest = self._digest.digest()
        return TokenHeader(self.itemsize, self.tokens, self.vocab_size, self.end_of_document, digest)


def _sync(folder: Path) -> None:
    """Makes the names in ``folder`` durable on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

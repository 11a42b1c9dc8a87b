"""Writes and reads safetensors files as bytes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

import xxhash

from launcher.checkpoint.tensorfile.blob import Blob
from launcher.checkpoint.tensorfile.disk_space import reserve, told
from launcher.checkpoint.tensorfile.encryption import Encryptor, sealed_size
from launcher.checkpoint.tensorfile.header import Header, arrange
from launcher.checkpoint.tensorfile.write_behind import WriteBehind, now, start
from launcher.plan.values.facts import TensorSpec
from launcher.untrusted.files import opened

CHUNK = 8 << 20  # bytes copied or mapped at once; a copy from file to file keeps a few chunks in memory
STRETCH = 32 << 20  # bytes of a file after which the kernel is told to start writing them to disk


@dataclass(frozen=True)
class FileRecord:
    """The size and the digests of a written file; digests are hexadecimal.

    For a tensor file ``digest`` is that of the header and ``tensors`` has one for each tensor (xxh3, 128
    bits), both of the plain text. For any other file ``digest`` is that of all its bytes (SHA-256). ``salt``
    is the salt of an encrypted file, which is unique to it, as ``salt_of`` returns it.
    """

    size: int
    digest: str
    tensors: Mapping[str, str]
    salt: str | None = None


class FileWriter:
    """A safetensors file that is created at its full size; its bytes can be written in any order.

    It is synced to disk when the block ends without an error or, with ``behind``, later by its thread.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        metadata: Mapping[str, str],
        key: bytes | None = None,
        behind: WriteBehind | None = None,
    ) -> None:
        """If a ``key`` is given, the file is encrypted, and its bytes must be written in order."""
        self.path = path
        head, self.header = arrange(specs, metadata)
        self.size = self.header.size if key is None else sealed_size(self.header.size)
        self._do = now if behind is None else behind.do
        self._handed_over = 0  # the kernel has been told to write the bytes up to here to disk
        self._sealer: Encryptor | None = None

        with told(path, self.size):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            # reserve all of its disk space before the first byte is written
            with told(path, self.size):
                reserve(self._fd, self.size)
            if key is not None:
                self._sealer = Encryptor(path, self._fd, self.header.size, key)
            self.write(0, memoryview(head))
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def salt(self) -> str | None:
        return None if self._sealer is None else self._sealer.salt

    def write(self, at: int, data: memoryview) -> None:
        """Writes ``data`` at byte ``at`` of the file, or of its plain text if it is encrypted."""
        end = at + data.nbytes
        assert end <= self.header.size, (at, data.nbytes)
        if self._sealer is not None:
            self._sealer.write(at, data)
        else:
            with told(self.path, self.size):
                while data:
                    done = os.pwrite(self._fd, data, at)
                    at, data = at + done, data[done:]

        # keep the disk busy while more is written
        if end - self._handed_over >= STRETCH:
            self._do(partial(start, self._fd, self._handed_over, end - self._handed_over))
            self._handed_over = end

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._sealer is not None:
                self._sealer.finish()
        except BaseException:
            self._do(partial(os.close, self._fd))
            raise
        self._do(partial(os.close, self._fd) if kind is not None else self._sync)

    def _sync(self) -> None:
        try:
            with told(self.path, self.size):
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


def write_stream(
    path: Path,
    specs: Mapping[str, TensorSpec],
    chunks: Callable[[str], Iterable[memoryview]],
    metadata: Mapping[str, str],
    key: bytes | None = None,
    *,
    digested: bool = True,
    behind: WriteBehind | None = None,
) -> FileRecord:
    """Writes a file whose tensors come in chunks, and digests each tensor on the way.

    The file is synced to disk on return or, with ``behind``, when that has done its work.

    Args:
        path: The file.
        specs: The tensors by name.
        chunks: Returns a tensor's bytes, in order; the next chunk may overwrite a chunk.
        metadata: The metadata in the header.
        key: The key to encrypt the file with. Digests are those of the plain text.
        digested: False if the caller does not need the tensors' digests.
        behind: The thread that syncs the file.
    """
    digests = {}
    with FileWriter(path, specs, metadata, key=key, behind=behind) as file:
        for name, slot in file.header.entries.items():
            at = slot.start
            digest = xxhash.xxh3_128()
            for chunk in chunks(name):
                assert at + chunk.nbytes <= slot.stop, (name, at - slot.start, chunk.nbytes)
                file.write(at, chunk)
                if digested:
                    digest.update(chunk)
                at += chunk.nbytes

            assert at == slot.stop, (name, at - slot.start)
            if digested:
                digests[name] = digest.hexdigest()
    return FileRecord(file.size, file.header.digest, digests, file.salt)


def sliced(data: memoryview) -> Iterator[memoryview]:
    """Yields ``data`` in order, ``CHUNK`` bytes at a time."""
    return (data[at : at + CHUNK] for at in range(0, data.nbytes, CHUNK))


def mapped(path: Path, access: int = mmap.ACCESS_READ) -> mmap.mmap:
    """Maps a file into memory. It is closed when nothing refers to the map any more."""
    with opened(path) as file:
        return mmap.mmap(file.fileno(), 0, access=access)


def blob_at(data: mmap.mmap, header: Header, name: str) -> Blob:
    """Returns tensor ``name`` of a mapped file, without a copy."""
    slot = header.entries[name]
    return Blob(slot.spec.dtype, slot.spec.shape, memoryview(data)[slot.start : slot.stop])

"""Sends objects from a rank to its supervisor over a pipe."""

from __future__ import annotations

import os
import pickle
import struct
import threading
from collections.abc import Iterator

_HEAD = struct.Struct("<Q")
_CHUNK = 1 << 16


class Outbox:
    """The rank's end of the pipe. Objects arrive complete and in the order sent, from any thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, kind: str, value: object) -> None:
        """Sends an object; blocks while the pipe is full.

        Pickling errors are raised before anything is written.
        """
        body = pickle.dumps((kind, value), protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            for part in (_HEAD.pack(len(body)), body):
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(self._fd, rest) :]


class Inbox:
    """The supervisor's end of the pipe.

    ``ended`` is set once the last writer is gone; an incomplete object of a dead rank is dropped.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.ended = False
        self._bytes = bytearray()

    def drain(self) -> Iterator[tuple[str, object]]:
        """Yields every complete object that has arrived; never blocks."""
        while not self.ended:
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            self._bytes += chunk
            self.ended = not chunk
            yield from self._whole()

    def _whole(self) -> Iterator[tuple[str, object]]:
        while len(self._bytes) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            kind, value = pickle.loads(memoryview(self._bytes)[_HEAD.size : end])
            del self._bytes[:end]
            yield kind, value

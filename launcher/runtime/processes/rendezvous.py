"""The store through which the ranks of one attempt find each other."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from launcher.errors import Problem, RequestError
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.outer_rendezvous import join_store
from launcher.runtime.scratch import scratch

_HOST = "127.0.0.1"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendezvous:
    """What a rank needs to open the store: a private file in ``folder``, or a port of this machine."""

    folder: Path
    port: int | None = None
    listener: int = -1

    def store(self, size: int, timeout_s: float) -> Store:
        """Opens the store, as one of ``size`` ranks."""
        if self.port is None:
            return FileStore(str(self.folder / "store"), size)
        return TCPStore(_HOST, self.port, size, is_master=False, timeout=timedelta(seconds=timeout_s))

    def stack(self, rank: int) -> Path:
        """The file to which a rank writes its stack on request."""
        return self.folder / f"stack{rank}"

    @contextmanager
    def hosted(self) -> Iterator[None]:
        """Serves the store on the port during the block.

        It starts a thread, so fork the ranks first; until then their connections wait in the backlog.
        """
        if self.port is None:
            yield
            return
        own = os.dup(self.listener)  # the store closes the descriptor that it receives
        server = TCPStore(_HOST, self.port, is_master=True, wait_for_workers=False, master_listen_fd=own)
        try:
            yield
        finally:
            del server


@dataclass(frozen=True, kw_only=True)
class OuterRendezvous(Rendezvous):
    """Keys with the prefix ``below`` in the store that the ranks of an outer launcher share."""

    at: Place
    below: str

    def store(self, size: int, timeout_s: float) -> Store:
        return PrefixStore(self.below, join_store(self.at, lambda: timeout_s, _log.warning))


@contextmanager
def rendezvous(port: int | None) -> Iterator[Rendezvous]:
    """A new store for one attempt. Port ``None`` uses a file instead of a port; 0 takes any free port."""
    with scratch() as folder:
        if port is None:
            yield Rendezvous(folder)
            return
        with _listen(port) as listener:
            yield Rendezvous(folder, listener.getsockname()[1], listener.fileno())


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((_HOST, port), backlog=1024)
    except OSError as error:
        text = f"port {port} on {_HOST} cannot be used: {os.strerror(error.errno or 0)}"
        raise RequestError((Problem("launch.port", f"{text}; null takes a free one"),)) from error

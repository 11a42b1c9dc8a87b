"""Opens the store through which ranks meet: under an outer launcher, or on one machine."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from launcher.errors import Problem, RequestError, RunError
from launcher.runtime.cluster.launch_env import Place
from launcher.runtime.cluster.messages import CAUSE, Messages, interruptible, nothing
from launcher.runtime.cluster.network import endpoint
from launcher.runtime.run_folder import scratch

SAY_S = 10.0  # seconds until a message names the ranks that are late
AGENT_S = 30.0  # seconds for a store that exists before its ranks start
_LOOK_S = 0.1
_CONNECT_S = 2.0

Seconds = Callable[[], float]
Say = Callable[[str], None]


def open_store(
    place: Place, timeout_s: Seconds, say: Say, look: Callable[[], None] = nothing, where: str = ""
) -> Store:
    """Opens the store that all ranks share: the outer launcher's, or one that rank 0 hosts.

    Opening it waits for no other rank. ``timeout_s`` is called when it is needed. ``look`` is called
    repeatedly while waiting, and may raise. ``where``: this node and its interface, for the message. Raises
    ``RunError`` if there is no answer in time.
    """
    if place.rank == 0 and not place.hosted:
        return _hosted(place)
    return join_store(place, timeout_s, say, look, where)


def join_store(
    place: Place, timeout_s: Seconds, say: Say, look: Callable[[], None] = nothing, where: str = ""
) -> Store:
    """Opens a store that another process hosts; for a child of rank 0 that may be rank 0 itself."""
    _reach(place, cache(timeout_s), say, look, where)
    try:
        return TCPStore(
            place.host, place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        text = f"the process at {endpoint(place.host, place.port)} is not rank 0 of this job ({why})"
        raise RunError(
            f"rank {place.rank}: {text}; set MASTER_ADDR and MASTER_PORT to rank 0's address"
        ) from error


def _hosted(place: Place) -> Store:
    family, address = _interface(place)
    try:
        both = family == socket.AF_INET6 and not address
        listener = socket.create_server(
            (address, place.port), backlog=4096, family=family, dualstack_ipv6=both
        )
    except OSError as error:
        why = os.strerror(error.errno or 0)
        text = f"rank 0 cannot listen on port {place.port}: {why}; set MASTER_PORT to another one"
        raise RequestError((Problem("", text),)) from error
    with listener:
        own = os.dup(listener.fileno())  # the store closes the descriptor that it receives
    at = address or "localhost"
    return TCPStore(at, place.port, is_master=True, wait_for_workers=False, master_listen_fd=own)


def _interface(place: Place) -> tuple[socket.AddressFamily, str]:
    """Returns the address of MASTER_ADDR, at which rank 0 listens; "" for every interface.

    It listens at every interface if the name is not an address of this machine, as behind NAT, or is one that
    other nodes cannot reach: Debian maps a machine's own name to 127.0.1.1.
    """
    any_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        addresses = socket.getaddrinfo(place.host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # other nodes may still be able to resolve the name
        return any_family, ""
    for family, _, _, _, (address, *_) in addresses:
        loopback = ip_address(str(address).partition("%")[0]).is_loopback
        if loopback and place.size > place.local_size:
            continue
        try:
            socket.create_server((address, 0), family=family).close()
        except OSError:
            continue
        return family, str(address)
    return any_family, ""


def _reach(place: Place, timeout_s: Seconds, say: Say, look: Callable[[], None], node: str) -> None:
    began, announced = time.monotonic(), False
    where = endpoint(place.host, place.port)
    who = "the launcher of the ranks" if place.hosted else "rank 0"
    me = f"rank {place.rank}" + (f" on {node}" if node else "")

    def limit_s() -> float:
        return min(timeout_s(), AGENT_S) if place.hosted else timeout_s()

    while True:
        try:
            interruptible(partial(_try, place), look)
            return
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)

        # not yet: it may start slowly
        look()
        waited = time.monotonic() - began
        if waited > SAY_S and not announced:
            announced = True
            say(f"{me} waits for {who} at {where}: {why}")
        if waited > min(SAY_S, 1.0) and waited > limit_s():
            limit = "" if limit_s() < timeout_s() else " (launch.timeout_s)"
            text = f"{who} has not answered at {where} within {limit_s():g} s{limit}: {why}"
            raise RunError(f"{me}: {text}; set MASTER_ADDR and MASTER_PORT to its address")
        time.sleep(_LOOK_S)


def _try(place: Place) -> None:
    socket.create_connection((place.host, place.port), timeout=_CONNECT_S).close()


class RendezvousRequest:
    """A key of the store that a thread waits for; the wait ends with the block."""

    def __init__(self, store: Messages, key: str) -> None:
        self._store = store
        self._key = key
        self._answered = time.monotonic()
        self._over = threading.Event()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def late_s(self) -> float:
        """Returns the seconds since the store last answered."""
        return time.monotonic() - self._answered

    def wait(self, within_s: float) -> bool:
        """Returns true if the key was set in time. Raises what the store raises."""
        end = time.monotonic() + within_s
        while not self._store.check([self._key]):
            self._answered = time.monotonic()
            if self._answered > end or self._over.wait(_LOOK_S / 2):
                return False
        return True


class MessageRefused(RunError):
    """Raised when another rank has refused a message.

    ``rank`` has ended, as a message that it read was not signed with its secret.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        message = "a message in the store of this job, which is not signed with its secret"
        super().__init__(f"rank {rank} has refused {message}: {CAUSE}")


def await_ranks(
    store: Messages, prefix: str, ranks: Sequence[int], timeout_s: float, say: Say, action: str
) -> list[int]:
    """Waits for ``<prefix><rank>`` of each rank; returns the ranks whose key is not set in ``timeout_s``.

    After ``SAY_S`` seconds it prints once which ranks are waited for; ``action`` is what they have not done.
    Raises ``MessageRefused`` as soon as one of them has refused a message.
    """
    keys = [f"{prefix}{rank}" for rank in ranks]
    began, announced = time.monotonic(), False

    def missing_ranks() -> list[int]:
        return [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]

    while keys and not store.check(list(keys)):
        if (refuser := store.first_refusing(ranks)) is not None:
            raise MessageRefused(refuser)
        waited = time.monotonic() - began
        if waited > timeout_s:
            return missing_ranks()
        if waited > SAY_S and not announced and (late := missing_ranks()):
            announced = True
            say(f"waiting for {ranks_text(late)}, which {action}")
        time.sleep(_LOOK_S / 5)
    return []


def ranks_text(ranks: Sequence[int]) -> str:
    """
    >>> ranks_text([3]), ranks_text([1, 2]), ranks_text(range(100))
    ('rank 3', 'ranks 1, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more')
    """
    few = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {few}{more}"


_HOST = "127.0.0.1"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendezvous:
    """The place of the store that ranks open: a private file in ``folder``, or a port of this machine."""

    folder: Path
    port: int | None = None
    listener: int = -1

    def store(self, size: int, timeout_s: float) -> Store:
        """Opens the store, as one of ``size`` ranks."""
        if self.port is None:
            return FileStore(str(self.folder / "store"), size)
        return TCPStore(_HOST, self.port, size, is_master=False, timeout=timedelta(seconds=timeout_s))

    def stack(self, rank: int) -> Path:
        """Returns the file to which a rank writes its stack on request."""
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

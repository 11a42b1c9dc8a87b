"""The network between nodes: its interfaces, addresses and failures."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from launcher.runtime.cluster.launch_env import Place


@dataclass(frozen=True)
class Interface:
    """A network interface with one of its addresses; one with two addresses appears twice."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name}, {self.address}"

    @property
    def loopback(self) -> bool:
        return is_loopback(self.address)


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_uint16), ("data", ctypes.c_uint8 * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def interfaces() -> tuple[Interface, ...]:
    """Returns all interfaces with an IPv4 or IPv6 address, in the order of ``getifaddrs``: gloo's order too.

    Raises ``OSError``.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        number = ctypes.get_errno()
        raise OSError(number, "getifaddrs failed")
    try:
        return tuple(_listed(first))
    finally:
        libc.freeifaddrs(first)


def _listed(entry: ctypes._Pointer[_IfAddrs]) -> Iterator[Interface]:
    while entry:
        one = entry.contents
        if one.address:
            address = _address(one.address.contents)
            if address is not None:
                yield Interface(one.name.decode(), address)
        entry = one.next


def _address(address: _SockAddr) -> str | None:
    """Returns the text of an IPv4 or IPv6 address, with the scope if link-local.

    Returns ``None`` for other families.
    """
    data = bytes(address.data)
    if address.family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, data[2:6])
    if address.family != socket.AF_INET6:
        return None
    text = socket.inet_ntop(socket.AF_INET6, data[6:22])
    (scope,) = struct.unpack("=I", data[22:26])
    return f"{text}%{scope}" if scope else text


def named(name: str) -> Interface | None:
    """Returns the interface with its first address, at which gloo listens.

    Returns ``None`` if there is none of this name.
    """
    return next((one for one in interfaces() if one.name == name), None)


def having(address: str) -> Interface | None:
    """Returns the interface of this machine that has ``address``."""
    return next((one for one in interfaces() if one.address == address), None)


@dataclass(frozen=True)
class Route:
    """The route from this machine to another: the local interface, and the other's ``address``."""

    interface: Interface
    address: str


def route(host: str, port: int) -> Route | None:
    """Returns the route from this machine to ``host``; ``None`` if there is none.

    Queries the system's route with a UDP socket, which sends nothing. Raises ``OSError`` if ``host`` cannot
    be resolved.
    """
    for family, kind, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(where)
            except OSError:  # no route in this family: try the next address
                continue
            own = _text(probe.getsockname())
            peer = _text(probe.getpeername())
        interface = having(own)
        if interface is not None:
            return Route(interface, peer)
    return None


def _text(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Returns the address of a socket in the form that ``interfaces`` uses."""
    return f"{name[0].partition('%')[0]}%{name[3]}" if len(name) == 4 and name[3] else name[0]


def is_loopback(address: str) -> bool:
    """
    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1"), is_loopback("fe80::1%2")
    (True, True, False, False)
    """
    return ipaddress.ip_address(address).is_loopback


def endpoint(host: str, port: int) -> str:
    """Returns host and port as written in URLs; an IPv6 address is in brackets.

    >>> endpoint("10.0.0.1", 29500), endpoint("fd00::1", 29500)
    ('10.0.0.1:29500', '[fd00::1]:29500')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
ANSWER_S = 20.0
"""Seconds for the first connection to another node: five TCP attempts, as a bad link may lose some."""
AFTERWARDS_S = 5.0
"""Seconds for a connection after a failure, which is tried only to find the reason."""
NO_PORT = 1
"""A port on which nothing listens: a node that refuses the connection has answered."""
BACKLOG = 4096


@dataclass(frozen=True)
class ListenAddress:
    """The address at which a node listens, which gloo uses too; ``rank`` is the first rank of the node."""

    rank: int
    node: str
    interface: str
    address: str
    port: int = NO_PORT
    set_by_user: bool = False

    def __str__(self) -> str:
        return f"{self.node} ({self.interface}, {self.address})"


@dataclass(frozen=True)
class Unreached:
    """A connection between two nodes that failed, and why."""

    source: ListenAddress
    target: ListenAddress
    why: str


class NetworkView:
    """The network as this rank sees it. ``route`` leads to the rendezvous; ``None`` if there is no route.

    ``peers`` are the nodes of the run including this one. ``nodes`` maps ranks to node names, once known.
    """

    def __init__(self, at: Place, env: MutableMapping[str, str] = os.environ) -> None:
        self.at = at
        self.peers: tuple[ListenAddress, ...] = ()
        self.nodes: Mapping[int, str] = {}
        self.route = _route(at)
        self._env = env
        self._by_user = frozenset(key for key in (GLOO, NCCL) if env.get(key))
        self._sockets: list[socket.socket] = []

    @property
    def several_nodes(self) -> bool:
        return self.at.size > self.at.local_size

    @property
    def first_of_node(self) -> bool:
        return self.at.local_rank == 0

    def use(self, rendezvous: str | None = None) -> None:
        """Sets the interface of gloo and NCCL, unless the user has set it.

        The name of a pod resolves only some time after the pod has started, so a failed lookup is repeated
        here. ``rendezvous``: the address by which other nodes reach the node of MASTER_ADDR. On that node the
        name often resolves to a loopback address (127.0.1.1 in /etc/hosts), which no other node can reach.
        """
        self.route = self.route or _route(self.at)
        if rendezvous is not None and (self.route is None or self.route.interface.loopback):
            own = having(rendezvous)
            self.route = self.route if own is None else Route(own, rendezvous)
        if self.route is None:
            return
        name = self.route.interface.name
        for key, value in ((GLOO, name), (NCCL, f"={name}")):
            if key not in self._by_user:
                self._env[key] = value

    def listen(self) -> list[ListenAddress]:
        """Listens at each interface that gloo uses. Raises ``OSError`` with a message for the user."""
        names = [name.strip() for name in self._env.get(GLOO, "").split(",") if name.strip()]
        return [self._listen(name) for name in names]

    def _listen(self, name: str) -> ListenAddress:
        own = named(name)
        if own is None:
            available = ", ".join(dict.fromkeys(one.name for one in interfaces()))
            raise OSError(errno.ENODEV, f"{GLOO} is {name}, but the interfaces of this node are {available}")
        listener = socket.create_server((own.address, 0), family=_family(own.address), backlog=BACKLOG)
        self._sockets.append(listener)
        return ListenAddress(
            self.at.rank,
            socket.gethostname(),
            own.name,
            own.address,
            port=int(listener.getsockname()[1]),
            set_by_user=GLOO in self._by_user,
        )

    def note(self) -> str:
        """Returns the line at the start of a run that says which interface its ranks use."""
        where = endpoint(self.at.host, self.at.port)
        if self.route is None:
            way_out = "" if GLOO in self._by_user else f"; set {GLOO}"
            return f"network: no interface reaches the rendezvous at {where}{way_out}"
        used = self.route.interface
        others = "".join(f"; {key}={self._env[key]} is set" for key in sorted(self._by_user))
        return f"network: {used.name} ({used.address}) reaches the rendezvous at {where}{others}"

    def close(self) -> None:
        """Closes the sockets and removes the variables that were set."""
        for listener in self._sockets:
            listener.close()
        self._sockets.clear()
        for key in {GLOO, NCCL} - self._by_user:
            self._env.pop(key, None)

    def unreached(self, within_s: float = ANSWER_S, refused: bool = True) -> list[Unreached]:
        """Returns the nodes that this one cannot reach.

        Unless ``refused``, a refused connection is success.
        """
        own = self._own()
        failures: list[Unreached] = []
        for source in own:
            targets = [peer for peer in self.peers if peer not in own]
            for target, why in _connect(source.address, targets, within_s, refused):
                failures.append(Unreached(source, target, why))
        return failures

    def _own(self) -> tuple[ListenAddress, ...]:
        """Returns the ``peers`` on this node.

        Node names may repeat, so a node's first rank compares ranks.
        """
        if self.first_of_node:
            return tuple(peer for peer in self.peers if peer.rank == self.at.rank)
        return tuple(peer for peer in self.peers if peer.node == socket.gethostname())

    def lost(self) -> str:
        """Returns the reason why the rendezvous cannot be reached, else "".

        A refused connection is an answer.
        """
        try:
            socket.create_connection((self.at.host, self.at.port), timeout=AFTERWARDS_S).close()
        except ConnectionRefusedError:
            return ""
        except (OSError, UnicodeError) as error:
            return getattr(error, "strerror", None) or str(error)
        return ""

    def here(self) -> str:
        """Returns this node's name, with the interface that leads to the rendezvous."""
        node = socket.gethostname()
        return node if self.route is None else f"{node} ({self.route.interface})"


@contextmanager
def network(at: Place) -> Iterator[NetworkView]:
    """The network of this rank; gloo and NCCL use it in the block."""
    opened = NetworkView(at)
    try:
        opened.use()
        yield opened
    finally:
        opened.close()


def _route(at: Place) -> Route | None:
    with suppress(OSError, UnicodeError):
        return route(at.host, at.port)
    return None


def describe(failed: Sequence[Unreached], rendezvous: str) -> str:
    """Returns a line that says which nodes cannot reach each other, by which interfaces, and what to set."""
    first = min(failed, key=lambda one: (one.source.node, one.target.node))
    text = f"{first.source} cannot reach {first.target}: {first.why}"
    pairs = {(one.source.node, one.target.node) for one in failed}
    if len(pairs) > 1:
        text += f" ({len(pairs)} connections between nodes fail)"
    by_user = [one.node for one in (first.source, first.target) if one.set_by_user]
    if by_user:
        nodes = " and ".join(dict.fromkeys(by_user))
        return f"{text}; {GLOO} is set on {nodes}: set it to the interface that reaches the other nodes"
    return f"{text}; these interfaces reach MASTER_ADDR ({rendezvous}); set {GLOO} and {NCCL} to others"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _connect(
    source: str, targets: Iterable[ListenAddress], within_s: float, refused: bool
) -> Iterator[tuple[ListenAddress, str]]:
    """Yields the targets that cannot be reached from the address ``source``, with reasons.

    Tries all at once.
    """
    with selectors.DefaultSelector() as waiting:
        # start all connections
        for target in targets:
            if _family(source) != _family(target.address):
                yield target, "one has an IPv4 address, the other an IPv6 address"
                continue
            probe = socket.socket(_family(source), socket.SOCK_STREAM)
            probe.setblocking(False)
            try:
                probe.bind((source, 0))
                number = probe.connect_ex((target.address, target.port))
            except OSError as error:
                number = error.errno or errno.EIO
            if number not in (0, errno.EINPROGRESS):
                probe.close()
                if refused or number != errno.ECONNREFUSED:
                    yield target, os.strerror(number)
                continue
            waiting.register(probe, selectors.EVENT_WRITE, target)

        # collect the results
        end = time.monotonic() + within_s
        while waiting.get_map() and time.monotonic() < end:
            for key, _ in waiting.select(max(0.0, end - time.monotonic())):
                number = _end(waiting, key)
                if number and (refused or number != errno.ECONNREFUSED):
                    yield key.data, os.strerror(number)
        for key in list(waiting.get_map().values()):
            _end(waiting, key)
            yield key.data, f"no answer within {within_s:g} s"


def _end(waiting: selectors.BaseSelector, key: selectors.SelectorKey) -> int:
    """Closes a socket; returns its error number."""
    probe = key.fileobj
    assert isinstance(probe, socket.socket)
    waiting.unregister(probe)
    with probe:
        return probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

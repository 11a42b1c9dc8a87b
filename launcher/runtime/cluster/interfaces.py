"""The network interfaces of this machine, and which of them reaches another host."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass


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
    """All interfaces with an IPv4 or IPv6 address, in the order of ``getifaddrs``: gloo's order too.

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


def _address(found: _SockAddr) -> str | None:
    """The text of an IPv4 or IPv6 address, with the scope if link-local; ``None`` for other families."""
    data = bytes(found.data)
    if found.family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, data[2:6])
    if found.family != socket.AF_INET6:
        return None
    text = socket.inet_ntop(socket.AF_INET6, data[6:22])
    (scope,) = struct.unpack("=I", data[22:26])
    return f"{text}%{scope}" if scope else text


def named(name: str) -> Interface | None:
    """The interface with its first address, at which gloo listens; ``None`` if there is none of this name."""
    return next((one for one in interfaces() if one.name == name), None)


def having(address: str) -> Interface | None:
    """The interface of this machine that has ``address``."""
    return next((one for one in interfaces() if one.address == address), None)


@dataclass(frozen=True)
class Route:
    """The route from this machine to another: the local interface, and the other's ``address``."""

    interface: Interface
    address: str


def route(host: str, port: int) -> Route | None:
    """The route from this machine to ``host``; ``None`` if there is none.

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
            there = _text(probe.getpeername())
        found = having(own)
        if found is not None:
            return Route(found, there)
    return None


def _text(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """The address of a socket in the form that ``interfaces`` uses."""
    return f"{name[0].partition('%')[0]}%{name[3]}" if len(name) == 4 and name[3] else name[0]


def is_loopback(address: str) -> bool:
    """
    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1"), is_loopback("fe80::1%2")
    (True, True, False, False)
    """
    return ipaddress.ip_address(address).is_loopback


def endpoint(host: str, port: int) -> str:
    """Host and port as written in URLs; an IPv6 address stands in brackets.

    >>> endpoint("10.0.0.1", 29500), endpoint("fd00::1", 29500)
    ('10.0.0.1:29500', '[fd00::1]:29500')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""A port for ranks that connect later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port outside the range from which the kernel chooses, because other tests ask the kernel for ports."""
    first = int(GIVEN_AWAY.read_text().split()[0]) if GIVEN_AWAY.exists() else 32768
    while True:
        port = random.SystemRandom().randrange(10000, first)
        with suppress(OSError), socket.create_server(("", port)):
            return port

"""A line between two network namespaces that delays and loses packets: ``bad_line.py NS NS NAME MS LOSS``.

It has a tun device in each and this process between them, so it also works with kernels without netem.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress

TUN, TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = "/dev/net/tun", 0x400454CA, 0x0001, 0x1000, 0x40000000
MTU = 1500


def opened(namespace: str, name: str) -> int:
    """A tun device ``name`` in ``namespace``, which exists as long as this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(there, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns: {namespace}")
    os.close(there)
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def relay(near: int, far: int, delay_s: float, loss: float) -> None:
    """Forever pass each packet from one device to the other after ``delay_s``, or drop it."""
    drawn = random.Random(0)
    other = {near: far, far: near}
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([near, far], [], [], timeout)
        for device in ready:
            packet = os.read(device, 1 << 16)
            if drawn.random() >= loss:
                number += 1
                heapq.heappush(waiting, (time.monotonic() + delay_s, number, other[device], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(waiting)
            with suppress(OSError):  # a device that is not up yet
                os.write(device, packet)


if __name__ == "__main__":
    namespaces, device = sys.argv[1:3], sys.argv[3]
    ends = [opened(namespace, device) for namespace in namespaces]
    print("open", flush=True)
    relay(*ends, float(sys.argv[4]) / 1000, float(sys.argv[5]))

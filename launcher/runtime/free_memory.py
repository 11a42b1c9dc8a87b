"""Free memory of this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.plan.fits_free_memory import Free

NONE = 1 << 60
"""A limit of version 1 that is this large means that there is no limit."""


def available_memory(ranks: int, device: str, proc: Path = Path("/proc")) -> Free | None:
    """Returns the free memory of this machine and of the devices of ``ranks``; ``None`` if it is unknown."""
    memory = ram(proc)
    if memory is None or device == "cpu":
        return memory
    devices = _devices(device, ranks)
    return Free(memory.ram, memory.where, devices, kind=device) if devices else None


def ram(proc: Path = Path("/proc")) -> Free | None:
    """Returns the memory available without swapping.

    If a control group of this process leaves less, it is that.
    """
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is None:
        return None
    least = Free(int(match[1]) << 10)
    for group in _groups(proc):
        available = group.free_bytes()
        if available is not None and available < least.ram:
            least = Free(available, f"this machine for the control group {group.path}")
    return least


@dataclass(frozen=True)
class _Group:
    """A memory control group at ``path``; the names of its files depend on the version."""

    path: Path
    limit: str
    usage: str
    reclaimable: str

    def free_bytes(self) -> int | None:
        """Returns the bytes left below the limit; ``None`` without a limit.

        Reclaimable page cache counts as free.
        """
        try:
            limit = (self.path / self.limit).read_text().strip()
            if not limit.isdecimal() or int(limit) >= NONE:
                return None
            used = int((self.path / self.usage).read_text())
            stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return None
        return max(0, int(limit) - used + int(stat.get(self.reclaimable, 0)))


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
"""The files of the limit and the usage, and the entry of reclaimable memory in ``memory.stat``."""


def _groups(proc: Path) -> Iterator[_Group]:
    """Yields the groups of this process and all visible ones above them: each limits those below it."""
    try:
        member = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return

    for line in member:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        kind, names = ("memory", _VERSION_1) if kinds else (None, _VERSION_2)
        for root, point in _mounted(mounts, kind):
            folders = [point]
            if path.startswith(root):
                here = point / os.path.relpath(path, root)
                folders = [p for p in (here, *here.parents) if p.is_relative_to(point)]
            yield from (_Group(folder, *names) for folder in folders)


def _mounted(mounts: list[str], kind: str | None) -> Iterator[tuple[str, Path]]:
    """Yields the root and the mount point of each mounted hierarchy.

    These are of version 1 of a ``kind``, or of version 2.
    """
    for line in mounts:
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        system, _, options = right.split()[:3]
        expected = "cgroup2" if kind is None else "cgroup"
        if system == expected and (kind is None or kind in options.split(",")):
            yield root, Path(point)


def _devices(kind: str, count: int) -> tuple[int, ...]:
    """Returns the free bytes of each device, read in a child process.

    Reading creates a context of hundreds of megabytes on each device, which forked ranks could not use.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            from launcher.runtime.device import free_memory

            os.write(write, json.dumps(free_memory(kind, count)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return tuple(json.loads(answer)) if answer else ()

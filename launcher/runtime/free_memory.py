"""Memory that is free on this machine: by the kernel, the control group and the devices."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.plan.capacity import Free

NONE = 1 << 60
"""A limit of version 1 that is none: the largest number of pages."""


def free(ranks: int, device: str, proc: Path = Path("/proc")) -> Free | None:
    """Memory for so many ``ranks`` of this machine on devices of one kind; ``None`` where nobody says."""
    there = ram(proc)
    if there is None or device == "cpu":
        return there
    devices = _devices(device, ranks)
    return Free(there.ram, there.where, devices, kind=device) if devices else None


def ram(proc: Path = Path("/proc")) -> Free | None:
    """Bytes that the kernel can give without swapping, or that a control group of ours leaves, if less."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        return None
    least = Free(int(found[1]) << 10)
    for group in _groups(proc):
        left = group.left()
        if left is not None and left < least.ram:
            least = Free(left, f"this machine for the control group {group.path}")
    return least


@dataclass(frozen=True)
class _Group:
    """A control group of memory, at ``path``; the names of its files are those of its version."""

    path: Path
    limit: str
    usage: str
    reclaimable: str

    def left(self) -> int | None:
        """``None``: it has no limit. Page cache that the kernel would give back first counts as free."""
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
"""Files of the limit and of the use, and the name of what of it can be reclaimed."""


def _groups(proc: Path) -> Iterator[_Group]:
    """Those that this process is in, with all above them that can be seen: each bounds those below it."""
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
    """Which part of the tree is mounted where: of version 1's ``kind``, or of version 2."""
    for line in mounts:
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        system, _, options = right.split()[:3]
        wanted = "cgroup2" if kind is None else "cgroup"
        if system == wanted and (kind is None or kind in options.split(",")):
            yield root, Path(point)


def _devices(kind: str, count: int) -> tuple[int, ...]:
    """Asked by a child: it makes a context of hundreds of megabytes on each, which no fork could use."""
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
        said = file.read()
    os.waitpid(pid, 0)
    return tuple(json.loads(said)) if said else ()

"""The memory of a process and all its descendants."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def pss(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; memory that several share counts once."""
    return resident(tree(pid), "Pss")


def resident(pids: Iterable[int], *kinds: str) -> int:
    """Return the sum of some ``kinds`` of memory in bytes, by their names in ``/proc/PID/smaps_rollup``."""
    return sum(_one(pid, kinds) for pid in pids)


def _one(pid: int, kinds: tuple[str, ...]) -> int:
    with suppress(OSError):  # it has just ended
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split(":")[0] in kinds) * 1024
    return 0


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    return [pid, *(below for child in children(pid) for below in tree(child))]


def children(pid: int) -> list[int]:
    """Return the children of a process; none if it has just ended."""
    with suppress(OSError):
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []

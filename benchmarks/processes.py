"""The memory of a process and all its descendants."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def pss(pid: int) -> int:
    """Return the resident bytes; memory that several processes share counts once."""
    return sum(_own(each) for each in _tree(pid))


def _own(pid: int) -> int:
    with suppress(OSError):  # it has just ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _tree(pid: int) -> list[int]:
    out = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                out += _tree(int(child))
    return out

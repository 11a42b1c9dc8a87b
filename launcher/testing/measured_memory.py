"""Peak bytes of all tensors on a real rank, without what threads of the transport are about to let go of."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from launcher.parallel.cost.memory_meter import MemoryMeter


class MeasuredMemory(MemoryMeter):
    """gloo's threads let go of a message's tensors some time after its ``wait``: a peak waits for them."""

    def settle(self) -> None:
        time.sleep(1e-4)  # one that waits for the interpreter's lock sleeps, too: it gets the lock now
        while _others_run():
            time.sleep(1e-4)


def _others_run() -> bool:
    """Whether another thread of this process is not asleep, as Linux tells it; nowhere else is it known."""
    mine = str(threading.get_native_id())
    others = (t for t in Path("/proc/self/task").glob("*/stat") if t.parent.name != mine)
    return any(_state(stat) == "R" for stat in others)


def _state(stat: Path) -> str:
    """The letter after the name in brackets; none of a thread that has ended."""
    try:
        return stat.read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return ""

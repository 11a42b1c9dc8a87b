"""Meters for tests and benchmarks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from launcher.parallel.cost.memory import MemoryMeter
from launcher.parallel.dispatch.modes import Dispatch, tree_leaves

KINDS = {
    "allgather_": "all_gather", "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce", "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast", "send": "send", "recv_": "receive",
}  # fmt: skip
"""The plan's names for c10d's operators."""


class CollectiveMeter(Dispatch):
    """Counts the collectives of its block by kind (``count``), and their bytes (``nbytes``).

    Bytes are those of the full tensor: the output of a gather, the input of a scatter. The meter itself
    sends nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled graphs still run compiled, and their collectives are counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0]
            kind = KINDS.get(name, name)
            self.count[kind] += 1
            self.nbytes[kind] += max(
                map(_bytes, args[:2])
            )  # output and input of a gather or scatter; or a tensor
        return func(*args, **(kwargs or {}))

    def totals(self) -> dict[str, tuple[int, int]]:
        """Returns the number and the bytes of the collectives of each kind, without barriers."""
        return {k: (n, self.nbytes[k]) for k, n in self.count.items() if k in KINDS.values()}


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, torch.Tensor))


class MeasuredMemory(MemoryMeter):
    """A memory meter that waits until gloo's threads free a message's tensors, some time after ``wait``."""

    def settle(self) -> None:
        time.sleep(1e-4)  # a thread that waits for the GIL also sleeps: it gets the GIL now
        while _others_run():
            time.sleep(1e-4)


def _others_run() -> bool:
    """Returns true if another thread of this process is running; always false where there is no /proc."""
    mine = str(threading.get_native_id())
    others = (t for t in Path("/proc/self/task").glob("*/stat") if t.parent.name != mine)
    return any(_state(stat) == "R" for stat in others)


def _state(stat: Path) -> str:
    """Returns the thread's state, the letter after its name in brackets; "" for a thread that has ended."""
    try:
        return stat.read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return ""

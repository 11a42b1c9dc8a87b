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
"""c10d's operators, as the plan calls them."""


class CollectiveMeter(Dispatch):
    """While entered: how many of each kind (``count``), and their bytes (``nbytes``).

    Bytes are those of the whole tensor: what a gather yields, what a scatter is given. Nothing is moved by
    counting.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled runs so, and what its graphs send is counted

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
        """(how many, bytes) of each kind that happened, barriers left out."""
        return {k: (n, self.nbytes[k]) for k, n in self.count.items() if k in KINDS.values()}


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, torch.Tensor))


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

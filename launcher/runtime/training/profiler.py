"""The profiler's window, and its table of the most expensive kernels."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from launcher.checkpoint.tensorfile.disk import replaced_by_library, write_text
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.runtime.device import is_accelerator, memory_history, profiled, synchronize

NAME_WIDTH = 80
"""Most characters of a kernel's name in a table: template names can have hundreds."""
_NAMESPACES = re.compile(r"^void |at::native::|\(anonymous namespace\)::|c10::")


@dataclass(frozen=True)
class KernelTime:
    """All calls of one kernel; on the CPU of one operator, without the operators that it calls."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class KernelTimes:
    """The seconds of kernels in a profile.

    ``rows``: the most expensive first. ``on``: ``device`` or ``cpu``, where the times were measured.
    """

    on: str
    rows: tuple[KernelTime, ...]

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    def share(self, row: KernelTime) -> float:
        return row.seconds / self.seconds if self.seconds else 0.0


def kernel_times(profile: Any) -> KernelTimes:
    """Returns the kernels of a finished ``torch.profiler.profile``.

    These are a device's kernels if the profiler recorded any, else the operators of the CPU.
    """
    events = profile.key_averages()
    rows = [
        KernelTime(e.key, e.count, e.self_device_time_total / 1e6)
        for e in events
        if e.device_type != DeviceType.CPU and e.self_device_time_total > 0 and not e.is_user_annotation
    ]
    on = "device"
    if not rows:
        on = "cpu"
        rows = [
            KernelTime(e.key, e.count, e.self_cpu_time_total / 1e6)
            for e in events
            if e.device_type == DeviceType.CPU and not e.is_user_annotation
        ]
    return KernelTimes(on, tuple(sorted(rows, key=lambda row: -row.seconds)))


def table(times: KernelTimes, most: int = 10) -> list[str]:
    """Returns a table of the ``most`` most expensive kernels: milliseconds, share, calls, name."""
    kind = "kernel" if times.on == "device" else "operator"
    lines = [f"{'ms':>9} {'share':>6} {'calls':>6}  {kind}"]
    for row in times.rows[:most]:
        lines.append(
            f"{row.seconds * 1e3:9.2f} {times.share(row):6.1%} {row.calls:6d}  {shortened(row.name)}"
        )
    return lines


def shortened(name: str) -> str:
    """Returns ``name`` without the prefixes of torch's own kernels, shortened to the width of a table.

    >>> shortened("void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float>(float*, long)")
    'cunn_SoftMaxBackward<4, float>(float*, long)'
    """
    short = _NAMESPACES.sub("", name)
    return short if len(short) <= NAME_WIDTH else f"{short[: NAME_WIDTH - 3]}..."


_log = logging.getLogger(__name__)

FOLDER = "profile"
"""A folder in the run folder, with ``rank<N>.json.gz``, a Chrome trace for Perfetto, and ``rank<N>.txt``."""
MOST = 10
"""Kernels of a table."""
ENTRIES = 100_000
"""Most allocations in a memory snapshot."""


@dataclass
class ProfileWindow:
    """The window of one rank: ``before`` and ``after`` a step open and close it, ``end`` writes the results.

    ``steps``: the first and the last optimizer step; ``None`` means all. ``memory``: also records
    allocations. ``say`` prints to the console; ``None`` on a rank whose table is not shown.
    """

    steps: tuple[int, int] | None
    memory: bool
    folder: Path
    rank: int
    device: torch.device
    say: Callable[[str], None] | None
    _trace: Any = None
    _first: int = 0
    _last: int = 0
    _written: bool = field(default=False)

    @property
    def path(self) -> Path:
        return self.folder / f"rank{self.rank}.json.gz"

    def before(self, step: int) -> None:
        """Called before ``step`` begins."""
        if self._trace is not None or self._written or not self._within(step):
            return
        self._first = step
        synchronize(self.device)
        self._record_memory()
        self._trace = torch.profiler.profile(
            activities=profiled(self.device), profile_memory=self.memory and not is_accelerator(self.device)
        )
        with warnings.catch_warnings():
            # torch 2.11 and 2.12 warn that events of earlier cycles are lost, but there is only one cycle
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._trace.start()

    def after(self, step: int) -> None:
        """Called after ``step`` has ended."""
        if self._trace is not None:
            self._last = step
            if self.steps is not None and step >= self.steps[1]:
                self.end()

    def end(self) -> None:
        """Writes what was recorded; if nothing was, says why."""
        if self._trace is None:
            if not self._written and self.say is not None:
                self.say("debug.profiler: this start trained no step of the window (debug.profiler.steps)")
            return
        trace = self._stopped()
        make_folder(self.folder)
        with replaced_by_library(self.path) as path:
            trace.export_chrome_trace(str(path))
        lines = self._table(kernel_times(trace))
        write_text(self.folder / f"rank{self.rank}.txt", "\n".join(lines) + "\n")
        if self.say is not None:
            self.say("\n".join(lines))
        self._written = True

    def drop(self) -> None:
        """Stops profiling after training has failed; writes nothing."""
        if self._trace is not None:
            self._stopped()

    def _within(self, step: int) -> bool:
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def _stopped(self) -> Any:
        trace, self._trace = self._trace, None
        synchronize(self.device)
        trace.stop()
        self._save_memory()
        return trace

    def _table(self, times: KernelTimes) -> list[str]:
        steps = f"steps {self._first} to {self._last}"
        head = f"profile of {steps} on rank {self.rank}, {times.seconds * 1e3:.1f} ms of kernels: {self.path}"
        if times.on == "cpu":
            head = head.replace("of kernels", "in operators")
        return [head, *(f"  {line}" for line in table(times, MOST))]

    @property
    def _memory(self) -> Any:
        """The module of the device that records allocations; ``None`` if torch has none."""
        return memory_history(self.device) if self.memory else None

    def _record_memory(self) -> None:
        if self._memory is not None:
            self._memory._record_memory_history(max_entries=ENTRIES)
        elif self.memory and self.say is not None:
            kind = self.device.type
            hint = "" if is_accelerator(self.device) else "; the trace shows its allocations"
            self.say(f"debug.profiler.memory: torch has no memory snapshots for {kind}{hint}")

    def _save_memory(self) -> None:
        """Writes ``rank<N>-memory.pickle``, for https://pytorch.org/memory_viz."""
        if self._memory is not None:
            make_folder(self.folder)
            with replaced_by_library(self.folder / f"rank{self.rank}-memory.pickle") as path:
                self._memory._dump_snapshot(str(path))
            self._memory._record_memory_history(enabled=None)

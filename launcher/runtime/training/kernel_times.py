"""Aggregates the kernels of a profile by name: number of calls and total time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType

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
    """``rows``: the most expensive first. ``on``: ``device`` or ``cpu``, where the times were measured."""

    on: str
    rows: tuple[KernelTime, ...]

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    def share(self, row: KernelTime) -> float:
        return row.seconds / self.seconds if self.seconds else 0.0


def kernel_times(profile: Any) -> KernelTimes:
    """The kernels of a finished ``torch.profiler.profile``.

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
    """Table lines of the ``most`` most expensive kernels: milliseconds, share, calls, name."""
    kind = "kernel" if times.on == "device" else "operator"
    lines = [f"{'ms':>9} {'share':>6} {'calls':>6}  {kind}"]
    for row in times.rows[:most]:
        lines.append(
            f"{row.seconds * 1e3:9.2f} {times.share(row):6.1%} {row.calls:6d}  {shortened(row.name)}"
        )
    return lines


def shortened(name: str) -> str:
    """``name`` without the prefixes of torch's own kernels, shortened to the width of a table.

    >>> shortened("void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float>(float*, long)")
    'cunn_SoftMaxBackward<4, float>(float*, long)'
    """
    short = _NAMESPACES.sub("", name)
    return short if len(short) <= NAME_WIDTH else f"{short[: NAME_WIDTH - 3]}..."

"""The device of this process: its name, its memory and its timers, and a world of one rank on it."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.gpu.request import ALWAYS, LLAMA_1B, TINY_LM
from launcher.runtime.cluster.world import World, backend_of, connect, place
from launcher.runtime.training.throughput import peak_flops

CLUSTERS = {"H100": "h100_sxm", "A100": "a100_80g", "B200": "b200", "910B": "ascend_910b"}
"""The option of ``cluster`` that describes a card, by a part of its name."""


@dataclass(frozen=True)
class Device:
    """``memory``: bytes of the device, or of the machine for a CPU.

    ``versions``: of torch, CUDA and Python.
    """

    kind: str
    name: str
    memory: int
    versions: str

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def cluster(self) -> str:
        """The option of ``cluster`` that describes it, or ``unknown``."""
        if self.kind == "cpu":
            return "here"
        return next((option for word, option in CLUSTERS.items() if word in self.name), "unknown")

    def peak(self, dtype: str) -> float | None:
        """Operations per second in the data sheet, if known."""
        return peak_flops(self.name, dtype)


def describe(kind: str) -> Device:
    """The first device of a kind."""
    built = torch.version.cuda or torch.version.hip
    said = f"torch {torch.__version__}" + (f", CUDA {built}" if built else "")
    versions = f"{said}, python {platform.python_version()}, {os.cpu_count()} cores"
    if kind == "cpu":
        return Device("cpu", "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), versions)
    module: Any = torch.get_device_module(kind)
    name = module.get_device_name(0) if hasattr(module, "get_device_name") else kind
    properties = module.get_device_properties(0) if hasattr(module, "get_device_properties") else None
    return Device(kind, name, getattr(properties, "total_memory", 0), versions)


@contextmanager
def alone(kind: str, threads: int) -> Iterator[World]:
    """The world of one rank, which is this process."""
    world = World(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        attempt=0,
        device=place(kind, 0),
        backend=backend_of(kind),
    )
    with connect(world, HashStore(), 600, threads):
        yield world


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the peak bytes of tensors and of the allocator since ``reset_peak``; ``None`` on a CPU."""
    if device.type == "cpu":
        return None
    most = torch.accelerator.max_memory_allocated(device)
    return most, torch.accelerator.max_memory_reserved(device)


def seconds(act: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, including the work that it queues on the device."""
    synchronize(device)
    began = time.perf_counter()
    act()
    synchronize(device)
    return time.perf_counter() - began


def milliseconds(act: Callable[[], object], device: torch.device, times: int) -> dict[str, float]:
    """Return the median, the shortest and the longest of ``times`` calls, one after the other."""
    took = [seconds(act, device) * 1e3 for _ in range(times)]
    return {
        "ms": round(statistics.median(took), 2),
        "ms_min": round(min(took), 2),
        "ms_max": round(max(took), 2),
    }


def facts(kind: str, dry: str) -> None:
    """Print the facts of the device as JSON; the lab puts them at the top of its results."""
    found = torch.accelerator.current_accelerator()
    if not kind:
        kind = "cpu" if dry or found is None else found.type
    if kind == "cpu" and not dry:
        sys.exit(f"torch {torch.__version__} sees no accelerator here; --dry tries all parts on the CPU")
    device = describe(kind)
    slug = f"{device.slug}-dry" if dry else device.slug
    print(
        json.dumps(
            {
                "kind": device.kind,
                "device": device.name,
                "slug": slug,
                "memory": device.memory,
                "versions": device.versions,
                "cluster": device.cluster,
                "request": " ".join([*ALWAYS, *(TINY_LM if dry else LLAMA_1B)]),
            }
        )
    )

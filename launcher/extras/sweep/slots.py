"""Decides which cells run side by side: each needs a slot, a part of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.extras.sweep.forecast import Forecast
from launcher.job.schema.search import Sweep
from launcher.runtime import free_memory as machine_memory

TIMED = ("step_ms", "tokens_per_s", "samples_per_s", "seconds")
"""Metrics that cells distort when they run at the same time."""


@dataclass(frozen=True)
class LocalMachine:
    """The ``cores`` that this process may use, free ``memory`` in bytes, and names of ``devices``.

    ``visible``: the environment variable that limits a process to some of the devices.
    """

    cores: int
    memory: int
    devices: tuple[str, ...] = ()
    visible: str = ""


@dataclass(frozen=True)
class CellSlot:
    """The part of the machine that one cell gets."""

    cores: int
    memory: int
    devices: tuple[str, ...] = ()
    visible: str = ""

    @property
    def env(self) -> Mapping[str, str]:
        return {self.visible: ",".join(self.devices)} if self.devices else {}


class Slots:
    """Slots for cells. ``most``: cells at a time; ``auto``: as many as cores or devices, and memory, allow.

    One cell may always run: it checks itself whether it fits.
    """

    def __init__(self, machine: LocalMachine, most: int | Literal["auto"]) -> None:
        self._free, self._most, self._machine = machine, most, machine
        self._taken: list[CellSlot] = []

    def take(self, forecast: Forecast | None) -> CellSlot | None:
        """Takes a slot; returns ``None`` if there is no room now."""
        slot = self._fit(forecast)
        if slot is None:
            return None
        self._taken.append(slot)
        return slot

    def give_back(self, slot: CellSlot) -> None:
        self._taken.remove(slot)

    def room(self, forecast: Forecast | None) -> int:
        """Returns how many such cells can run at a time on this machine if it is free; at least 1."""
        tried = Slots(self._machine, self._most)
        count = 0
        while count < self._machine.cores + len(self._machine.devices) and tried.take(forecast):
            count += 1
            if forecast is None:
                break
        return max(count, 1)

    def _fit(self, forecast: Forecast | None) -> CellSlot | None:
        used = [d for slot in self._taken for d in slot.devices]
        devices = [d for d in self._machine.devices if d not in used]
        if forecast is None:  # its needs are unknown
            return None if self._taken else CellSlot(self._machine.cores, self._machine.memory)
        if self._most != "auto" and len(self._taken) >= self._most:
            return None

        on_devices = forecast.device != "cpu"
        slot = CellSlot(
            cores=0 if on_devices else forecast.ranks * forecast.threads,
            memory=forecast.resident,
            devices=tuple(devices[: forecast.ranks]) if on_devices else (),
            visible=self._machine.visible,
        )
        if not self._taken:
            return slot
        if on_devices and len(devices) < forecast.ranks:
            return None
        if self._most != "auto":
            return slot
        cores = sum(taken.cores for taken in self._taken) + slot.cores
        memory = sum(taken.memory for taken in self._taken) + slot.memory
        return slot if cores <= self._machine.cores and memory <= self._machine.memory else None


def machine(env: Mapping[str, str] = os.environ) -> LocalMachine:
    """Returns this machine, as it is now.

    Devices are listed only if a known environment variable selects among them; without, cells that need
    devices run one after another.
    """
    from launcher.runtime import device

    kind = device.accelerator() or device.CPU
    variable, count = device.VISIBLE.get(kind, ""), device.count(kind)
    devices: list[str] = []
    if variable:
        named = [name for name in env.get(variable, "").split(",") if name]
        devices = named[:count] if named else [str(n) for n in range(count)]
    free = machine_memory.ram()
    memory = 1 << 62 if free is None else free.ram
    return LocalMachine(len(os.sched_getaffinity(0)), memory, tuple(devices), variable)


def side_by_side(settings: Sweep, metric: str) -> int | Literal["auto"]:
    """Returns how many cells run at a time; for ``auto``, one if the metric is their speed."""
    return 1 if settings.parallel == "auto" and metric in TIMED else settings.parallel

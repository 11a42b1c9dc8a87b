"""Assigns parts of this machine to the cells of a sweep, as long as there is room."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.runtime import free_memory
from launcher.sweep.forecast import Forecast


@dataclass(frozen=True)
class Machine:
    """The ``cores`` that this process may use, free ``memory`` in bytes, and names of ``devices``.

    ``visible``: the environment variable that limits a process to some of the devices.
    """

    cores: int
    memory: int
    devices: tuple[str, ...] = ()
    visible: str = ""


@dataclass(frozen=True)
class Slot:
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

    def __init__(self, machine: Machine, most: int | Literal["auto"]) -> None:
        self._free, self._most, self._machine = machine, most, machine
        self._taken: list[Slot] = []

    def take(self, wanted: Forecast | None) -> Slot | None:
        """Takes a slot; returns ``None`` if there is no room now."""
        slot = self._fit(wanted)
        if slot is None:
            return None
        self._taken.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        self._taken.remove(slot)

    def room(self, wanted: Forecast | None) -> int:
        """How many such cells can run at a time on this machine if it is free; at least 1."""
        tried = Slots(self._machine, self._most)
        count = 0
        while count < self._machine.cores + len(self._machine.devices) and tried.take(wanted):
            count += 1
            if wanted is None:
                break
        return max(count, 1)

    def _fit(self, wanted: Forecast | None) -> Slot | None:
        used = [d for slot in self._taken for d in slot.devices]
        devices = [d for d in self._machine.devices if d not in used]
        if wanted is None:  # its needs are unknown
            return None if self._taken else Slot(self._machine.cores, self._machine.memory)
        if self._most != "auto" and len(self._taken) >= self._most:
            return None

        on_devices = wanted.device != "cpu"
        slot = Slot(
            cores=0 if on_devices else wanted.ranks * wanted.threads,
            memory=wanted.resident,
            devices=tuple(devices[: wanted.ranks]) if on_devices else (),
            visible=self._machine.visible,
        )
        if not self._taken:
            return slot
        if on_devices and len(devices) < wanted.ranks:
            return None
        if self._most != "auto":
            return slot
        cores = sum(taken.cores for taken in self._taken) + slot.cores
        memory = sum(taken.memory for taken in self._taken) + slot.memory
        return slot if cores <= self._machine.cores and memory <= self._machine.memory else None


def machine(env: Mapping[str, str] = os.environ) -> Machine:
    """This machine, as it is now.

    It has no devices of a kind that no known variable controls: such cells run one after another.
    """
    from launcher.runtime import device

    kind = device.accelerator() or device.CPU
    variable, count = device.VISIBLE.get(kind, ""), device.count(kind)
    devices: list[str] = []
    if variable:
        named = [name for name in env.get(variable, "").split(",") if name]
        devices = named[:count] if named else [str(n) for n in range(count)]
    free = free_memory.ram()
    memory = 1 << 62 if free is None else free.ram
    return Machine(len(os.sched_getaffinity(0)), memory, tuple(devices), variable)

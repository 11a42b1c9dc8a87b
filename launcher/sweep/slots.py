"""What of this machine the cells of a sweep take, and which still have room beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.runtime import free_memory
from launcher.sweep.forecast import Forecast


@dataclass(frozen=True)
class Machine:
    """``cores`` that this process may use, bytes of ``memory`` that are free, names of ``devices``.

    ``visible``: the variable that gives a process some of the devices.
    """

    cores: int
    memory: int
    devices: tuple[str, ...] = ()
    visible: str = ""


@dataclass(frozen=True)
class Slot:
    """What one cell has of it."""

    cores: int
    memory: int
    devices: tuple[str, ...] = ()
    visible: str = ""

    @property
    def env(self) -> Mapping[str, str]:
        return {self.visible: ",".join(self.devices)} if self.devices else {}


class Slots:
    """``most``: cells at a time; ``auto``: as many as there are cores or devices, and memory, for.

    One cell may always run: whether it has room by itself it finds out.
    """

    def __init__(self, machine: Machine, most: int | Literal["auto"]) -> None:
        self._free, self._most, self._machine = machine, most, machine
        self._taken: list[Slot] = []

    def take(self, wanted: Forecast | None) -> Slot | None:
        """``None`` where there is no room now."""
        slot = self._fit(wanted)
        if slot is None:
            return None
        self._taken.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        self._taken.remove(slot)

    def room(self, wanted: Forecast | None) -> int:
        """How many such cells fit the whole machine."""
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
        if wanted is None:  # nobody knows what it takes
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
    """This one, as it is now.

    Of a kind of device that no known variable gives out it has none: such cells run one after the other.
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

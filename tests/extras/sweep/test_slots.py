"""How much of a machine cells take: cores or devices, and memory; one cell may always run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.extras.sweep.forecast import Forecast
from launcher.extras.sweep.slots import CellSlot, LocalMachine, Slots, machine

ONE = Forecast(
    ranks=1, nodes=1, threads=1, device="cpu", resident=10, memory=1, bubble=0.0, seconds=None, mfu=None, samples=1,
    tokens=None, digest="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("there", "most", "wanted", "fit"),
    [
        (LocalMachine(4, 100), "auto", ONE, 4),
        (LocalMachine(4, 35), "auto", ONE, 3),
        (LocalMachine(4, 100), "auto", replace(ONE, ranks=2), 2),
        (LocalMachine(4, 100), "auto", replace(ONE, threads=3), 1),
        (LocalMachine(4, 100), "auto", replace(ONE, ranks=9), 1),
        (LocalMachine(4, 5), "auto", ONE, 1),
        (LocalMachine(4, 5), 3, ONE, 3),
        (LocalMachine(4, 100), 2, ONE, 2),
        (LocalMachine(4, 1000, ("0", "1", "2")), "auto", replace(ONE, device="npu"), 3),
        (LocalMachine(4, 1000, ("0", "1", "2")), "auto", replace(ONE, device="npu", ranks=2), 1),
        (LocalMachine(4, 1000, ("0", "1", "2")), 7, replace(ONE, device="npu"), 3),
        (LocalMachine(4, 15, ("0", "1", "2")), "auto", replace(ONE, device="npu"), 1),
        (LocalMachine(4, 100), "auto", None, 1),
    ],
    ids=[
        "cores", "memory", "ranks", "threads", "more-than-cores", "more-than-memory", "told-so-many", "told-less",
        "devices", "two-devices-each", "no-device-twice", "devices-and-memory", "nobody-knows",
    ],
)  # fmt: skip
def test_so_many_cells_have_room_at_a_time(there, most, wanted, fit):
    slots = Slots(there, most)
    taken = []
    while len(taken) < 9 and (slot := slots.take(wanted)) is not None:
        taken.append(slot)
    assert len(taken) == fit
    assert slots.room(wanted) == fit
    slots.give_back(taken.pop())
    assert slots.take(wanted) is not None
    assert slots.take(wanted) is None


def test_each_cell_has_devices_of_its_own():
    slots = Slots(LocalMachine(2, 100, ("3", "5", "7"), "SEEN"), "auto")
    two = slots.take(replace(ONE, device="npu", ranks=2))
    one = slots.take(replace(ONE, device="npu"))
    assert (two.env, one.env) == ({"SEEN": "3,5"}, {"SEEN": "7"})
    slots.give_back(two)
    assert slots.take(replace(ONE, device="npu")).devices == ("3",)


def test_this_machine_has_cores_and_memory():
    here = machine({})
    assert here.cores >= 1
    assert here.memory > 1 << 20
    assert CellSlot(1, 1).env == {}

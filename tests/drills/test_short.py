"""Each drill, for seconds."""

from __future__ import annotations

import random

import pytest

from tests.drills import disk_full, environment, hang, sweep


@pytest.mark.parametrize("drill", [hang, sweep], ids=lambda d: d.__name__.rpartition(".")[2])
def test_a_drill_goes_right_once(drill, tmp_path):
    tally = drill.run(1, random.Random(3), tmp_path)
    assert set(tally) <= {"right", "over"}
    assert tally["right"] == 1


def test_a_full_disk_goes_right_once(tmp_path):
    try:
        tally = disk_full.run(1, random.Random(63), tmp_path)
    except PermissionError as error:
        pytest.skip(f"no small file system to fill: {error}")
    assert tally == {"right": 1}


def test_two_damaged_environments_go_right(tmp_path):
    assert environment.run(2, random.Random(1), tmp_path) == {"right": 2}

"""Each drill, for a few seconds."""

from __future__ import annotations

import random

import pytest

from tests.drills import changes, corrupt, disk_full, environment, hang, keys, sweep
from tests.tiers import exhaustive

SHORT = {corrupt: 200, keys: 5}
LONGER = {hang: 1, sweep: 1, changes: 2}


@pytest.mark.parametrize(
    ("drill", "times"),
    [*SHORT.items(), *(pytest.param(*one, marks=exhaustive) for one in LONGER.items())],
    ids=[d.__name__.rpartition(".")[2] for d in (*SHORT, *LONGER)],
)
def test_a_drill_goes_right(drill, times, tmp_path):
    tally = drill.run(times, random.Random(3), tmp_path)
    assert set(tally) <= {"right", "over"}
    assert tally["right"] == times


@exhaustive
def test_a_full_disk_goes_right_once(tmp_path):
    try:
        tally = disk_full.run(1, random.Random(63), tmp_path)
    except PermissionError as error:
        pytest.skip(f"no small file system to fill: {error}")
    assert tally == {"right": 1}


@exhaustive
def test_two_damaged_environments_go_right(tmp_path):
    assert environment.run(2, random.Random(1), tmp_path) == {"right": 2}

"""Each drill, for seconds."""

from __future__ import annotations

import random

import pytest

from tests.drills import changes, corrupt, hang, keys, sweep

SHORT = {hang: 1, sweep: 1, corrupt: 200, changes: 2, keys: 5}


@pytest.mark.parametrize(("drill", "times"), SHORT.items(), ids=[d.__name__.rpartition(".")[2] for d in SHORT])
def test_a_drill_goes_right(drill, times, tmp_path):
    tally = drill.run(times, random.Random(3), tmp_path)
    assert set(tally) <= {"right", "over"}
    assert tally["right"] == times

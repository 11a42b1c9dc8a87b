"""Each drill, for seconds."""

from __future__ import annotations

import random

import pytest

from tests.drills import hang, sweep


@pytest.mark.parametrize("drill", [hang, sweep], ids=lambda d: d.__name__.rpartition(".")[2])
def test_a_drill_goes_right_once(drill, tmp_path):
    tally = drill.run(1, random.Random(3), tmp_path)
    assert set(tally) <= {"right", "over"}
    assert tally["right"] == 1

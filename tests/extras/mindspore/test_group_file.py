from __future__ import annotations

from pathlib import Path

import pytest

from launcher.extras.mindspore import strategy_file
from tests.extras.mindspore.truth import FIXTURES

REAL = FIXTURES / "real_strategy"


@pytest.mark.parametrize("path", sorted(REAL.glob("*group*")), ids=lambda p: p.name)
def test_a_group_file_comes_out_byte_for_byte(path: Path) -> None:
    assert strategy_file.groups_text(strategy_file.read_groups(path)) == path.read_bytes()


def test_a_group_file_says_which_ranks_hold_the_same() -> None:
    found = strategy_file.read_groups(REAL / "dp4tp2_opt2_group_rank0.ckpt")
    assert found.restore == (0, 4)
    assert found.groups["4-5226697808808137312"] == (0, 2, 4, 6)

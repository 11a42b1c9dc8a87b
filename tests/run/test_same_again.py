"""Running the same command twice gives the same bits."""

from __future__ import annotations

import pytest

from tests.run.launching import losses, run, tensors


@pytest.mark.parametrize("more", [[], ["deterministic=true"]], ids=["as it is", "deterministic"])
def test_the_same_command_gives_the_same_bits(tmp_path, more):
    first, second = (run(tmp_path / name, *more, steps=3) for name in ("first", "second"))
    assert tensors(first, 3) == tensors(second, 3)
    assert losses(first) == losses(second)


def test_another_seed_gives_others(tmp_path):
    first, second = (run(tmp_path / name, f"seed={name}", steps=1) for name in ("1", "2"))
    assert tensors(first, 1).keys() == tensors(second, 1).keys()
    assert losses(first) != losses(second)

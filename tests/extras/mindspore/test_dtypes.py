from __future__ import annotations

from launcher.extras.mindspore.ckpt import NAMES, SIZES


def test_every_dtype_has_a_size() -> None:
    assert SIZES.keys() == NAMES.keys()

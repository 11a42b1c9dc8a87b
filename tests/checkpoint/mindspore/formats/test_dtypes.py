from __future__ import annotations

from launcher.checkpoint.mindspore.formats.dtypes import NAMES, SIZES


def test_every_dtype_has_a_size() -> None:
    assert SIZES.keys() == NAMES.keys()

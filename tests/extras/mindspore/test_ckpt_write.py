from __future__ import annotations

from pathlib import Path

import pytest

from launcher.extras.mindspore.ckpt import NAMES, write_ckpt
from launcher.plan.values.tensor_spec import TensorSpec
from tests.extras.mindspore.truth import exactly


def test_dtypes_and_options_that_a_ckpt_file_cannot_store_are_refused(tmp_path: Path) -> None:
    told = f"w: a .ckpt file cannot store float8_e5m2; it stores {', '.join(NAMES)}"
    with pytest.raises(ValueError, match=exactly(told)):
        write_ckpt(tmp_path / "x", {"w": TensorSpec((1,), "float8_e5m2")}, lambda _: [b"1"])
    told = "a checksum (crc) and encryption: MindSpore cannot read a file with both; use one"
    with pytest.raises(ValueError, match=exactly(told)):
        write_ckpt(tmp_path / "x", {}, lambda _: [], crc=True, key=bytes(16))
    assert not (tmp_path / "x").exists()

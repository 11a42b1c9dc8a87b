"""The text file, split into training text and held-out text."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from launcher.data import text_files
from launcher.data.open import open_data
from launcher.job.schema.data import Text


def test_the_shipped_text_is_the_one_that_its_source_note_describes():
    data, note = (
        text_files.SHIPPED.read_bytes(),
        text_files.SHIPPED.with_name("SOURCE.md").read_text(encoding="utf-8"),
    )
    assert f"{len(data):,} bytes" in note
    assert sha256(data).hexdigest() in note
    assert set(data) <= {10, *range(32, 127)}
    assert not [w for w in (b" \n", b"\n\n\n", b"Gutenberg", b"opyright") if w in data]


def test_the_end_of_the_shipped_text_is_held_out():
    data = open_data(Text(name="text", seq_len=64), seed=0)
    whole = text_files.SHIPPED.read_bytes()
    assert (len(data.train), len(data.val)) == ((876_965 - 1) // 64, (97_440 - 1) // 64)
    assert data.decode(data.val.inputs(np.arange(1))[0][0].tolist()).encode() == whole[876_965 : 876_965 + 64]
    assert data.entropy == pytest.approx(3.3338, abs=1e-3)


def test_no_character_is_cut_in_two(tmp_path):
    text = "é\N{EURO SIGN}\U0001f600" * 5
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for tenths in range(11):
        parts = text_files.split(Text(name="text", path=str(tmp_path / "a.txt"), val_fraction=tenths / 10))
        assert "".join(p.tobytes().decode() for p in parts) == text

"""Data sets in idx form."""

from __future__ import annotations

import gzip
import io

import numpy as np
import pytest

from launcher.data.open import open_data
from launcher.job.schema.data import Idx
from tests.data.sample_files import write_idx


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_plain_and_gzipped(tmp_path, suffix):
    pixels, labels = write_idx(tmp_path, suffix)
    data = open_data(Idx(name="idx", root=str(tmp_path), size=8, channels=3), seed=0)
    assert (len(data.train), len(data.val)) == (6, 2)
    (x,) = data.train.inputs(np.arange(6))
    assert x.shape == (6, 3, 8, 8)
    np.testing.assert_allclose(x[:, 1, 2:6, 2:6], pixels / 127.5 - 1, rtol=0, atol=1e-6)
    assert data.train.targets(np.array([5, 0])).tolist() == labels[[5, 0]].tolist()


def test_the_plain_idx_file_goes_before_the_gzipped_one(tmp_path):
    write_idx(tmp_path, ".gz", seed=1)
    pixels, _ = write_idx(tmp_path, "", seed=2)
    data = open_data(Idx(name="idx", root=str(tmp_path), size=4), seed=0)
    assert isinstance(data.train.pixels, np.memmap)
    assert np.array_equal(data.train.pixels[:, 0], pixels)


def test_idx_gz_and_plain_hold_the_same(tmp_path):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    write_idx(plain, "")
    write_idx(packed, ".gz")
    for file in plain.iterdir():
        with gzip.open(packed / f"{file.name}.gz") as stream:
            assert io.BytesIO(stream.read()).getvalue() == file.read_bytes()

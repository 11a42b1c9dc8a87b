from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from launcher.checkpoint.tensorfile.safetensors import Blob
from launcher.plan.values.dtypes import ITEMSIZE

BAD_BLOBS = {
    "dtype": (("float8", (1,), b"a"), f"dtype float8 is unknown; supported dtypes: {', '.join(ITEMSIZE)}"),
    "length": (("float32", (2,), b"abc"), "a float32[2] tensor has 8 bytes, not 3"),
    "strided": (
        ("float64", (3, 2), np.zeros((2, 3)).T), "the data of a float64[3, 2] tensor is not contiguous: copy it first"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given_", "text"), BAD_BLOBS.values(), ids=BAD_BLOBS.keys())
def test_a_bad_blob_is_refused(given_: tuple[str, tuple[int, ...], Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Blob.of(*given_)
    assert str(caught.value) == text

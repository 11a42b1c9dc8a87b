from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from launcher.checkpoint.blob import Blob
from launcher.checkpoint.cast import cast, differing, exact
from launcher.plan.facts import TensorSpec
from tests.checkpoint.refusal import refusal

NAMES = ("bfloat16", "float16", "float32", "float64")


def blob(t: torch.Tensor) -> Blob:
    return Blob.of(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy())


def tensor(b: Blob) -> torch.Tensor:
    return torch.frombuffer(bytearray(b.data), dtype=getattr(torch, b.dtype)).reshape(b.shape)


@pytest.mark.parametrize("new", ["float32", "float64"])
@pytest.mark.parametrize("old", NAMES)
def test_every_number_becomes_what_torch_makes_of_it(tmp_path: Path, old: str, new: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)  # every number of 16 bits, NaN and infinity too
    t = bits.view(getattr(torch, old)) if old in NAMES[:2] else torch.randn(7, 11, dtype=getattr(torch, old))
    made = cast({"w": blob(t), "other": blob(t)}, {"w": new}, tmp_path / "file")
    torch.testing.assert_close(tensor(made["w"]), t.to(getattr(torch, new)), rtol=0, atol=0, equal_nan=True)
    assert isinstance(made["w"].data.obj, mmap.mmap), "it is on disk, however large"
    assert made["other"] == blob(t)
    back = tensor(made["w"]).to(t.dtype)
    assert exact(old, new) == torch.equal(back.nan_to_num(), t.nan_to_num())


def test_only_numbers_of_another_width_are_cast() -> None:
    there = {n: blob(torch.zeros(2, dtype=getattr(torch, n))) for n in (*NAMES, "float8_e4m3fn", "int64")}
    wanted = {n: TensorSpec((2,), "float32") for n in [*there, "absent"]}
    assert differing(there, wanted) == {n: "float32" for n in NAMES if n != "float32"}
    assert differing(there, {"float32": TensorSpec((2,), "int64")}) == {}


def test_a_number_too_large_for_its_new_dtype_is_refused(tmp_path: Path) -> None:
    t = torch.tensor([1.0, 1e39], dtype=torch.float64)
    text = "w: float64[2] has numbers that are too large for float32"
    assert refusal(lambda: cast({"w": blob(t)}, {"w": "float32"}, tmp_path / "file")) == text

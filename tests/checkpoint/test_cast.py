from __future__ import annotations

import pytest
import torch

from launcher.checkpoint.cast import Cast, cast_chunks, differing, exact
from launcher.checkpoint.full_tensors import Blobs, FullTensors, chunks
from launcher.checkpoint.tensorfile.safetensors import Blob
from launcher.plan.values.tensor_spec import TensorSpec
from tests.checkpoint.refusal import refusal

NAMES = ("bfloat16", "float16", "float32", "float64")


def blob(t: torch.Tensor) -> Blob:
    return Blob.of(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy())


def full_tensor(source: FullTensors, name: str) -> torch.Tensor:
    spec, data = source.specs[name], bytearray(b"".join(map(bytes, chunks(source, name))))
    return torch.frombuffer(data, dtype=getattr(torch, spec.dtype)).reshape(spec.shape)


@pytest.mark.parametrize("new", ["float32", "float64"])
@pytest.mark.parametrize("old", NAMES)
def test_every_number_becomes_what_torch_makes_of_it(old: str, new: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)  # every 16-bit value, including NaN and infinity
    t = bits.view(getattr(torch, old)) if old in NAMES[:2] else torch.randn(7, 11, dtype=getattr(torch, old))
    made = Cast(Blobs({"w": blob(t), "other": blob(t)}), {"w": new})
    torch.testing.assert_close(full_tensor(made, "w"), t.to(getattr(torch, new)), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(full_tensor(made, "other").view(torch.uint8), t.view(torch.uint8))
    back = full_tensor(made, "w").to(t.dtype)
    assert exact(old, new) == torch.equal(back.nan_to_num(), t.nan_to_num())


@pytest.mark.parametrize("new", NAMES)
@pytest.mark.parametrize("old", NAMES)
def test_casts_round_once_as_torch_does(old: str, new: str) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    ties = torch.arange(1.0, 2.0, 2.0**-12)  # half-way between neighbors of 8 and of 11 bits too
    t = torch.cat([halves[halves.abs() < 6e4], ties, -ties, torch.tensor([float("inf"), float("nan")])])
    t = t.to(getattr(torch, old))
    made = b"".join(map(bytes, cast_chunks("w", [memoryview(t.view(torch.uint8).numpy().tobytes())], old, new)))
    found = torch.frombuffer(bytearray(made), dtype=getattr(torch, new))
    torch.testing.assert_close(found, t.to(found.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("number", "new"), [(7e4, "float16"), (3.4e38, "bfloat16"), (1e39, "float32")])
def test_a_number_too_large_for_its_file_is_refused(number: float, new: str) -> None:
    data = memoryview(torch.tensor([1.0, number], dtype=torch.float64).view(torch.uint8).numpy().tobytes())
    text = f"w: float64 has numbers that are too large for {new}"
    assert refusal(lambda: list(cast_chunks("w", [data], "float64", new))) == text


def test_only_numbers_of_another_width_are_cast() -> None:
    there = {n: TensorSpec((2,), n) for n in (*NAMES, "float8_e4m3fn", "int64")}
    wanted = {n: TensorSpec((2,), "float32") for n in [*there, "absent"]}
    assert differing(there, wanted) == {n: "float32" for n in NAMES if n != "float32"}
    assert differing(there, {"float32": TensorSpec((2,), "int64")}) == {}


def test_a_number_too_large_for_its_new_dtype_is_refused() -> None:
    t = torch.tensor([1.0, 1e39], dtype=torch.float64)
    text = "w: float64[2] has numbers that are too large for float32"
    assert refusal(lambda: full_tensor(Cast(Blobs({"w": blob(t)}), {"w": "float32"}), "w")) == text

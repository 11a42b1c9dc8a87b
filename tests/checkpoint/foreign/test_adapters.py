"""Adapters are merged into their weights, as an export writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from launcher.checkpoint import Entry, Strategy, export
from launcher.checkpoint.foreign.lora_adapters import Adapters
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.checkpoint.saving import save

GRID = Grid.of(pp=1, dp_replicate=1, dp_shard=2, tp=1)
SHAPES = {
    "q.weight": (6, 4), "q.lora_A": (2, 4), "q.lora_B": (6, 2), "norm.weight": (4,), "norm.mean": (4,),
}  # fmt: skip


def saved(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    """A checkpoint on two shards whose frozen weights have ``dtype``, and its full tensors."""
    numbers = torch.Generator().manual_seed(0)
    entries, full, tensors = {}, {}, {}
    for name, shape in SHAPES.items():
        own = dtype if name in ("q.weight", "norm.weight") else "float32"
        split = (("dp_shard",), *((),) * (len(shape) - 1)) if name != "norm.mean" else ((),)
        layout = Layout(GRID, shape, split, (("pp", (0,)),))
        entries[name] = Entry(layout, own, "buffer" if name == "norm.mean" else "param")
        tensors[name] = torch.randn(shape, generator=numbers).to(getattr(torch, own))
        full[name] = tensors[name].view(torch.uint8).numpy().tobytes()
    save(folder, Strategy(GRID, entries), full)
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_merged_export_has_whole_sums_and_no_half_precision(dtype: str, tmp_path: Path) -> None:
    tensors = saved(tmp_path / "a", dtype)
    export(tmp_path / "a", tmp_path / "m.safetensors", adapters=Adapters(rank=2, alpha=6))
    got = safetensors.torch.load_file(tmp_path / "m.safetensors")
    q = tensors["q.weight"].float() + 3 * tensors["q.lora_B"] @ tensors["q.lora_A"]
    torch.testing.assert_close(got.pop("q.weight"), q, rtol=1e-6, atol=1e-6)
    assert got.keys() == {"norm.weight", "norm.mean"}
    assert all(t.dtype == torch.float32 and t.equal(tensors[n].float()) for n, t in got.items())


def test_without_adapters_to_add_each_tensor_is_written_as_it_is(tmp_path: Path) -> None:
    tensors: dict[str, Any] = saved(tmp_path / "a", "float16")
    export(tmp_path / "a", tmp_path / "m.safetensors")
    got = safetensors.numpy.load_file(tmp_path / "m.safetensors")
    assert got.keys() == SHAPES.keys()
    for name, t in got.items():
        np.testing.assert_array_equal(t, tensors[name].numpy())

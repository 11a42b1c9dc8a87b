"""Other programs' checkpoints are read one region at a time, without a full copy."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from launcher.checkpoint import Blob, import_full, verify
from launcher.checkpoint.box_bytes import box_index
from launcher.checkpoint.foreign.import_checkpoint import form_of, import_tensors, read_incoming
from launcher.checkpoint.full_tensors import FullTensors, chunks
from launcher.checkpoint.tensorfile.safetensors import words
from launcher.extras.mindspore.ckpt import write_ckpt
from launcher.extras.mindspore.merge_strategies import merged_file
from launcher.extras.mindspore.strategy_file import write_strategy
from launcher.plan.values.layout import Box
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, files, filled, write_file
from tests.extras.mindspore.small_net import net

TARGET = net(4, 2)
FULL = filled(TARGET)
BLOBS = {name: Blob.of("float32", entry.layout.shape, FULL[name]) for name, entry in TARGET.entries.items()}


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "pytorch_model.bin", "w.npz"])
def test_a_file_of_another_form_is_refused_and_a_pickle_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    way = "; a pickle is never loaded: write its state dict with save_file of safetensors.torch"
    text = f"{tmp_path / name}: neither a .safetensors nor a .ckpt file{way if name != 'w.npz' else ''}"
    assert refusal(lambda: form_of(tmp_path / name)) == text


def hugging_face(home: Path) -> FullTensors:
    write_file(home / "model.safetensors", BLOBS, {})
    return read_incoming(home).tensors


def torch_dcp(home: Path) -> FullTensors:
    state = {n: torch.frombuffer(bytearray(b.data), dtype=torch.float32).reshape(b.shape) for n, b in BLOBS.items()}
    state["emb.w"] = state["emb.w"].t().contiguous().t()  # its numbers are not adjacent in memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is only one process
        dcp.save(state, checkpoint_id=home / "dcp", no_dist=True)
    return read_incoming(home / "dcp").tensors


def mindspore_file(home: Path) -> FullTensors:
    write_ckpt(home / "a.ckpt", {n: b.spec for n, b in BLOBS.items()}, lambda n: [BLOBS[n].data], part=96)
    return read_incoming(home / "a.ckpt").tensors


def mindspore_ranks(home: Path) -> FullTensors:
    cut = net(2, 2)
    for rank in range(cut.grid.size):
        pieces = blobs_of_rank(cut, rank, FULL)
        (home / f"rank_{rank}").mkdir()
        path = home / f"rank_{rank}" / "net-1_1.ckpt"
        write_ckpt(path, {n: b.spec for n, b in pieces.items()}, lambda n, of=pieces: [of[n].data])  # type: ignore[misc]
    write_strategy(home / "merged.ckpt", merged_file(cut), "protobuf")
    return read_incoming(home, strategy=home / "merged.ckpt").tensors


FORMS = [hugging_face, torch_dcp, mindspore_file, mindspore_ranks]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_any_region_is_that_of_the_full_tensor(form: Any, tmp_path: Path) -> None:
    source = form(tmp_path)
    assert source.specs == {name: blob.spec for name, blob in BLOBS.items()}
    for name, blob in BLOBS.items():
        assert b"".join(map(bytes, chunks(source, name))) == blob.data
        part = Box(tuple(n // 3 for n in blob.shape), tuple(n - n // 4 for n in blob.shape))
        out = np.zeros(part.shape, "u4")
        source.fill(name, part, out)
        assert np.array_equal(out, words(blob.data, blob.spec)[box_index(part)])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_ranks_are_cut_straight_from_it_and_nothing_else_is_written(form: Any, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    opened: list[str] = []
    watch = [True]
    source = form(tmp_path / "src")
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if watch and written(event, args) else None)
    import_tensors(source, tmp_path / "a", TARGET, {"step": 0})
    watch.clear()  # an audit hook cannot be removed
    assert verify(tmp_path / "a") == []
    assert opened
    assert [path for path in opened if not path.startswith(f"{tmp_path}/.a.partial/")] == []
    import_full(BLOBS, tmp_path / "b", TARGET, {"step": 0})
    assert files(tmp_path / "a") == files(tmp_path / "b")


def written(event: str, args: Any) -> bool:
    """Whether a path is opened for writing: a descriptor that is reopened was opened by its path before."""
    return event == "open" and not isinstance(args[0], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR))

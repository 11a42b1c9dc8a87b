from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.checkpoint import Strategy, open_checkpoint, read_rank, single, target_strategy, transform, verify
from launcher.checkpoint.manifest import NoManifest
from launcher.checkpoint.tensorfile.disk import Unwritten
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import files, filled, save, small, strategies, tensors


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_there_and_back_is_the_same_bytes(data: st.DataObject) -> None:
    of = data.draw(tensors())
    a, b = data.draw(strategies(of)), data.draw(strategies(of))
    with TemporaryDirectory() as made:
        home = Path(made)
        save(home / "a", a, filled(a), {"step": 3, "note": "ä"})
        transform(home / "a", home / "b", b)
        transform(home / "b", home / "a2", a, workers=data.draw(st.integers(1, 4)))
        assert verify(home / "b") == []
        assert files(home / "a2") == files(home / "a")


def test_four_ranks_become_one_and_the_state_goes_along(tmp_path: Path) -> None:
    strategy = small()
    full = filled(strategy)
    save(tmp_path / "a", strategy, full, {"step": 7, "samples": 56})
    target = target_strategy(strategy, nproc=1, stages=1, shard_size=1)
    report = transform(tmp_path / "a", tmp_path / "one", target)
    one = open_checkpoint(tmp_path / "one")
    assert one.state == {"step": 7, "samples": 56}
    assert {n: bytes(b.data) for n, b in read_rank(one, single(strategy), 0).items()} == full
    assert report.files == 3  # model, optimizer, the strategy of one stage
    assert report.bytes_read == sum(map(len, full.values()))


@pytest.fixture
def src(tmp_path: Path) -> Path:
    save(tmp_path / "a", small(), filled(small()))
    return tmp_path / "a"


def test_a_destination_that_is_not_empty_is_refused(src: Path, tmp_path: Path) -> None:
    transform(src, tmp_path / "b", single(small()))
    before = files(tmp_path / "b")
    text = f"{tmp_path / 'b'}: the destination is not empty; give another, or set overwrite: true"
    assert refusal(lambda: transform(src, tmp_path / "b", small()), FileExistsError) == text
    assert files(tmp_path / "b") == before


def test_overwriting_replaces_a_whole_checkpoint(src: Path, tmp_path: Path) -> None:
    transform(src, tmp_path / "b", small())
    transform(src, tmp_path / "b", single(small()), overwrite=True)
    assert verify(tmp_path / "b") == []
    assert open_checkpoint(tmp_path / "b").manifest.world == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "latest"]


def test_a_folder_that_is_no_checkpoint_is_never_overwritten(src: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    text = f"{tmp_path / 'b'}: the destination is not empty and not a checkpoint, so it is never overwritten"
    assert refusal(lambda: transform(src, tmp_path / "b", small(), overwrite=True), FileExistsError) == text


def test_a_destination_that_is_a_file_is_refused(src: Path, tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    text = f"{tmp_path / 'b'}: the destination is a file, not a folder"
    assert refusal(lambda: transform(src, tmp_path / "b", small()), FileExistsError) == text


@pytest.mark.parametrize("below", [".", "out", ".."])
def test_a_destination_within_the_source_is_refused(src: Path, below: str) -> None:
    dst = src / below
    text = f"{dst}: the destination and the source {src} are the same folder, or one is in the other"
    assert refusal(lambda: transform(src, dst, small(), overwrite=True)) == text


def test_an_empty_folder_is_a_fine_destination(src: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    transform(src, tmp_path / "b", small())
    assert verify(tmp_path / "b") == []


def test_files_of_a_killed_transform_do_not_block_the_next_one(src: Path, tmp_path: Path) -> None:
    (tmp_path / ".b.partial" / "rank_9").mkdir(parents=True)
    transform(src, tmp_path / "b", small())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "latest"]


def test_a_target_of_other_tensors_is_refused_before_anything_is_written(src: Path, tmp_path: Path) -> None:
    target = small()
    entries = {n: replace(e, dtype="float16" if e.dtype == "bfloat16" else e.dtype) for n, e in target.entries.items()}
    assert refusal(lambda: transform(src, tmp_path / "b", Strategy(target.grid, entries))) == (
        "the strategies do not match:\n"
        "  layer.weight: bfloat16 in the source, float16 in the destination; dtypes cannot be changed here"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "latest"]


def test_a_file_that_contradicts_the_strategy_is_refused_before_anything_is_written(src: Path, tmp_path: Path) -> None:
    path = src / "rank_3" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"BF16", b"F16 "))
    text = f"{path}: tensor layer.weight has dtype F16 ; supported: "
    assert refusal(lambda: transform(src, tmp_path / "b", small())).startswith(text)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "latest"]


def test_an_incomplete_source_is_refused(src: Path, tmp_path: Path) -> None:
    (src / "manifest.json").unlink()
    text = f"{src}: incomplete checkpoint: it has no manifest.json, which is written last"
    assert refusal(lambda: transform(src, tmp_path / "b", small()), NoManifest) == text


def test_a_full_disk_leaves_nothing_behind(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    write = os.pwrite

    def full(fd: int, data: memoryview, at: int) -> int:
        if at > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr("launcher.checkpoint.tensorfile.disk.free", lambda path: 100)
    path = tmp_path / ".b.partial" / "rank_0" / "model.safetensors"
    size = (src / "rank_0" / "model.safetensors").stat().st_size
    text = f"{path}: No space left on device: the file needs {size} bytes, 100 are free"
    assert refusal(lambda: transform(src, tmp_path / "b", small()), Unwritten) == text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "latest"]

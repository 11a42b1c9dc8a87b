from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import xxhash

from launcher.checkpoint import export, open_checkpoint, read_extra, read_rank, single, transform, verify
from launcher.checkpoint.store import commit, partial
from launcher.checkpoint.tensorfile.safetensors import Blob, read_header
from launcher.checkpoint.write import write_rank
from tests.checkpoint.saving import edit, filled, save, small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "a", small(), filled(small()))
    return tmp_path / "a"


def flip(path: Path, name: str) -> str:
    """Change one bit of a tensor; returns the complaint to expect."""
    slot = read_header(path).entries[name]
    raw = bytearray(path.read_bytes())
    wanted = xxhash.xxh3_128_hexdigest(raw[slot.start : slot.stop])
    raw[slot.stop - 1] ^= 4
    path.write_bytes(raw)
    found = xxhash.xxh3_128_hexdigest(raw[slot.start : slot.stop])
    return f"{path}: tensor {name} is damaged: its digest is {found}, the manifest says {wanted}"


def test_verify_finds_no_problem_in_an_undamaged_checkpoint(folder: Path) -> None:
    assert verify(folder) == []


def test_every_flipped_bit_is_named(folder: Path) -> None:
    texts = [
        flip(folder / "rank_0" / "optimizer.safetensors", "optim.step"),
        flip(folder / "rank_2" / "model.safetensors", "layer.weight"),
    ]
    assert verify(folder) == texts


def test_reading_transforming_and_exporting_detect_a_flipped_bit(folder: Path, tmp_path: Path) -> None:
    text = flip(folder / "rank_2" / "model.safetensors", "layer.weight")
    for read in (
        lambda: read_rank(open_checkpoint(folder), single(small()), 0),
        lambda: transform(folder, tmp_path / "b", single(small())),
        lambda: export(folder, tmp_path / "b"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            read()
        assert str(caught.value) == text
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("b")] == []


def test_a_rank_that_does_not_need_the_damaged_piece_does_not_mind(folder: Path) -> None:
    flip(folder / "rank_2" / "model.safetensors", "layer.weight")
    assert read_rank(open_checkpoint(folder), small(), 0).keys() == small().entries_of(0).keys()


def test_verification_can_be_left_out(folder: Path) -> None:
    flip(folder / "rank_2" / "model.safetensors", "layer.weight")
    assert len(read_rank(open_checkpoint(folder), single(small()), 0, verify=False)) == 5


def test_a_flipped_bit_in_a_random_state_is_named(tmp_path: Path) -> None:
    strategy = single(small())
    tensors = {n: Blob.of(e.dtype, e.layout.shape, filled(strategy)[n]) for n, e in strategy.entries.items()}
    record = write_rank(partial(tmp_path / "a"), 0, strategy, tensors, {"rng": Blob.of("uint8", (2,), b"ab")})
    commit(partial(tmp_path / "a"), tmp_path / "a", [record], {})
    text = flip(tmp_path / "a" / "rank_0" / "extra.safetensors", "rng")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_extra(open_checkpoint(tmp_path / "a"), 0)
    assert str(caught.value) == text


def test_swapped_rank_files_are_named(folder: Path) -> None:
    a, b = (folder / f"rank_{r}" / "model.safetensors" for r in (0, 1))
    assert a.stat().st_size == b.stat().st_size
    shutil.move(a, folder / "aside")
    shutil.move(b, a)
    shutil.move(folder / "aside", b)
    assert verify(folder) == [
        f"{a}: a file of another rank or layout: it says rank 1, not 0",
        f"{b}: a file of another rank or layout: it says rank 0, not 1",
    ]
    with pytest.raises(ValueError, match="a file of another rank or layout: it says rank 1, not 0"):
        read_rank(open_checkpoint(folder), small(), 0)


def test_a_file_of_another_checkpoint_of_the_same_layout_is_named(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "b", small(), filled(small(), 1))
    shutil.copy(tmp_path / "b" / "rank_1" / "model.safetensors", folder / "rank_1" / "model.safetensors")
    (text,) = verify(folder)
    assert text.startswith(f"{folder / 'rank_1' / 'model.safetensors'}: tensor embed.weight is damaged: its digest is ")


def test_a_stale_rank_and_any_other_stray_is_named(folder: Path) -> None:
    shutil.copytree(folder / "rank_0", folder / "rank_7")
    (folder / "notes.txt").touch()
    assert verify(folder) == [
        f"{folder / stray}: not part of this checkpoint: the manifest does not list it"
        for stray in ("notes.txt", "rank_7/model.safetensors", "rank_7/optimizer.safetensors")
    ]


def test_a_changed_header_is_named(folder: Path) -> None:
    path = folder / "rank_2" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"layer.mean", b"layer.lean"))
    assert verify(folder) == [f"{path}: its header is not the one that the manifest describes"]


def test_an_incomplete_checkpoint_is_one_problem(folder: Path) -> None:
    (folder / "rank_2" / "model.safetensors").unlink()
    assert verify(folder) == [f"{folder}: incomplete checkpoint: rank_2/model.safetensors is missing"]


def test_a_file_that_the_manifest_forgets_is_named(folder: Path) -> None:
    edit(folder, lambda d: d["files"].pop("rank_2/model.safetensors"))
    assert verify(folder) == [
        f"{folder}/manifest.json: it does not list rank_2/model.safetensors, which this checkpoint should have"
    ]

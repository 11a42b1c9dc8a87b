"""The small files of a checkpoint: with one flipped bit, a file is refused or still means the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint import Blob, commit, latest, open_checkpoint, partial, read_extra, step_folder, write_rank
from launcher.checkpoint.layout.strategy import single
from launcher.checkpoint.manifest import parse_manifest
from launcher.checkpoint.tensorfile.disk import LONGEST_FILE
from launcher.untrusted.files import RefusedFile
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, edit, filled, small

MASKS = (1, 2, 4, 8, 16, 32, 64, 128, 3, 0x55)


def streams(rank: int) -> dict[str, Blob]:
    return {"rng.cpu": Blob.of("uint8", (3,), bytes([rank] * 3))}


def saved(home: Path, step: int = 4, one: bool = False) -> Path:
    """A checkpoint with the random state of each rank; ``one``: of a single rank."""
    strategy, final = single(small()) if one else small(), step_folder(home, step)
    full = filled(strategy)
    records = [
        write_rank(partial(final), r, strategy, blobs_of_rank(strategy, r, full), streams(r))
        for r in range(strategy.grid.size)
    ]
    commit(partial(final), final, records, {"step": step})
    return final


def flipped(path: Path, read: Callable[[], Any]) -> tuple[int, int]:
    """How many changes of single bytes are refused, and how many are read as the original. There is no third case."""
    good, said = path.read_bytes(), read()
    refused = same = 0
    for at in range(len(good)):
        for mask in MASKS:
            path.write_bytes(good[:at] + bytes([good[at] ^ mask]) + good[at + 1 :])
            try:
                found = read()
            except ValueError as error:
                refused += str(path.parent) in str(error)
            else:
                assert found == said, (at, mask, good[max(0, at - 30) : at + 30])
                same += 1
    path.write_bytes(good)
    assert refused + same == len(good) * len(MASKS)
    return refused, same


def test_every_flipped_bit_of_a_manifest_is_refused_or_says_the_same(tmp_path: Path) -> None:
    folder = saved(tmp_path, one=True)
    refused, same = flipped(folder / "manifest.json", lambda: parse_manifest(folder))
    assert refused > 10 * same > 0  # one blank may become another one


def test_every_flipped_bit_of_latest_is_refused_or_says_the_same(tmp_path: Path) -> None:
    for step in (9, 6, 4, 5, 7):  # many names that a bit leads to; step 9 is older
        saved(tmp_path, step, one=True)
    assert latest(tmp_path) == step_folder(tmp_path, 7)
    refused, same = flipped(tmp_path / "latest", lambda: latest(tmp_path))
    assert (refused > 500, same) == (True, 0)


@pytest.mark.parametrize("name", ["state.json", "strategy/stage0.json"])
def test_every_changed_byte_of_the_other_texts_is_refused(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, one=True)
    path = folder / name
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert str(folder) in refusal(lambda: open_checkpoint(folder))


DOUBLED = {
    "at the top": ('"world": 4,', '"world": 4, "world": 4,', "world is listed twice"),
    "a file": ('"files": {', '"files": {"state.json": {"size": 1},', "state.json is listed twice"),
    "in a file": ('"size": 10,', '"size": 10, "size": 10,', "size is listed twice"),
    "a tensor": ('"embed.weight": ', '"embed.weight": "", "embed.weight": ', "embed.weight is listed twice"),
}


@pytest.mark.parametrize(("old", "new", "why"), DOUBLED.values(), ids=DOUBLED)
def test_a_key_that_is_there_twice_is_refused_at_every_depth(tmp_path: Path, old: str, new: str, why: str) -> None:
    folder = saved(tmp_path)
    path = folder / "manifest.json"
    text = path.read_text().replace(f'"size": {(folder / "state.json").stat().st_size},', '"size": 10,')
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert refusal(lambda: open_checkpoint(folder)) == f"{path}: {why}"


@pytest.mark.parametrize(
    "name", ["rank_1/extra.safetensors", "rank_2/optimizer.safetensors", "strategy/stage1.json", "state.json"]
)
def test_a_file_that_is_not_listed_is_missed(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    assert {n: b.data.tobytes() for n, b in read_extra(open_checkpoint(folder), 1).items()} == {"rng.cpu": b"\1\1\1"}
    edit(folder, lambda d: d["files"].pop(name))
    text = f"{folder}/manifest.json: it does not list {name}, which this checkpoint should have"
    if name.startswith("strategy"):
        text = f"{folder}: its strategy files are not those that the manifest describes"
    assert refusal(lambda: open_checkpoint(folder)) == text


def test_a_file_that_no_rank_has_is_not_listed(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "rank_4").mkdir()
    (folder / "rank_4/extra.safetensors").write_bytes((folder / "rank_1/extra.safetensors").read_bytes())
    edit(folder, lambda d: d["files"].update({"rank_4/extra.safetensors": d["files"]["rank_1/extra.safetensors"]}))
    text = f"{folder}/manifest.json: it lists rank_4/extra.safetensors, which is not a file of this checkpoint"
    assert refusal(lambda: open_checkpoint(folder)) == text


def test_extra_tensors_of_some_ranks_are_not_committed(tmp_path: Path) -> None:
    strategy, new = small(), partial(step_folder(tmp_path, 1))
    full = filled(strategy)
    records = [
        write_rank(new, r, strategy, blobs_of_rank(strategy, r, full), streams(r) if r else {}) for r in range(4)
    ]
    text = f"{new}: all ranks must have extra tensors, or none: rank 0 and rank 1 differ"
    assert refusal(lambda: commit(new, step_folder(tmp_path, 1), records, {"step": 1})) == text


def test_a_manifest_of_the_version_before_is_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / "manifest.json"
    before = json.loads(path.read_text()) | {"version": 1}
    del before["digest"]
    path.write_text(json.dumps(before))
    assert open_checkpoint(folder).state == {"step": 4}
    path.write_text(json.dumps(before | {"digest": "0" * 64}))
    assert refusal(lambda: open_checkpoint(folder)) == (
        f"{path}: a field is missing or of the wrong type: digest is not known"
    )


def test_a_manifest_without_end_is_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / "manifest.json"
    os.truncate(path, 6 << 30)
    text = f"{path}: {6 << 30} bytes; at most {LONGEST_FILE} are read"
    assert refusal(lambda: open_checkpoint(folder), RefusedFile) == text


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "state.json", "strategy/stage0.json", "strategy/stage7.json", "rank_0/extra.safetensors"],
)
def test_a_pipe_in_the_place_of_a_file_blocks_nobody(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    text, kind = f"{folder}: incomplete checkpoint: {name} is missing", ValueError
    if name == "manifest.json":
        text, kind = f"{path}: a named pipe, not a regular file", RefusedFile
    if name == "strategy/stage7.json":
        text = f"{folder}: its strategy files are not those that the manifest describes"
    assert refusal(lambda: open_checkpoint(folder), kind) == text
    assert latest(tmp_path) == (folder if name == "strategy/stage7.json" else None)


def test_an_incomplete_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    file = folder / "rank_0" / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-2])
    text = f"rank_0/model.safetensors has {size - 2} bytes, manifest.json says {size}"
    assert refusal(lambda: open_checkpoint(folder)) == f"{folder}: incomplete checkpoint: {text}"
    file.unlink()
    text = "rank_0/model.safetensors is missing"
    assert refusal(lambda: open_checkpoint(folder)) == f"{folder}: incomplete checkpoint: {text}"
    shutil.rmtree(folder)
    assert refusal(lambda: open_checkpoint(folder)) == f"{folder}: no checkpoint: no such folder"


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "format": (lambda d: d.pop("format"), 'not a checkpoint manifest: "format" is not "launcher.checkpoint"'),
    "version": (lambda d: d.update(version=3), "version 3; this launcher reads versions 1 and 2"),
    "field": (lambda d: d.pop("world"), "a field is missing or of the wrong type: world is missing"),
    "another field": (lambda d: d.update(wrld=4), "a field is missing or of the wrong type: wrld is not known"),
    "type": (lambda d: d.update(world=True), "a field is missing or of the wrong type: bool is not a whole number"),
    "value": (lambda d: d.update(world=5), "damaged: its digest does not match its content"),
    "escape": (
        lambda d: d["files"].update({"../x": d["files"]["state.json"]}), "../x is not the name of a checkpoint file"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "text"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_bad_manifest_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], text: str) -> None:
    folder = saved(tmp_path, 1)
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    assert refusal(lambda: open_checkpoint(folder)) == f"{path}: {text}"


def test_a_manifest_that_is_no_json_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    (folder / "manifest.json").write_text("{")
    assert refusal(lambda: open_checkpoint(folder)) == f"{folder / 'manifest.json'}: not JSON"

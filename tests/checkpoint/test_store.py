from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint import (
    Blob,
    commit,
    latest,
    open_checkpoint,
    partial,
    prune,
    read_box,
    read_extra,
    read_rank,
    step_folder,
    verify,
    write_rank,
)
from launcher.checkpoint.tensorfile.durable import publish
from launcher.plan.values.layout import Box
from tests.checkpoint.saving import files, filled, held, save, small


def saved(home: Path, *steps: int) -> list[Path]:
    for step in steps:
        save(step_folder(home, step), small(), filled(small(), step), {"step": step})
    return [step_folder(home, step) for step in steps]


def refusal(act: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def test_a_checkpoint_folder_holds_these_files(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 100)
    assert folder.name == "step-000100"
    assert sorted(files(folder)) == [
        "manifest.json",
        *(f"rank_{r}/{kind}.safetensors" for r in range(4) for kind in ("model", "optimizer")),
        "state.json",
        "strategy/stage0.json",
        "strategy/stage1.json",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000100"]
    digest = hashlib.sha256(b"step-000100\n").hexdigest()
    assert (tmp_path / "latest").read_text() == f"step-000100\nsha256 {digest}\n"


def test_a_rank_that_never_came_leaves_a_folder_that_does_not_count(tmp_path: Path) -> None:
    (one,) = saved(tmp_path, 1)
    strategy, new = small(), step_folder(tmp_path, 2)
    write_rank(partial(new), 0, strategy, held(strategy, 0, filled(strategy)))
    assert latest(tmp_path) == one
    text = "incomplete checkpoint: it has no manifest.json, which is written last"
    assert refusal(lambda: open_checkpoint(partial(new))) == f"{partial(new)}: {text}"


def test_what_an_interrupted_attempt_left_is_swept_out(tmp_path: Path) -> None:
    new = step_folder(tmp_path, 2)
    for stray in ("rank_9/model.safetensors", "rank_0/old.safetensors", "manifest.json"):
        (partial(new) / stray).parent.mkdir(parents=True, exist_ok=True)
        (partial(new) / stray).write_text("{}")
    saved(tmp_path, 2)
    assert verify(new) == []
    assert sorted(p.name for p in new.iterdir() if p.is_dir()) == ["rank_0", "rank_1", "rank_2", "rank_3", "strategy"]


def test_the_latest_is_the_last_one_committed(tmp_path: Path) -> None:
    one, two = saved(tmp_path, 1, 2)
    assert latest(tmp_path) == two
    saved(tmp_path, 1)  # the run went on from an earlier step
    assert latest(tmp_path) == one


@pytest.mark.parametrize("damage", ["manifest", "file", "size", "folder"])
def test_an_incomplete_latest_gives_way_to_the_highest_complete_step(tmp_path: Path, damage: str) -> None:
    _, two, three = saved(tmp_path, 1, 2, 3)
    if damage == "manifest":
        (three / "manifest.json").unlink()
    elif damage == "file":
        (three / "rank_2" / "model.safetensors").unlink()
    elif damage == "size":
        (three / "rank_2" / "model.safetensors").write_bytes(b"")
    else:
        shutil.rmtree(three)
    assert latest(tmp_path) == two


def test_without_any_complete_checkpoint_there_is_no_latest(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    step_folder(tmp_path, 1).mkdir()
    (tmp_path / "latest").write_text("../elsewhere\n")
    assert latest(tmp_path) is None


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    (one,) = saved(tmp_path, 1)
    full = filled(small(), 99)
    save(one, small(), full, {"step": 1})
    got = read_rank(open_checkpoint(one), small(), 0)
    assert got == held(small(), 0, full)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]


def test_where_folders_cannot_be_swapped_the_old_one_steps_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    monkeypatch.setattr("launcher.checkpoint.tensorfile.durable._swapped", lambda a, b: False)
    publish(tmp_path / "new", tmp_path / "old")
    assert files(tmp_path) == {"old/new": b""}


def test_prune_keeps_the_newest_and_never_the_incomplete_instead(tmp_path: Path) -> None:
    steps = saved(tmp_path, 1, 2, 3, 4)
    (steps[2] / "manifest.json").unlink()
    (tmp_path / "step-000000.trash").mkdir()  # of a run that was killed while deleting
    assert prune(tmp_path, 2) == (steps[0],)
    assert [p.exists() for p in steps] == [False, True, True, True]
    assert not (tmp_path / "step-000000.trash").exists()


def test_prune_never_deletes_the_one_just_written(tmp_path: Path) -> None:
    eight, nine, one = saved(tmp_path, 8, 9, 1)
    assert prune(tmp_path, 1) == (nine, eight)
    assert one.exists()


def test_prune_keeps_at_least_one(tmp_path: Path) -> None:
    text = "keep: 0 would delete the checkpoint just written; keep at least 1"
    assert refusal(lambda: prune(tmp_path, 0)) == text


def test_random_states_come_back_to_the_rank_that_saved_them(tmp_path: Path) -> None:
    strategy, final = small(), step_folder(tmp_path, 1)
    full = filled(strategy)
    records = [
        write_rank(
            partial(final), r, strategy, held(strategy, r, full), {"rng": Blob.of("uint8", (3,), bytes([r] * 3))}
        )
        for r in range(4)
    ]
    commit(partial(final), final, records, {})
    checkpoint = open_checkpoint(final)
    assert [bytes(read_extra(checkpoint, r)["rng"].data) for r in range(4)] == [bytes([r] * 3) for r in range(4)]
    assert verify(final) == []


def test_without_random_states_there_are_none(tmp_path: Path) -> None:
    assert read_extra(open_checkpoint(saved(tmp_path, 1)[0]), 0) == {}


def test_a_rank_saves_all_its_pieces_at_their_shapes_and_nothing_else(tmp_path: Path) -> None:
    strategy = small()
    given = held(strategy, 2, filled(strategy))
    given["other"] = given.pop("layer.mean")
    given["layer.weight"] = Blob.of("float16", (3, 2), bytes(12))
    assert refusal(lambda: write_rank(tmp_path / "a", 2, strategy, given)) == (
        "rank 2 cannot be saved:\n"
        "  the strategy has it here, it was not given: layer.mean\n"
        "  given, but the strategy does not have it here: other\n"
        "  layer.weight: float16[3, 2] was given, its piece is bfloat16[3, 3]"
    )
    assert not (tmp_path / "a").exists()


def test_a_rank_out_of_the_world_is_refused(tmp_path: Path) -> None:
    text = "rank 4 is not in the strategy's world of 4"
    (folder,) = saved(tmp_path, 1)
    assert refusal(lambda: write_rank(tmp_path / "a", 4, small(), {})) == text
    assert refusal(lambda: read_rank(open_checkpoint(folder), small(), 4)) == text


def test_a_commit_needs_every_rank_once(tmp_path: Path) -> None:
    strategy, final = small(), step_folder(tmp_path, 1)
    record = write_rank(partial(final), 1, strategy, held(strategy, 1, filled(strategy)))
    assert refusal(lambda: commit(partial(final), final, [record], {})) == (
        f"{partial(final)}: not one record of each rank under one strategy: rank 1 of 4 ({strategy.digest[:8]})"
    )
    assert latest(tmp_path) is None


def test_a_commit_notices_a_file_that_changed_since_its_rank_wrote_it(tmp_path: Path) -> None:
    strategy, final = small(), step_folder(tmp_path, 1)
    full = filled(strategy)
    records = [write_rank(partial(final), r, strategy, held(strategy, r, full)) for r in range(4)]
    path = partial(final) / "rank_3" / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"x")
    text = f"rank_3/model.safetensors has {size + 1} bytes, its rank wrote {size}"
    assert refusal(lambda: commit(partial(final), final, records, {})) == f"{partial(final)}: {text}"
    assert not final.exists()


def test_an_unknown_tensor_cannot_be_read(tmp_path: Path) -> None:

    (folder,) = saved(tmp_path, 1)
    text = f"{folder}: it has no tensor other"
    assert refusal(lambda: read_box(open_checkpoint(folder), "other", Box((), ()))) == text


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))


def test_an_incomplete_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 1)
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
    "type": (lambda d: d.update(world=True), "a field is missing or of the wrong type: bool is no whole number"),
    "value": (lambda d: d.update(world=5), "damaged: its digest is not that of what it says"),
    "escape": (
        lambda d: d["files"].update({"../x": d["files"]["state.json"]}), "../x is not the name of a checkpoint file"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "text"), MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_bad_manifest_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], text: str) -> None:
    (folder,) = saved(tmp_path, 1)
    edit_manifest(folder, change)
    assert refusal(lambda: open_checkpoint(folder)) == f"{folder / 'manifest.json'}: {text}"


def test_a_manifest_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 1)
    (folder / "manifest.json").write_text("{")
    assert refusal(lambda: open_checkpoint(folder)) == f"{folder / 'manifest.json'}: no JSON"


def test_a_state_that_was_edited_is_refused(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 1)
    (folder / "state.json").write_text((folder / "state.json").read_text().replace("1", "2"))
    text = "damaged: its digest is not the one in the manifest"
    assert refusal(lambda: open_checkpoint(folder)) == f"{folder / 'state.json'}: {text}"


def test_a_strategy_that_was_edited_is_refused(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 1)
    path = folder / "strategy" / "stage1.json"
    path.write_text(path.read_text().replace("[5, 3]", "[4, 3]"))
    text = "its strategy files are not those that the manifest was written with"
    assert refusal(lambda: open_checkpoint(folder)) == f"{folder}: {text}"

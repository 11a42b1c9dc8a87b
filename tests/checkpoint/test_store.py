from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from launcher.checkpoint import (
    commit,
    latest,
    open_checkpoint,
    partial,
    prune,
    read_rank,
    step_folder,
    verify,
    write_rank,
)
from launcher.checkpoint.manifest import NoManifest
from launcher.checkpoint.tensorfile.disk import publish
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import blobs_of_rank, files, filled, save, small


def saved(home: Path, *steps: int) -> list[Path]:
    for step in steps:
        save(step_folder(home, step), small(), filled(small(), step), {"step": step})
    return [step_folder(home, step) for step in steps]


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


def test_a_folder_in_which_a_rank_is_missing_is_not_a_checkpoint(tmp_path: Path) -> None:
    (one,) = saved(tmp_path, 1)
    strategy, new = small(), step_folder(tmp_path, 2)
    write_rank(partial(new), 0, strategy, blobs_of_rank(strategy, 0, filled(strategy)))
    assert latest(tmp_path) == one
    text = "incomplete checkpoint: it has no manifest.json, which is written last"
    assert refusal(lambda: open_checkpoint(partial(new)), NoManifest) == f"{partial(new)}: {text}"


def test_files_of_an_interrupted_save_are_removed(tmp_path: Path) -> None:
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
    saved(tmp_path, 1)  # the run was resumed from an earlier step
    assert latest(tmp_path) == one


@pytest.mark.parametrize("damage", ["manifest", "file", "size", "folder"])
def test_an_incomplete_newest_checkpoint_is_skipped(tmp_path: Path, damage: str) -> None:
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
    assert got == blobs_of_rank(small(), 0, full)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]


def test_saving_a_step_again_keeps_an_incomplete_checkpoint_under_another_name(tmp_path: Path) -> None:
    (folder,) = saved(tmp_path, 2)
    (folder / "state.json").write_text("{")
    saved(tmp_path, 2)
    assert verify(folder) == []
    assert (tmp_path / "replaced-step-000002" / "state.json").read_text() == "{"


def test_where_folders_cannot_be_swapped_the_old_one_steps_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    monkeypatch.setattr("launcher.checkpoint.tensorfile.disk._swapped", lambda a, b: False)
    publish(tmp_path / "new", tmp_path / "old")
    assert files(tmp_path) == {"old/new": b""}


def test_prune_keeps_the_newest_and_never_the_incomplete_instead(tmp_path: Path) -> None:
    steps = saved(tmp_path, 1, 2, 3, 4)
    (steps[2] / "manifest.json").unlink()
    (tmp_path / "step-000000.trash").mkdir()  # from a run that was killed while it deleted
    assert prune(tmp_path, 2) == (steps[0],)
    assert [p.exists() for p in steps] == [False, True, True, True]
    assert not (tmp_path / "step-000000.trash").exists()


def test_prune_never_deletes_the_one_just_written(tmp_path: Path) -> None:
    eight, nine, one = saved(tmp_path, 8, 9, 1)
    assert prune(tmp_path, 1) == (nine, eight)
    assert one.exists()


def test_prune_and_commit_leave_the_checkpoints_of_another_training(tmp_path: Path) -> None:
    def commit_of(training: str, *steps: int) -> None:
        for step in steps:
            save(step_folder(tmp_path, step), small(), filled(small(), step), {"step": step, "training": training})

    commit_of("first", 1, 2, 3, 5)
    commit_of("second", 2, 4)
    assert prune(tmp_path, 1) == (step_folder(tmp_path, 2),)
    commit_of("third", 1)
    commit_of("fourth", 1)
    assert prune(tmp_path, 1) == ()
    names = [
        "latest",
        *(f"replaced-step-00000{n}" for n in ("1", "1-2", "2")),
        *(f"step-00000{n}" for n in (1, 3, 4, 5)),
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert open_checkpoint(tmp_path / "replaced-step-000002").state["training"] == "first"


def test_prune_keeps_at_least_one(tmp_path: Path) -> None:
    text = "keep: 0 would delete the checkpoint just written; keep at least 1"
    assert refusal(lambda: prune(tmp_path, 0)) == text


def test_a_commit_needs_every_rank_once(tmp_path: Path) -> None:
    strategy, final = small(), step_folder(tmp_path, 1)
    record = write_rank(partial(final), 1, strategy, blobs_of_rank(strategy, 1, filled(strategy)))
    assert refusal(lambda: commit(partial(final), final, [record], {})) == (
        f"{partial(final)}: every rank must have one record, all of one strategy: rank 1 of 4 ({strategy.digest[:8]})"
    )
    assert latest(tmp_path) is None


def test_a_commit_notices_a_file_that_changed_since_its_rank_wrote_it(tmp_path: Path) -> None:
    strategy, final = small(), step_folder(tmp_path, 1)
    full = filled(strategy)
    records = [write_rank(partial(final), r, strategy, blobs_of_rank(strategy, r, full)) for r in range(4)]
    path = partial(final) / "rank_3" / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"x")
    text = f"rank_3/model.safetensors has {size + 1} bytes, its rank wrote {size}"
    assert refusal(lambda: commit(partial(final), final, records, {})) == f"{partial(final)}: {text}"
    assert not final.exists()

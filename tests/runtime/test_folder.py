"""Every run has its own folder."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import pytest

from launcher.errors import Problem, RequestError
from launcher.runtime import run_folder
from launcher.untrusted.files import LINK
from tests.ranks import on_ranks


def test_runs_are_numbered(tmp_path):
    assert [run_folder.make(tmp_path / "runs", "lm") for _ in range(3)] == [
        tmp_path / "runs" / "lm" / number for number in ("0001", "0002", "0003")
    ]


def test_runs_that_start_at_once_get_a_folder_each(tmp_path):
    def work(world) -> list[Path]:
        return [run_folder.make(tmp_path, "lm") for _ in range(20)]

    made = [path for paths in on_ranks(4, work) for path in paths]
    assert sorted(p.name for p in made) == [f"{n:04d}" for n in range(1, 81)]


def test_latest_points_to_the_newest(tmp_path):
    run_folder.make(tmp_path, "lm")
    newest = run_folder.make(tmp_path, "lm")
    assert os.readlink(tmp_path / "lm" / "latest") == "0002"
    assert (tmp_path / "lm" / "latest").resolve() == newest.resolve()


def test_latest_that_cannot_be_set_is_said(tmp_path, caplog):
    (tmp_path / "lm" / "latest").mkdir(parents=True)
    assert run_folder.make(tmp_path, "lm") == tmp_path / "lm" / "0001"
    assert [r.getMessage() for r in caplog.records] == [f"{tmp_path}/lm/latest does not point to 0001: Is a directory"]
    assert sorted(p.name for p in (tmp_path / "lm").iterdir()) == ["0001", "latest"]


def test_a_place_that_cannot_be_written_is_a_bad_request(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RequestError) as caught:
        run_folder.make(tmp_path / "file" / "runs", "lm")
    assert str(caught.value) == (
        f"runs: a run folder cannot be made at {tmp_path}/file/runs: {tmp_path}/file/runs/lm: Not a directory"
    )


def test_a_run_dir_that_is_a_file_is_a_bad_request(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RequestError) as caught:
        run_folder.reopen(tmp_path / "file")
    assert str(caught.value) == (
        f"run_dir: a run folder cannot be made at {tmp_path}/file: {tmp_path}/file: File exists"
    )


def test_reopen_keeps_what_is_there(tmp_path):
    run = run_folder.make(tmp_path, "lm")
    run_folder.write_status(run, state="failed")
    assert run_folder.read_status(run_folder.reopen(run)) == {"state": "failed"}


def test_checking_writes_nothing(tmp_path):
    assert run_folder.check_writable(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []


def test_checking_names_the_obstacle(tmp_path):
    (tmp_path / "file").touch()
    assert run_folder.check_writable(tmp_path / "file" / "runs") == Problem(
        "runs",
        f"a run folder cannot be made at {tmp_path}/file/runs: {tmp_path}/file is not a folder",
    )


def test_commands_are_kept_to_paste(tmp_path):
    run_folder.write_command(tmp_path, ["python", "-m", "launcher", "steps=[train, save]"])
    run_folder.write_command(tmp_path, ["python", "-m", "launcher", "run_dir=x"])
    assert (tmp_path / "command.txt").read_text() == (
        "python -m launcher 'steps=[train, save]'\npython -m launcher run_dir=x\n"
    )


def test_a_status_is_replaced_whole(tmp_path):
    assert run_folder.read_status(tmp_path) is None
    run_folder.write_status(tmp_path, state="running", attempt=0)
    run_folder.write_status(tmp_path, state="done")
    assert run_folder.read_status(tmp_path) == {"state": "done"}
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_every_flipped_bit_of_a_status_is_refused_or_says_the_same(tmp_path):
    said = {"status": "running", "metrics": {"loss": 1.5, "val": math.nan}, "steps": ("train", "save"), "job": "a 1"}
    run_folder.write_status(tmp_path, **said)
    path = tmp_path / "status.json"
    good, meant = path.read_bytes(), str(said | {"steps": ["train", "save"]})
    text = f"run_dir: {path}: damaged: it does not say which steps are done; remove the file to run all of them again"
    same = 0
    for at, bit in itertools.product(range(len(good)), range(8)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        try:
            found = run_folder.read_status(tmp_path)
        except RequestError as error:
            same += str(error) != text
        else:
            assert str(found) == meant, (at, bit)
            same += 1
    assert same == 0


def test_a_status_that_is_a_link_is_not_read(tmp_path):
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    run.mkdir()
    theirs.write_text('{"status": "done"}')
    (run / "status.json").symlink_to(theirs)
    with pytest.raises(RequestError) as caught:
        run_folder.read_status(run)
    assert str(caught.value) == f"run_dir: {run / 'status.json'}: {LINK}"


def test_a_status_of_the_version_before_is_read(tmp_path):
    (tmp_path / "status.json").write_text('{"status": "done", "steps": []}')
    assert run_folder.read_status(tmp_path) == {"status": "done", "steps": []}


def test_a_folder_of_a_run_is_not_that_of_the_machine_or_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    rest = "a run writes its files into a folder of its own"
    for path, kind in (("/", "the root folder"), (f"{tmp_path}/x/..", "your home folder")):
        (tmp_path / "x").mkdir(exist_ok=True)
        assert run_folder.check_own_folder(Path(path)) == Problem("run_dir", f"{path}: is {kind}; {rest}")
    assert run_folder.check_own_folder(tmp_path / "x") is None

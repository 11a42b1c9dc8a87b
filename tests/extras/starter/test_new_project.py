"""``launcher init FOLDER`` writes a project that runs unchanged, or writes nothing."""

from __future__ import annotations

import csv
import os
import re
from contextlib import chdir
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.extras.starter import new_project
from launcher.job.schema.paths import local
from tests.pages import shell
from tests.run.launching import losses, status

FILES = ["README.md", "my_data.py", "my_model.py", "train.yaml"]
REFUSED = "error: 1 problem in this request; nothing was started\n\n  "


def names(folder: Path) -> list[str]:
    return sorted(
        p.name for p in folder.iterdir() if p.name != "__pycache__"
    )  # without the cache of the user's modules


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["init", *words]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith(REFUSED)
    return out.err.removeprefix(REFUSED)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "mine"
    assert main(["init", str(folder)]) == 0
    return folder


def command(project: Path, part: str) -> str:
    """Return the one command of the README that contains ``part``, without its comment."""
    lines = [line for line in (project / "README.md").read_text().splitlines() if line.startswith("    ")]
    assert len(lines) == 4
    (found,) = (line.partition("  #")[0].strip() for line in lines if re.search(part, line.partition("  #")[0]))
    return found


def ran(project: Path, line: str) -> str:
    done = shell(line, project)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_plan_of_its_recipe(project: Path) -> None:
    plan = ran(project, command(project, "show=plan"))
    assert names(project) == FILES, "a plan writes nothing"
    code, _, plan = plan.partition("\n")
    assert code == "code: my_model, my_data, allowed by train.yaml:10"
    assert plan.startswith("plan of train\n  grid      pp 2 x dp_replicate 1 x dp_shard 1 x tp 1 = 2 ranks\n")
    assert "  tied      embed.weight = head.weight on stages 0, 1: gradients summed, counted and saved once\n" in plan


def test_the_new_project_trains_unchanged_on_two_ranks_and_learns(project: Path) -> None:
    line = command(project, r"train\.yaml *$")
    assert line == "python -m launcher recipe=train.yaml"
    ran(project, line)
    (run,) = (p for p in (project / "runs/train").glob("0*") if status(p)["steps"] == ["train", "evaluate", "save"])
    said = status(run)
    assert (said["status"], len(list((run / "logs").glob("rank*.log")))) == ("done", 2)
    assert said["metrics"]["val_loss"] < 1 < 3 < losses(run)[0]
    assert (run / "report.html").is_file()
    assert (run / "checkpoints/step-000200/manifest.json").is_file()


def test_two_ranks_train_the_numbers_of_one_process(project: Path) -> None:
    assert "\ncertify: holds: 50 parameters, " in ran(project, command(project, "certify"))


def test_the_sweep_of_the_new_project_runs(project: Path) -> None:
    ran(project, command(project, " -m recipe").replace("train.steps=50", "train.steps=2"))
    with (project / "runs/sweeps/0001/summary.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["done", "done"]


def test_the_readme_of_the_new_project_has_ten_lines(project: Path) -> None:
    assert (project / "README.md").read_text().count("\n") == 10


@pytest.mark.parametrize("there", [False, True], ids=["not there", "empty"])
def test_init_prints_the_files_and_the_next_command(
    there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my projects" / "a"
    if there:
        folder.mkdir(parents=True)
    assert main(["init", str(folder)]) == 0
    assert capsys.readouterr().out == (
        f"{folder}: README.md, my_data.py, my_model.py, train.yaml\n"
        f"next: cd '{folder}', then run the commands in README.md\n"
    )
    assert names(folder) == FILES
    assert names(folder.parent) == ["a"]


def test_init_in_the_current_folder_does_not_replace_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with chdir(tmp_path):
        assert main(["init", "."]) == 0
        assert sorted(os.listdir()) == FILES  # the folder itself, wherever its path leads now
    assert capsys.readouterr().out == (
        ".: README.md, my_data.py, my_model.py, train.yaml\nnext: run the commands in README.md\n"
    )


def test_a_folder_with_anything_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".hidden").touch()
    said = refusal(capsys, str(tmp_path))
    assert said == f"{tmp_path}: not empty; give a new or an empty folder\n"
    assert names(tmp_path) == [".hidden"]


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "x/y"):
        assert refusal(capsys, str(folder)) == f"{folder}: this path, or a part of it, is a file; give another folder\n"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("words", [(), ("a", "b"), ("--help",), ("",)], ids=["none", "two", "a flag", "no name"])
def test_init_takes_exactly_one_folder(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chdir(tmp_path):
        assert refusal(capsys, *words) == "init: needs one folder, as in: launcher init my_project\n"
    assert names(tmp_path) == []


@pytest.mark.parametrize("folder", ["s3://bucket/mine", "file:///tmp/mine", "~/mine"])
def test_init_refuses_paths_that_settings_refuse(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"path|word") as why:
        local(folder)
    with chdir(tmp_path):
        assert refusal(capsys, folder) == f"{folder}: {why.value}\n"
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["new/deep/mine", "empty"])
def test_a_project_that_cannot_be_written_leaves_no_files(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "a.py").write_text("a = 1\n")
    (broken / "z.py").symlink_to("/proc/self/mem")  # opens as a file, and cannot be read at its start
    monkeypatch.setattr(new_project, "PROJECT", broken)
    said = refusal(capsys, str(tmp_path / where))
    assert said == f"{tmp_path / where}: cannot be written: Input/output error\n"
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == [
        "broken", "broken/a.py", "broken/z.py", "empty"
    ]  # fmt: skip


def test_one_of_many_ranks_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(["init", str(tmp_path / "x")]) == 0
    assert names(tmp_path) == []

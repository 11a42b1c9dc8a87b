"""A run folder that somebody else made: a link in it is refused, and its target is not changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.checkpoint import store
from launcher.checkpoint.tensorfile.disk import Unwritten
from launcher.checkpoint.tensorfile.watched_folder import identity, still_there
from launcher.errors import RequestError, RunError
from launcher.runtime import run_folder
from launcher.runtime.faults import raised
from launcher.runtime.log import LogFile
from launcher.runtime.run_folder import locked
from launcher.runtime.training.metrics_file import Metrics
from launcher.untrusted.files import LINK, RefusedFile, links, open_below

PRECIOUS = b"precious text of the user\n"


@pytest.fixture
def precious(tmp_path) -> Path:
    (tmp_path / "precious").write_bytes(PRECIOUS)
    return tmp_path / "precious"


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_file_below_is_opened(run):
    (run / "logs").mkdir()
    os.close(open_below(run, "logs/rank0.log", os.O_WRONLY | os.O_CREAT))
    assert (run / "logs/rank0.log").is_file()


@pytest.mark.parametrize("name", ["link", "logs/rank0.log"])
def test_neither_a_link_nor_one_on_the_way_is_followed(run, precious, name):
    (run / "link").symlink_to(precious)
    (precious.parent / "elsewhere").mkdir()
    (run / "logs").symlink_to(precious.parent / "elsewhere")
    with pytest.raises(RefusedFile, match="a link, which is not followed"):
        open_below(run, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert precious.read_bytes() == PRECIOUS
    assert not [*(precious.parent / "elsewhere").iterdir()]


def test_the_folder_itself_may_be_a_link(run):
    (run.parent / "last").symlink_to(run)
    os.close(open_below(run.parent / "last", "a", os.O_WRONLY | os.O_CREAT))
    assert (run / "a").exists()


def lock(run):
    with locked(run):
        pass


WRITES = {
    ".lock": lock,
    ".status.json": lambda run: run_folder.write_status(run, state="running"),
    "command.txt": lambda run: run_folder.write_command(run, ["launcher"]),
    "metrics.jsonl": lambda run: Metrics(run / "metrics.jsonl"),
    "rank0.log": lambda run: LogFile(run / "rank0.log"),
}


@pytest.mark.parametrize(("name", "write"), WRITES.items(), ids=WRITES)
def test_files_of_a_run_are_not_written_through_a_link(run, precious, name, write):
    (run / name).symlink_to(precious)
    with pytest.raises((RefusedFile, RequestError), match="a link, which is not followed"):
        write(run)
    run_folder.reserve_status(run)  # reports nothing, and writes nothing elsewhere
    assert precious.read_bytes() == PRECIOUS


@pytest.mark.parametrize(
    "name",
    [*run_folder.FILES, *run_folder.FOLDERS, "logs/rank1.log", "checkpoints/step-000001",
     "checkpoints/step-000001/manifest.json",
     "errors/rank0.json", "checkpoints/step-000001.trash", "checkpoints/step-000009.partial"],
)  # fmt: skip
def test_a_link_anywhere_is_refused_before_anything_starts(run, precious, name):
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).symlink_to(precious)
    found = run_folder.check_entries(run)
    assert found is not None
    assert (found.key, found.text) == (
        "run_dir",
        f"{run} is not a run folder: {run / name}: a link, which is not followed: its target may belong "
        "to someone else; remove the link",
    )


def test_links_of_other_libraries_are_theirs(run, precious):
    (run / "loggers/wandb").mkdir(parents=True)
    (run / "loggers/wandb/latest-run").symlink_to(precious)
    (run / "mine").symlink_to(precious)
    assert run_folder.check_entries(run) is None
    theirs = [run / "mine", run / "loggers/wandb/latest-run"]
    assert [*links(run)] in (theirs, theirs[::-1])


def test_names_that_settings_add_are_checked_too(run, precious):
    (run / "norms").mkdir()
    (run / "norms/a").symlink_to(precious)
    assert run_folder.check_entries(run) is None
    assert f"{run / 'norms/a'}: a link" in str(run_folder.check_entries(run, ("norms", "absent")))


def test_a_status_at_the_place_of_a_folder_is_an_error_of_one_line(run):
    (run / "status.json").mkdir()
    with pytest.raises(Unwritten, match=rf"^{run / 'status.json'}: Is a directory$"):
        run_folder.write_status(run, state="running")
    assert [path.name for path in run.iterdir()] == ["status.json"]


def test_a_refused_link_ends_a_rank_without_a_traceback(run):
    fault = raised(0, 0, RefusedFile(run / "logs", LINK))
    assert fault.headline == f"rank 0: {run / 'logs'}: {LINK}"
    assert fault.explains_itself


def test_nothing_is_pruned_behind_a_link(run, precious):
    theirs = run.parent / "theirs"
    (theirs / "step-000001.trash").mkdir(parents=True)
    (theirs / "step-000001.trash/precious").write_bytes(PRECIOUS)
    (run / "checkpoints").symlink_to(theirs)
    with pytest.raises(ValueError, match="a link, which is not followed"):
        store.prune(run / "checkpoints", 1)
    (run / "checkpoints").unlink()
    (run / "checkpoints").mkdir()
    (run / "checkpoints/step-000002.trash").symlink_to(theirs / "step-000001.trash")
    store.prune(run / "checkpoints", 1)
    assert (theirs / "step-000001.trash/precious").read_bytes() == PRECIOUS
    assert not os.path.lexists(run / "checkpoints/step-000002.trash")


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_a_command_says_so_in_a_line(run, precious, capsys, name):
    (run / name).symlink_to(precious if name == "metrics.jsonl" else precious.parent)
    assert main(["recipe=lm_single", f"run_dir={run}"]) == 2
    assert f"{run / name}: a link, which is not followed" in capsys.readouterr().err
    assert precious.read_bytes() == PRECIOUS


def test_a_folder_that_was_renamed_is_not_the_one_that_took_its_place(run):
    began = identity(run)
    still_there(run, began)
    run.rename(run.parent / "moved")
    run.mkdir()
    with pytest.raises(RunError, match="was deleted or moved during the run"):
        still_there(run, began)

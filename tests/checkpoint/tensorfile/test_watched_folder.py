"""If a run folder is moved, deleted or replaced, nothing is written at its old path, and it is not made again."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from launcher.checkpoint.tensorfile.disk import (
    Unwritten,
    clear,
    discard,
    named_errors,
    publish,
    remove,
    replaced,
    write_text,
)
from launcher.checkpoint.tensorfile.safetensors import FileWriter
from launcher.checkpoint.tensorfile.watched_folder import (
    FolderMoved,
    check,
    identity,
    make_folder,
    still_there,
    watched,
)
from launcher.errors import RunError
from launcher.plan.values.tensor_spec import TensorSpec

SAYS = "the run folder was deleted or moved during the run"


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "run/checkpoints/step-000001").mkdir(parents=True)
    return tmp_path / "run"


def rename(run: Path) -> None:
    run.rename(run.parent / "moved")


def replace(run: Path) -> None:
    """Replace the folder by a copy with the same subfolders."""
    rename(run)
    shutil.copytree(run.parent / "moved", run)


def link(run: Path) -> None:
    rename(run)
    shutil.copytree(run.parent / "moved", run.parent / "other")
    run.symlink_to("other")


def a_file(run: Path) -> None:
    rename(run)
    run.write_text("a file")


GONE = {"moved": rename, "deleted": shutil.rmtree, "replaced": replace, "a link to another": link, "a file": a_file}


def in_a_block(path: Path) -> None:
    with replaced(path) as new:
        new.write_text("x")


WRITES = {
    "a folder": lambda run: make_folder(run / "checkpoints/step-000002.partial/rank_0"),
    "a text": lambda run: write_text(run / "checkpoints/latest", "step-000001\n"),
    "a folder's name": lambda run: publish(run.parent / "new", run / "checkpoints/step-000001"),
    "a file that is replaced": lambda run: in_a_block(run / "exports"),
    "tensors": lambda run: FileWriter(run / "t.safetensors", {"a": TensorSpec((1,), "float32")}, {}),
    "what is deleted": lambda run: clear(run / "checkpoints"),
    "a checkpoint that is deleted": lambda run: remove(run / "checkpoints/step-000001"),
}


def listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("happens", GONE.values(), ids=GONE)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_nothing_is_written_where_the_folder_was(run, happens, write):
    (run.parent / "new").mkdir()
    with watched(run):
        happens(run)
        before = listed(run.parent)
        with pytest.raises(FolderMoved) as error:
            write(run)
    assert str(error.value) == f"{run}: {SAYS}"
    assert listed(run.parent) == before


def test_an_incomplete_checkpoint_is_not_deleted_from_a_replaced_run_folder(run):
    with watched(run):
        replace(run)
        discard(run / "checkpoints")
    assert (run / "checkpoints/step-000001").is_dir()
    discard(run / "checkpoints")
    assert listed(run) == []


def test_a_link_to_the_same_folder_is_the_same_folder(run):
    with watched(run):
        rename(run)
        run.symlink_to("moved")
        make_folder(run / "logs/deep")
        write_text(run / "logs/deep/a", "a")
    assert (run.parent / "moved/logs/deep/a").read_text() == "a"


def test_a_folder_that_vanishes_while_one_below_is_made_is_not_made_again(run, monkeypatch):
    mkdir = os.mkdir

    def late(path, *rest, **more):
        rename(run)
        mkdir(path, *rest, **more)

    monkeypatch.setattr(os, "mkdir", late)
    with watched(run), pytest.raises(FolderMoved, match=SAYS):
        make_folder(run / "logs")
    assert not run.exists()


def test_paths_elsewhere_and_after_the_run_are_free(run):
    with watched(run):
        rename(run)
        make_folder(run.parent / "elsewhere/exports")
        write_text(run.parent / "run2", "its name begins the same")
        check(run.parent / "run.old")
    make_folder(run / "logs")
    assert (run / "logs").is_dir()


def test_a_folder_that_is_gone_before_the_start_is_refused(run):
    shutil.rmtree(run)
    with pytest.raises(FolderMoved, match=SAYS), watched(run):
        raise AssertionError
    assert not run.exists()


def test_the_inner_of_two_watched_folders_counts(run):
    with watched(run), watched(run / "checkpoints"):
        shutil.rmtree(run / "checkpoints")
        with pytest.raises(FolderMoved, match=SAYS):
            make_folder(run / "checkpoints/step-000003")
    assert not (run / "checkpoints").exists()


def test_the_error_keeps_its_text_between_processes_and_within_others(run):
    error = pickle.loads(pickle.dumps(FolderMoved(str(run))))
    assert isinstance(error, RunError)
    assert str(error) == f"{run}: {SAYS}"
    with pytest.raises(FolderMoved), named_errors(run / "logs", 1):
        raise error
    assert not isinstance(error, Unwritten)


def test_identity_is_that_of_the_folder_not_of_its_path(run):
    began = identity(run)
    still_there(run, began)
    replace(run)
    with pytest.raises(FolderMoved, match=SAYS):
        still_there(run, began)
    assert identity(run.parent / "moved") == began

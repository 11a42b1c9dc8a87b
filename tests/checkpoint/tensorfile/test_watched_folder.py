"""Nothing is written at the old path of a run folder that was moved, and nothing below one through a link."""

from __future__ import annotations

import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.checkpoint.tensorfile.disk import (
    Unwritten,
    clear,
    copy,
    discard,
    named_errors,
    publish,
    remove,
    replaced,
    replaced_by_library,
    write_text,
)
from launcher.checkpoint.tensorfile.disk import rename as rename_to
from launcher.checkpoint.tensorfile.safetensors import FileWriter
from launcher.checkpoint.tensorfile.watched_folder import (
    FolderMoved,
    check,
    identity,
    make_folder,
    open_file,
    still_there,
    watched,
)
from launcher.errors import RunError
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.untrusted.files import RefusedFile

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


BELOW = {
    "a text": lambda step: write_text(step / "precious", "x"),
    "a folder": lambda step: make_folder(step / "deep/more"),
    "a file that is replaced": lambda step: in_a_block(step / "precious"),
    "tensors": lambda step: FileWriter(step / "precious", {"a": TensorSpec((1,), "float32")}, {}),
    "a copy": lambda step: copy(Path(__file__), step / "precious"),
    "a name": lambda step: rename_to(step / "precious", step / "other"),
    "a folder's name": lambda step: publish(step.parents[1] / "new", step / "deep"),
    "a deleted file": lambda step: clear(step / "precious"),
    "a deleted folder": lambda step: remove(step / "deep"),
    "an incomplete folder": lambda step: discard(step / "deep"),
    "a file of a library": lambda step: by_a_library(step / "precious"),
}


def by_a_library(path: Path) -> None:
    with replaced_by_library(path) as new:
        new.write_text("x")


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


@pytest.mark.parametrize("at", ["checkpoints", "checkpoints/step-000001"])
@pytest.mark.parametrize("act", BELOW.values(), ids=BELOW)
def test_no_link_below_the_folder_is_followed(run, act, at):
    step = run / "checkpoints/step-000001"
    (step / "precious").write_text("precious")
    (step / "deep").mkdir()
    (run / "new").mkdir()
    with watched(run):
        theirs = (run / at).rename(run.parent / "theirs")
        (run / at).symlink_to(theirs)
        before = listed(theirs)
        with suppress(RefusedFile):
            act(step)
        assert listed(theirs) == before
        assert (theirs / (step / "precious").relative_to(run / at)).read_text() == "precious"


def test_no_link_that_appears_between_two_system_calls_is_followed(run, monkeypatch):
    theirs, lexists, precious = run.parent / "theirs", os.path.lexists, "step-000001/precious"
    shutil.copytree(run / "checkpoints", theirs)
    (theirs / precious).write_text("precious")
    (run / "new").mkdir()

    def late(path):
        """Called in ``publish`` after it has opened the folder of checkpoints."""
        if not (run / "checkpoints").is_symlink():
            (run / "checkpoints").rename(run / "before")
            (run / "checkpoints").symlink_to(theirs)
        return lexists(path)

    monkeypatch.setattr(os.path, "lexists", late)
    with watched(run), suppress(RefusedFile):
        publish(run / "new", run / "checkpoints/step-000001")
    assert (theirs / precious).read_text() == "precious"
    assert listed(theirs) == ["step-000001", precious]


def test_a_link_at_the_end_is_replaced_or_deleted_but_not_followed(run):
    theirs, name = run.parent / "theirs", run / "checkpoints/latest"
    theirs.write_text("precious")
    with watched(run):
        for act in (lambda: write_text(name, "x"), lambda: clear(name)):
            name.unlink(missing_ok=True)
            name.symlink_to(theirs)
            act()
            assert not name.is_symlink()
        name.symlink_to(theirs)
        with pytest.raises(RefusedFile, match=f"^{name}: a link, which is not followed"):
            open_file(name, os.O_WRONLY | os.O_TRUNC)
    assert theirs.read_text() == "precious"


def test_an_error_names_the_path_and_not_the_descriptor(run):
    with watched(run), pytest.raises(FileNotFoundError) as error:
        rename_to(run / "checkpoints/none", run / "checkpoints/other")
    assert (error.value.filename, error.value.filename2) == (
        str(run / "checkpoints/none"), str(run / "checkpoints/other"),
    )  # fmt: skip


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

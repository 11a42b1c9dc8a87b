from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from launcher.checkpoint import latest, step_folder
from launcher.untrusted.files import RefusedFile
from tests.checkpoint.refusal import refusal
from tests.checkpoint.saving import filled, save, small


def saved(home: Path, *steps: int) -> None:
    for step in steps:
        save(step_folder(home, step), small(), filled(small()), {"step": step})


def test_a_pipe_called_latest_blocks_nobody(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    text = f"{tmp_path}/latest: a named pipe, not a regular file"
    assert refusal(lambda: latest(tmp_path), RefusedFile) == text


CURE = "remove it to use the checkpoint of the highest step"


@pytest.mark.parametrize("text", ["", "\n", "step-000004", "elsewhere\n", "step-000004\nsha256 0\n", "\xff"])
def test_a_latest_file_that_the_launcher_cannot_have_written_is_refused(tmp_path: Path, text: str) -> None:
    saved(tmp_path, 4)
    (tmp_path / "latest").write_bytes(text.encode("latin-1"))
    told = f"{tmp_path}/latest: damaged: it does not say which checkpoint is the newest; {CURE}"
    assert refusal(lambda: latest(tmp_path)) == told
    (tmp_path / "latest").unlink()
    assert latest(tmp_path) == step_folder(tmp_path, 4)


def test_a_latest_of_the_version_before_names_what_it_named(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    (tmp_path / "latest").write_text("step-000002\n")
    assert latest(tmp_path) == step_folder(tmp_path, 2)


def test_a_checkpoint_that_an_outdated_latest_file_does_not_list_is_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, 9, 2)  # the run was started again
    before = (tmp_path / "latest").read_text()
    digest = hashlib.sha256(before.rpartition("sha256")[0].encode()).hexdigest()
    assert before.startswith("step-000002\nolder step-000009 ")
    assert before.endswith(f"sha256 {digest}\n")
    assert latest(tmp_path) == step_folder(tmp_path, 2)
    saved(tmp_path, 4)
    (tmp_path / "latest").write_text(before)
    assert latest(tmp_path) == step_folder(tmp_path, 4)
    saved(tmp_path, 9)  # the same step as before, at another time
    (tmp_path / "latest").write_text(before)
    assert latest(tmp_path) == step_folder(tmp_path, 4)


def test_checkpoints_of_an_earlier_training_do_not_take_the_place_of_deleted_ones(tmp_path: Path) -> None:
    """A run that began anew must not resume from the weights that it was told to leave."""
    saved(tmp_path, 6, 9, 2)  # the run was started again, and saved step 2
    shutil.rmtree(step_folder(tmp_path, 2))
    assert latest(tmp_path) is None
    saved(tmp_path, 3)
    assert latest(tmp_path) == step_folder(tmp_path, 3)

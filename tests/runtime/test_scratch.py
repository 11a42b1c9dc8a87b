"""The next run removes temporary folders of killed runs; those of running processes stay."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from launcher.runtime.cluster.world import World
from launcher.runtime.run_folder import scratch, sweep
from tests.ranks import on_ranks

OWNER = """
import sys, time
from launcher.runtime.run_folder import scratch
with scratch() as folder:
    (folder / "store").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_scratch_folder_is_removed_with_its_block(home):
    with scratch() as folder:
        (folder / "store").touch()
        assert folder.parent == home
    assert list(home.iterdir()) == []


def test_scratch_folders_of_killed_processes_are_removed_and_others_stay(home):
    (home / "launcher-other").mkdir()  # of another program: nothing says who owns it
    children = [
        subprocess.Popen([sys.executable, "-c", OWNER], env={"TMPDIR": str(home)} | path(), stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    dead, lives = (child.stdout.readline().decode().strip() for child in children)
    children[0].send_signal(signal.SIGKILL)
    children[0].wait()
    with scratch() as own:
        left = {str(p) for p in home.iterdir()}
        assert left == {lives, str(own), str(home / "launcher-other")}
    assert [str(p) for p in sweep(home)] == []
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()
    assert [str(p) for p in sweep(home)] == [lives]
    assert dead != lives


def test_one_that_is_deleted_while_ranks_are_at_work_is_told_and_they_go_on(home, caplog):
    def work(world: World) -> int:
        dist.barrier()
        if world.rank == 0:
            [folder] = home.glob("launcher-*")
            shutil.rmtree(folder)
        time.sleep(2.5)
        return world.rank

    assert on_ranks(2, work) == [0, 1]
    [told] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert re.fullmatch(
        rf"{home}/launcher-\w+ was deleted: ranks that have not connected yet cannot connect any more", told
    )


def path() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH")}

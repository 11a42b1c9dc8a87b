"""Two nodes that differ are refused by name before anything is written; a node that starts later is waited for."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from launcher.runtime.code_versions import of_a_rank
from tests.nodes.nodes import Nodes, Started, ended, missing, until
from tests.ports import free_port
from tests.run.launching import ROOT, TINY, status

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
PAIR = (*TINY, "parallel.hsdp=null", "train.steps=2", "security.allow=[tests.nodes.hooks]")
SOON_S = 1.0
"""Seconds until a rank that waits for its peers ends after a signal."""


def stopped(rank: Started) -> int:
    """The exit code of a rank after a request to stop, which ends it soon."""
    rank.process.send_signal(signal.SIGTERM)
    return ended([rank], SOON_S)[0]


def test_another_torch_and_another_launcher_on_one_node(nodes: Nodes, tmp_path: Path) -> None:
    """On the second node, an installed package of another version comes first."""
    port = free_port()
    for package in ("torch", "autoparallel_launcher"):
        named = tmp_path / "other" / f"{package}-9.9.9.dist-info"
        named.mkdir(parents=True)
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 9.9.9\n")
    near = nodes.rank(tmp_path / "run", 0, port, *PAIR)
    far = nodes.rank(tmp_path / "run", 1, port, *PAIR, env={"PYTHONPATH": f"{tmp_path}/other:{ROOT}"})
    assert ended([near, far]) == [2, 2], near.said()
    mine = of_a_rank()
    assert near.said().endswith(
        f"""\
error: 2 problems in this request; nothing was started

  rank 1 on node1 has launcher 9.9.9, rank 0 on node0 has {mine["launcher"]}; all nodes need the same version

  rank 1 on node1 has torch 9.9.9, rank 0 on node0 has {mine["torch"]}; all nodes need the same version
"""
    )
    assert "error" not in far.said()
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_one_node_does_not_see(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    port, run = free_port(), tmp_path / "shared/run"
    near = nodes.rank(run, 0, port, *PAIR)
    far = nodes.rank(run, 1, port, *PAIR, before=f"mount -t tmpfs none {tmp_path}/shared")
    assert ended([near, far]) == [2, 2], near.said()
    text = f"{run}: rank 1 (on node1) cannot see what rank 0 (on node0) has written there; all ranks need one folder on"
    assert f"run_dir: {text} a shared file system, at the same path" in near.said()
    assert not run.exists()


def test_ranks_that_wait_for_peers_heed_a_signal(nodes: Nodes, tmp_path: Path) -> None:
    """First while rank 0 plans, then while another rank does not join because a sleep delays its start."""
    run, began, go = tmp_path / "run", tmp_path / "began", tmp_path / "go"
    model = f"model={{_target_: tests.nodes.hooks.SlowPlan, vocab: 64, dim: 16, began: {began}, until: {go}}}"
    stages = "parallel.pipeline.stage_config={embed: 0, head: 1}"
    words = [model, stages, *(word for word in PAIR if not word.startswith("model"))]
    started = nodes.ranks(run, *words, each=1)
    until(began.exists, started)
    until(lambda: "hostname" in started[1].said(), started)  # it has reached the store
    assert stopped(started[1]) == 75
    assert stopped(started[0]) == 75

    # the second rank never joins
    (tmp_path / "late").mkdir()
    (tmp_path / "late/sitecustomize.py").write_text(
        "import os, time, torch.distributed as dist\n"
        "if os.environ['RANK'] == '1':\n"
        "    dist.init_process_group = lambda *_, **__: time.sleep(3600)\n"
    )
    go.touch()
    started = nodes.ranks(run, *words, env={"PYTHONPATH": f"{tmp_path}/late:{ROOT}"})
    until((run / "logs/rank1.log").exists, started)
    time.sleep(2)  # until rank 0 is in native code
    assert stopped(started[0]) == 75
    assert ended(started[1:], 30) == [75]
    assert status(run)["status"] == "preempted"

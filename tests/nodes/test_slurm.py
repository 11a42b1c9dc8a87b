"""Slurm starts ranks over two nodes: they connect over the cable, by the names that Slurm has for the nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.nodes.nodes import START_S, Nodes, missing
from tests.nodes.test_interface import hosts
from tests.run.launching import ROOT, TINY, losses, status
from tests.slurm import cluster
from tests.slurm.cluster import NoSlurm, SlurmNode, slurm, until

REASON = missing() or cluster.lacking()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


def test_a_job_of_slurm_trains_over_two_nodes_the_losses_of_one(nodes: Nodes, tmp_path: Path) -> None:
    names = "".join(f"{node.address} {node.name}\n" for node in nodes.pair)
    before = hosts(tmp_path, names, names)
    places = [SlurmNode(node.name, node.name, node.address, node.inside(before)) for node in nodes.pair]
    words = [*TINY, "train.steps=2"]
    run, alone = tmp_path / "run", tmp_path / "alone"
    try:
        with slurm(tmp_path / "slurm", places) as conf:
            env = os.environ | {"SLURM_CONF": str(conf), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            job = ["launch=slurm", "launch.device=cpu", "launch.nnodes=2", "launch.nproc=2", f"run_dir={run}"]
            command = [*places[0].inside, sys.executable, "-m", "launcher", *words, *job]
            submitted = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True)
            assert submitted.returncode == 0, submitted.stdout + submitted.stderr
            until(lambda: status(run)["status"] in ("done", "failed"), START_S, "the job does not end")
    except NoSlurm as error:
        pytest.skip(f"Slurm does not start over two nodes here: {error}")

    text = next(run.glob("slurm-*.log")).read_text()
    assert status(run)["status"] == "done", text
    assert "network: eth0 (10.77.0.1) reaches the rendezvous at node0:" in text
    assert main([*words, f"run_dir={alone}"]) == 0
    assert losses(run) == losses(alone)

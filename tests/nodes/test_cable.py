"""The cable between two nodes is pulled, or is a bad one: what each node reports, and how the run is resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.nodes.nodes import Nodes, Started, bad_line, ended, missing, until
from tests.run.launching import TINY, checkpoints, losses, reached, status, steps

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
TIMEOUT_S = 15
MARGIN_S = 25
"""Seconds after the timeout, in which the network is checked once more and two busy cores write the rest."""
ALLOW = "security.allow=[tests.nodes.hooks]"
PAIR = (
    *TINY, "parallel.hsdp=null", "schedule=constant", "checkpoint.every=2", f"launch.timeout_s={TIMEOUT_S}", ALLOW,
)  # fmt: skip
SLOW = "callbacks=[{_target_: tests.nodes.hooks.SlowSteps, seconds: 0.2}]"
CAUSE = (
    r"error: rank 0 \(on node0\) and the ranks of node1 waited for each other for 15 s \(launch.timeout_s\): the "
    r"network between them is the cause: node0 \(eth0, 10.77.0.1\) does not reach node1 \(eth0, 10.77.0.2\): .+"
)


def both_are_named(started: list[Started], folder: Path) -> None:
    """All ranks end within the timeout and name the network between the two nodes as the cause."""
    assert ended(started, TIMEOUT_S + MARGIN_S) == [1, 1]
    assert re.fullmatch(CAUSE, started[0].error()), started[0].error()
    assert re.fullmatch(CAUSE.removeprefix("error: "), status(folder)["error"])


def test_a_cable_pulled_in_training_ends_the_run_which_resumes_on_one_node(nodes: Nodes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = nodes.ranks(run, *PAIR, SLOW, "train.steps=500")
    until(reached(run, 3), started)
    nodes.pair[1].cable(plugged=False)
    both_are_named(started, run)

    # resume on one node with as many ranks
    n = steps(run)[-1] + 2
    assert main([*PAIR, "launch.nproc=2", f"run_dir={run}", f"train.steps={n}", "checkpoint.resume=auto"]) == 0
    alone = tmp_path / "alone"
    assert main([*PAIR, "launch.nproc=2", f"run_dir={alone}", f"train.steps={n}"]) == 0
    assert losses(run) == losses(alone)


def test_a_cable_pulled_in_a_save_leaves_the_previous_checkpoint(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plugged = tmp_path / "run", tmp_path / "plugged"
    slow = f"callbacks=[{{_target_: tests.nodes.hooks.SlowDisk, rank: 1, at: 3, until: {plugged}}}]"
    started = nodes.ranks(run, *PAIR, slow, "train.steps=8")
    until(lambda: reached(run, 4)() and any((run / "checkpoints").glob("step-000004.partial")), started)
    nodes.pair[1].cable(plugged=False)
    plugged.touch()
    both_are_named(started, run)
    assert (run / "checkpoints/step-000004.partial").exists()

    # resume on one node
    assert main([*PAIR, "launch.nproc=2", f"run_dir={run}", "train.steps=5"]) == 0
    assert "resuming from step-000002" in capsys.readouterr().out
    assert checkpoints(run)[-1] == "step-000005"


def test_a_cable_pulled_during_the_start_ends_every_rank_early(nodes: Nodes, tmp_path: Path) -> None:
    """The cable is pulled while rank 0 plans: no rank waits for the timeout of a full run."""
    run, began, go = tmp_path / "run", tmp_path / "began", tmp_path / "go"
    model = f"model={{_target_: tests.nodes.hooks.SlowPlan, vocab: 64, dim: 16, began: {began}, until: {go}}}"
    stages = "parallel.pipeline.stage_config={embed: 0, head: 1}"
    words = [word for word in PAIR if not word.startswith("model")]
    started = nodes.ranks(run, model, stages, *words, "launch.timeout_s=600", "train.steps=2")
    until(began.exists, started)
    until(lambda: "hostname" in started[1].said(), started)  # it has reached the store
    nodes.pair[1].cable(plugged=False)
    assert ended(started[1:], 60) == [1]
    go.touch()
    assert ended(started[:1], 60) == [1]
    far = r"error: rank 1: node1 \(eth0, 10.77.0.2\) no longer reaches 10.77.0.1:\d+ \(.+\); the cause is the network "
    assert re.fullmatch(far + "between them, or the other node", started[1].error()), started[1].error()
    near = (
        r"error: node0 \(eth0, 10.77.0.1\) no longer reaches node1 \(eth0, 10.77.0.2\) \(.+\); the cause is the "
        "network between them, or node1 itself"
    )
    assert re.fullmatch(near, started[0].error()), started[0].error()
    assert not run.exists()


def test_a_line_that_delays_and_loses_packets_does_not_change_the_numbers(nodes: Nodes, tmp_path: Path) -> None:
    """Each way takes 20 ms and one packet in fifty is lost: the run is slower and has the same numbers."""
    with bad_line(nodes.pair, delay_ms=20, loss=0.02):
        started = nodes.ranks(tmp_path / "run", *PAIR, "train.steps=3", "launch.timeout_s=120")
        assert ended(started) == [0, 0], started[0].said()
    assert main([*PAIR, "launch.nproc=2", f"run_dir={tmp_path}/alone", "train.steps=3"]) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")

"""Training over two nodes has the numbers of one node, however the ranks are placed on the nodes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.nodes.nodes import Nodes, ended, missing, until
from tests.run.launching import TINY, checkpoints, losses, reached, status, steps, tensors

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SLOW = ("callbacks=[{_target_: tests.nodes.hooks.SlowSteps, seconds: 0.2}]", "security.allow=[tests.nodes.hooks]")


def test_the_default_recipe_on_two_nodes_then_on_one_and_back(nodes: Nodes, tmp_path: Path) -> None:
    """torchrun starts it; the second node starts 20 s later. A signal to one agent stops the third run."""
    run, alone = tmp_path / "run", tmp_path / "alone"
    words = [*TINY, "schedule=constant"]
    started = nodes.agents(run, *words, "train.steps=2", late_s=20)
    assert ended(started) == [0, 0], started[0].said()
    assert main([*words, f"run_dir={run}", "train.steps=4"]) == 0

    started = nodes.agents(run, *words, *SLOW, "train.steps=500")
    until(reached(run, 7), started)
    started[1].process.send_signal(signal.SIGTERM)
    ended(started)
    last = checkpoints(run)[-1]
    assert {k: status(run)[k] for k in ("status", "error")} == {
        "status": "preempted",
        "error": f"preempted by SIGTERM: saved {last}, from which the same command resumes",
    }

    # one node alone
    n = steps(run)[-1]
    assert last == f"step-{n:06d}"
    assert main([*words, f"run_dir={alone}", f"train.steps={n}"]) == 0
    assert losses(run) == losses(alone)
    weights = [{k: v for k, v in tensors(each, n).items() if "model" in k} for each in (run, alone)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("each", "layout"),
    [
        (1, ["parallel.pipeline.stages=1", "parallel.grid.tp=2", "operators=megatron", "parallel.hsdp=null"]),
        (2, ["parallel.pipeline.stages=1", "parallel.grid.tp=2", "operators=megatron", "parallel.hsdp=null"]),
    ],
    ids=["tp over nodes", "replicas over nodes, tp within"],
)
def test_other_layouts_train_the_losses_of_one_rank(nodes: Nodes, tmp_path: Path, each: int, layout: list[str]) -> None:
    words = [*TINY, "train.precision=fp64", "train.steps=3"]
    started = nodes.ranks(tmp_path / "run", *words, *layout, each=each)
    alone = ["parallel.pipeline.stages=1", "parallel.hsdp=null", "launch.nproc=1"]
    assert main([*words, *alone, f"run_dir={tmp_path}/alone"]) == 0
    assert ended(started) == [0] * len(started), started[0].said()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-12)

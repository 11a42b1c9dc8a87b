"""``launch.elastic``: after torchrun has lost a node, the run continues on the others and trains the same numbers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.job.compose import compose
from launcher.run.launch import elastic_notes, with_local_ranks
from tests.drills import below, end, launched
from tests.ports import free_port
from tests.run.launching import ROOT, TINY, complete_steps, losses, shape, steps

N = 60
WORDS = [*TINY, *shape(pp=2, shard=2), "train.precision=fp64", "checkpoint.every=10", f"train.steps={N}"]


def place(monkeypatch: pytest.MonkeyPatch, nodes: int, each: int = 2) -> int:
    said = {
        "RANK": 0, "WORLD_SIZE": nodes * each, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": each, "MASTER_ADDR": "here",
        "MASTER_PORT": 1,
    }  # fmt: skip
    for name, value in said.items():
        monkeypatch.setenv(name, str(value))
    return nodes * each


@pytest.mark.parametrize(
    ("words", "nodes", "found", "said"),
    [
        (["parallel.hsdp.shard_size=-1"], 3, -1, ["launch.nnodes 4 -> 3: the nodes that are left (launch.elastic)"]),
        (
            ["parallel.hsdp.shard_size=4"], 3, 3,
            [
                "launch.nnodes 4 -> 3: the nodes that are left (launch.elastic)",
                "parallel.hsdp.shard_size 4 -> 3: the largest that divides the ranks that are left",
            ],
        ),
        (["parallel.hsdp.shard_size=2"], 2, 2, ["launch.nnodes 4 -> 2: the nodes that are left (launch.elastic)"]),
        (["parallel.hsdp.shard_size=4"], 4, 4, []),
        (["parallel.hsdp.shard_size=4", "launch.elastic=false"], 3, 4, []),
        (["parallel.hsdp=null"], 1, None, ["launch.nnodes 4 -> 1: the nodes that are left (launch.elastic)"]),
    ],
    ids=["all", "fewer-shards", "as-many-shards", "none-is-lost", "not-asked-for", "copies"],
)  # fmt: skip
def test_copies_are_fewer_and_shards_as_large_as_they_can_be(
    words: list[str], nodes: int, found: int | None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = place(monkeypatch, nodes)
    asked = ["launch.elastic=true", "launch.nnodes=4", "launch.nproc=2", "parallel.pipeline.stages=2"]
    job = compose(["recipe=lm_tied_pp2_hsdp2", *asked, *words]).job
    here = with_local_ranks(job, outer)
    assert (None if here.parallel.hsdp is None else here.parallel.hsdp.shard_size) == found
    assert [str(note) for note in elastic_notes(job, here)] == said


def test_a_layout_that_cannot_be_on_what_is_left_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place(monkeypatch, 1, each=1)
    asked = ["launch.elastic=true", "launch.nnodes=4", "launch.nproc=1", "parallel.pipeline.stages=4"]
    assert main([*TINY, "model.layers=4", *asked, "parallel.hsdp=null", "parallel.pipeline.micro_batch_num=4"]) == 2
    assert capsys.readouterr().err == (
        """error: 1 problem in this request; nothing was started

  launch.nproc = 1: cannot be divided evenly into 4 pipeline stages
    set by: launch.nproc=1 (command line)
"""
    )


@contextmanager
def agents(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Start two torchrun agents with two ranks each; one agent is enough, and the first hosts the store."""
    port = free_port()
    conf = "last_call_timeout=20,keep_alive_interval=2,keep_alive_max_attempt=5,read_timeout=60"
    outer = [
        "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=elastic",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    line = ("-m", "launcher", *words)
    with (
        launched(folder / "first.log", *outer, f"--rdzv-conf={conf},is_host=true", *line) as first,
        launched(folder / "second.log", *outer, f"--rdzv-conf={conf},is_host=false", *line) as second,
    ):
        yield first, second


def test_a_node_is_lost_and_the_others_go_on(tmp_path: Path) -> None:
    job = tmp_path / "job"
    slow = "callbacks=[{_target_: tests.slurm.slow_steps.SlowSteps, seconds: 0.1}]"
    more = ("launch.elastic=true", "launch.nnodes=2", "launch.nproc=2", f"run_dir={job}", "launch.timeout_s=60")
    with agents(tmp_path, *WORDS, *more, slow, "security.allow=[tests.slurm.slow_steps]") as (first, second):
        end_at = time.monotonic() + 200
        while not ((job / "metrics.jsonl").exists() and max(complete_steps(job), default=0) >= 15):
            assert first.poll() is None, (tmp_path / "first.log").read_text()[-2000:]
            assert time.monotonic() < end_at
            time.sleep(0.1)
        for pid in [second.pid, *below(second.pid)]:  # the node is gone
            end(pid)
        assert first.wait(300) == 0, (tmp_path / "first.log").read_text()[-3000:]
    told = (tmp_path / "first.log").read_text()
    assert "launch.nnodes 2 -> 1: the nodes that are left (launch.elastic)" in told
    assert re.search(r"resuming from step-0000\d0", told)
    assert steps(job) == list(range(1, N + 1))

    # on four ranks, undisturbed
    alone = tmp_path / "alone"
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *WORDS, f"run_dir={alone}"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(job) == pytest.approx(losses(alone), rel=1e-10)
    assert -second.returncode == signal.SIGKILL

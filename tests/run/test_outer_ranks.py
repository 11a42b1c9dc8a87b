"""The same job under torchrun and srun: rank 0 decides, the other ranks follow, and no rank is left waiting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.launching import (
    ROOT,
    TINY,
    checkpoints,
    child,
    ended,
    losses,
    metrics,
    reached,
    run,
    status,
    steps,
    tensors,
    torchrun,
    until,
)
from tests.run.tasks import tasks
from tests.tiers import exhaustive

FRAGILE = (
    "model={_target_: tests.run.own.Fragile, vocab: 64, dim: 16, rank: 1}", "security.allow=[tests]",
    "launch.nproc=2", "parallel.hsdp=null",
    "parallel.pipeline.stage_config={embed: 0, guard: 1, head: 1}", "data=random_tokens", "data.vocab_size=64",
    "data.seq_len=8", "data.samples=64", "train.batch_size=16", "steps=[train,save]", "checkpoint.every=2",
)  # fmt: skip


def test_torchrun_trains_the_same_bits(tmp_path):
    more = ["steps=[train,evaluate,save,transform,export]", "steps.evaluate.batches=1", "train.steps=3"]
    spawned = run(tmp_path / "spawned", *more)
    done = torchrun(4, *TINY, f"run_dir={tmp_path}/joined", *more)
    joined = tmp_path / "joined"
    assert done.returncode == 0, done.stderr
    assert tensors(joined, 3) == tensors(spawned, 3)
    assert losses(joined) == losses(spawned)
    assert [list(row) for row in metrics(joined)] == [list(row) for row in metrics(spawned)]
    assert {k: status(joined)[k] for k in ("status", "metrics", "steps")} == {
        k: status(spawned)[k] for k in ("status", "metrics", "steps")
    }
    assert {p.name for p in joined.iterdir()} == {p.name for p in spawned.iterdir()}
    logs = {"console.log", *(f"rank{n}.log" for n in range(4))}
    assert {p.name for p in (joined / "logs").iterdir()} == logs
    command = (joined / "command.txt").read_text()
    assert command.startswith("torchrun --nnodes 1 --nproc-per-node 4 -m launcher model=lm_tiny ")
    assert done.stdout.count(f": {joined}\n") == 1


def test_a_world_that_is_not_the_plans_is_refused_by_one_rank(tmp_path):
    done = torchrun(2, *TINY, f"runs={tmp_path}/runs")
    assert (
        done.stderr[: done.stderr.index("\n", done.stderr.index("try:"))]
        == """\
error: 1 problem in this request; nothing was started

  launch.nproc = 4: the plan has 4 ranks, torchrun or srun has started 2; and then parallel.hsdp.shard_size: 2: \
there is only 1 data-parallel rank (2 ranks / 2); use 1
    set in: recipes/lm_tied_pp2_hsdp2.yaml:11:10
          | launch: {nproc: 4}
    try:    launch.nproc=2 parallel.hsdp.shard_size=1"""
    )
    assert done.stderr.count("launch.nproc = 4") == 1
    assert "exitcode  : 2 " in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_plan_is_shown_once(tmp_path):
    done = torchrun(2, *TINY, f"runs={tmp_path}/runs", "show=plan", "launch.nproc=null")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("  schedule  1f1b") == 1


def test_the_rank_that_failed_first_is_named(tmp_path):
    done = torchrun(2, *FRAGILE, f"run_dir={tmp_path}/run", "train.steps=2")
    text = "rank 1 has had enough; hydra is here: False"
    assert done.returncode == 1
    assert f"error: rank 1: RuntimeError: {text}\nTraceback (most recent call last):\n" in done.stderr
    assert f"log: {tmp_path}/run/logs/rank1.log\n" in done.stderr
    fault = json.loads((tmp_path / "run/errors/rank1.json").read_text())
    assert (fault["rank"], fault["type"], fault["message"], fault["echo"]) == (1, "RuntimeError", text, False)
    assert {k: status(tmp_path / "run")[k] for k in ("status", "error")} == {
        "status": "failed",
        "error": f"rank 1: RuntimeError: {text}",
    }


@exhaustive
def test_the_failed_rank_is_named_although_torchrun_ends_rank_0_meanwhile(tmp_path):
    model = "model={_target_: tests.run.own.Warned, vocab: 64, dim: 16, rank: 1}"
    done = torchrun(2, model, *FRAGILE[1:], f"run_dir={tmp_path}/run", "train.steps=2")
    line = "rank 1: RuntimeError: rank 1 has had enough; hydra is here: False"
    assert f"error: {line}\nTraceback (most recent call last):\n" in done.stderr
    assert f"log: {tmp_path}/run/logs/rank1.log\n" in done.stderr
    assert {k: status(tmp_path / "run")[k] for k in ("status", "error")} == {"status": "failed", "error": line}


def test_a_model_that_goes_by_the_order_of_a_set_is_told_before_it_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    words = ["parallel.pipeline.stages=1", "parallel.pipeline.stage_config=auto", "train.steps=2"]
    model = "model={_target_: tests.run.sets.Unsorted, vocab: 64, dim: 16}"
    kept = [w for w in FRAGILE[1:] if "stage_config" not in w]
    done = torchrun(2, model, *kept, *words, f"run_dir={tmp_path}/run")
    text = (
        "the constructor depends on something that differs between processes, such as the order of a set of strings; "
    )
    assert done.returncode == 1
    assert text + "sort the set, or start all ranks with the same PYTHONHASHSEED" in status(tmp_path / "run")["error"]
    assert not (tmp_path / "run/metrics.jsonl").exists() or losses(tmp_path / "run") == []


@exhaustive
def test_torchruns_own_restart_goes_on_in_the_same_folder(tmp_path):
    done = torchrun(2, *FRAGILE, f"runs={tmp_path}/runs", "train.steps=2", restarts=1)
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "runs/lm_tied_pp2_hsdp2").glob("0*")
    assert status(folder)["status"] == "done"
    assert steps(folder) == [1, 2]


@exhaustive
def test_a_signal_to_torchrun_ends_every_rank(tmp_path):
    folder = tmp_path / "run"
    words = [*TINY, "parallel.pipeline.stages=1", "launch.nproc=2", f"run_dir={folder}", "train.steps=2000"]
    outer = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "launcher"]
    with child([*outer, *words], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        until(reached(folder, 3), process)
        alive = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.send_signal(signal.SIGTERM)
        assert all(ended(pid, within_s=300) for pid in alive)
        process.wait(300)
    last = checkpoints(folder)[-1]
    assert {k: status(folder)[k] for k in ("status", "error")} == {
        "status": "preempted",
        "error": f"preempted by SIGTERM: saved {last}, from which the same command resumes",
    }


def srun(n: int, *words: str) -> list[tuple[int, str]]:
    """Return the exit code and the output of every task."""
    with tasks(n, *words) as started:
        said = [task.communicate(timeout=300)[0] for task in started]
    return [(task.returncode, text) for task, text in zip(started, said, strict=True)]


def test_srun_trains_the_same_bits(tmp_path):
    more = ["parallel.pipeline.stages=1", "launch.nproc=null", "train.steps=2"]
    first, second = srun(2, *TINY, *more, f"run_dir={tmp_path}/joined")
    assert first[0] == 0, first[1]
    assert second == (0, "")
    spawned = run(tmp_path / "spawned", *more, "launch.nproc=2", steps=2)
    assert tensors(tmp_path / "joined", 2) == tensors(spawned, 2)
    command = (tmp_path / "joined/command.txt").read_text()
    assert command.startswith("srun --ntasks 2 python -m launcher model=lm_tiny ")


def test_srun_with_a_wrong_request_lets_everybody_go(tmp_path):
    first, second = srun(2, *TINY, f"runs={tmp_path}/runs", "train.steps=0")
    assert (first[0], second) == (2, (2, ""))
    assert "train.steps = 0: should be at least 1" in first[1]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_nobody_has_told_where_to_meet_say_so(rank):
    words = [sys.executable, "-m", "launcher", *TINY]
    half = {"RANK": rank, "WORLD_SIZE": "2"}
    done = subprocess.run(words, cwd=ROOT, env=os.environ | half, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        """\
error: 1 problem in this request; nothing was started

  launch.mode: RANK and WORLD_SIZE are set, but not LOCAL_RANK and MASTER_ADDR and MASTER_PORT: \
torchrun sets them all; start the ranks with it, or unset RANK and WORLD_SIZE so that this command starts them
""",
    )


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("spawn", "spawn: torchrun or srun has started 2 processes, and each of them would do the complete run"),
        ("inproc", "inproc: torchrun or srun has started 2 processes, and each of them would do the complete run"),
    ],
)
def test_a_mode_that_starts_its_own_ranks_is_refused(mode, told):
    from launcher.job.compose import compose
    from launcher.run.launch import problems

    job = compose([*TINY, f"launch.mode={mode}"]).job
    assert [p.text for p in problems(job, 2)] == [told]
    assert problems(job, 1) == []

"""Every value of ``launch`` and ``debug`` does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import run_job
from launcher.__main__ import main
from launcher.errors import RequestError
from launcher.job.compose import compose
from launcher.job.schema import redact
from launcher.job.schema.search import Sweep
from launcher.run.launch import start
from launcher.runtime.run_folder import locked
from launcher.runtime.training import loop
from tests.run.launching import ROOT, TINY, events, losses, metrics, run, shape, status, steps, tensors

EVERYTHING = ("steps=[train,evaluate,save,transform,export]", "steps.evaluate.batches=1")


def test_inproc_is_this_process_and_trains_the_same_bits(tmp_path):
    spawned = run(tmp_path / "spawned", *shape(), *EVERYTHING, steps=2)
    inproc = tmp_path / "inproc"
    done = alone("", *shape(), *EVERYTHING, "launch.mode=inproc", "train.steps=2", f"run_dir={inproc}")
    assert (done.returncode, done.stderr) == (0, "")
    assert tensors(inproc, 2) == tensors(spawned, 2)
    assert losses(inproc) == losses(spawned)
    assert status(inproc)["metrics"] == status(spawned)["metrics"]
    assert (inproc / "logs/rank0.log").exists()


def test_inproc_fails_with_the_error_itself_and_goes_on(tmp_path):
    """A debugger needs the frames, not a summary of them."""
    words = [*shape(), "launch.mode=inproc", "train.steps=2", f"run_dir={tmp_path}/run"]
    done = alone("from launcher.runtime.training import loop\ndef step(*_, **__): 1 / 0\nloop.step = step", *words)
    assert done.returncode == 1
    assert "in step\n[rank0]: ZeroDivisionError: division by zero\n" in done.stderr
    assert status(tmp_path / "run")["error"] == "division by zero"
    assert alone("", *words).returncode == 0
    assert steps(tmp_path / "run") == [1, 2]


def alone(first: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process, because a process that has used torch must not be forked.

    The code ``first`` runs before it.
    """
    code = f"{first}\nimport sys\nfrom launcher.__main__ import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, *TINY, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_port_and_more_threads(tmp_path, monkeypatch):
    import torch

    before = loop.step

    def step(s, clip, measuring):
        s.results["threads"] = torch.get_num_threads()
        return before(s, clip, measuring)

    monkeypatch.setattr(loop, "step", step)
    folder = run(tmp_path / "run", "launch.port=0", "launch.threads=2", steps=1)
    assert status(folder)["metrics"]["threads"] == 2


def test_launch_settings_without_effect_are_noted():
    job = compose([*TINY, *shape(), "launch.mode=inproc", "launch.port=5", "launch.max_restarts=2"]).job
    assert start(job, None, 1).notes == (
        "launch.max_restarts 2 has no effect: a rank in this process is not restarted",
        "launch.port 5 has no effect: one rank needs no rendezvous",
    )
    job = compose([*TINY, "launch.port=5", "launch.max_restarts=2"]).job
    assert start(job, 4, 4).notes == (
        "launch.max_restarts 2 has no effect: torchrun or srun restarts the ranks, if it is set to",
        "launch.port 5 has no effect: torchrun or srun sets the rendezvous of its ranks",
    )
    assert start(job, None, 4).notes == ()


def test_one_rank_trains_what_four_would(tmp_path):
    four = run(tmp_path / "four", "train.precision=fp64", steps=3)
    one = run(tmp_path / "one", "train.precision=fp64", "debug=onerank", steps=3)
    assert losses(one) == pytest.approx(losses(four), rel=1e-10)
    assert not (one / "logs/rank1.log").exists()
    assert (
        "debug.onerank true: launch.nproc and launch.nnodes are 1; of parallel.* only deferred_init, "
        "pipeline.micro_batch_num and pipeline.loss_reduction are kept"
        in " ".join((one / "plan.txt").read_text().split())
    )


def test_a_profile_of_each_rank_and_the_graph_of_each_stage(tmp_path):
    folder = run(tmp_path / "run", "debug.profiler=true", "debug.graphs=true", "debug.limit=1", steps=4)
    names = {p.name for p in (folder / "profile").iterdir()}
    assert names == {f"rank{n}.{kind}" for n in range(4) for kind in ("json.gz", "txt")}
    assert events(folder, 0)

    # and what each stage runs
    drawn = {p.name for p in (folder / "graphs").iterdir()}
    assert drawn == {f"stage{n}.{kind}" for n in range(2) for kind in ("svg", "txt")}


def test_overfitting_reads_the_same_samples(tmp_path):
    folder = run(tmp_path / "run", *shape(), "debug.overfit=16", "schedule=constant", "optim.lr=0.03", steps=40)
    assert losses(folder)[-1] < 0.2 * losses(folder)[0]


def test_run_job_returns_the_figures_of_the_run(tmp_path, capsys):
    job = compose([*TINY, f"run_dir={tmp_path}/run", "train.steps=2", *shape()]).job
    figures = run_job(job, command=["python", "train.py"])
    assert figures["loss"] == losses(tmp_path / "run")[-1]
    assert figures["saved_step"] == 2
    assert (tmp_path / "run/command.txt").read_text() == "python train.py\n"
    assert run_job(job) == figures
    assert capsys.readouterr().out.endswith(f"already done: {tmp_path}/run\n")


@pytest.mark.parametrize(("setting", "text"), [
    ({"show": "plan"}, "show: plan: run_job runs the job; leave it out, or print plan_job(job)"),
    ({"sweep": Sweep(over={"optim.lr": [0.1, 0.2], "seed": [0, 1]})},
     "sweep.over: optim.lr, seed: run_job runs one job; call it for each value, or run launcher -m"),
])  # fmt: skip
def test_run_job_refuses_what_only_the_command_can_do(setting: dict[str, Any], text: str, tmp_path: Path) -> None:
    job = compose([*TINY, f"run_dir={tmp_path}/run"]).job.model_copy(update=setting)
    with pytest.raises(RequestError, match=f"^{re.escape(text)}$"):
        run_job(job)
    assert not (tmp_path / "run").exists()


def test_a_table_of_the_metrics(tmp_path):
    folder = run(tmp_path / "run", *shape(), "logger.csv=true", steps=2)
    assert [line.split(",")[0] for line in (folder / "metrics.csv").read_text().split()] == ["step", "1", "2"]


def test_secrets_are_not_written_down(tmp_path):
    job = compose([*TINY, f"run_dir={tmp_path}/run", "train.steps=1", *shape()]).job
    run_job(job, command=["python", "x", "hub.token=abc"], overrides=["hub.token=abc"])
    (recorded,) = status(tmp_path / "run")["overrides"]
    assert recorded == redact.identity("hub.token=abc")
    assert recorded.startswith("hub.token=***")
    assert (tmp_path / "run/command.txt").read_text() == "python x 'hub.token=***'\n"


def test_two_launchers_do_not_share_a_run_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    with locked(folder):
        assert main([*TINY, f"run_dir={folder}", "train.steps=1"]) == 2
    told = capsys.readouterr().err
    assert f"  run_dir: {folder}: another launcher is using it (process {os.getpid()} on " in told
    assert sorted(p.name for p in folder.iterdir()) == [".lock"]
    assert main([*TINY, f"run_dir={folder}", "train.steps=1"]) == 0


def test_metrics_have_every_figure(tmp_path):
    folder = run(tmp_path / "run", steps=1)
    [row] = metrics(folder)
    assert list(row) == [
        "step", "steps", "loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "bubble", "memory_mb",
        "step_ms_median", "step_ms_worst", "worst_rank",
    ]  # fmt: skip
    assert Path(folder, "metrics.jsonl").read_text().endswith("\n")

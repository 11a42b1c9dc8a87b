"""The best layouts are measured where the job runs, here or under an outer launcher; one that fails is left out."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from launcher.__main__ import main
from tests.ports import free_port
from tests.run.launching import TINY, child, ended, ranks, run, status, steps, torchrun, until
from tests.run.launching import metrics as rows
from tests.run.tasks import tasks
from tests.tiers import exhaustive

CHOICE = (
    "security.allow=[tests]", "cluster=here", "data=random_tokens", "data.vocab_size=64", "data.seq_len=8",
    "data.samples=64", "train.batch_size=16", "train.steps=2", "steps=[train]", "logger=plain", "launch.nproc=2",
    "parallel.pipeline.stages=2", "parallel.pipeline.stage_config={embed: 0, limit: 1, head: 1}", "parallel.hsdp=null",
    "parallel.pipeline.micro_batch_num=[2,4]", "search.measure=2", "search.steps=4",
)  # fmt: skip
"""Micro batches of 8 or of 4 samples; those of 8 are predicted to be faster, so they are measured first."""


def limited(end: str) -> str:
    """Return a model that ends as ``end`` says on rank 1, for 8 samples."""
    return f"model={{_target_: tests.run.own.Limited, vocab: 64, dim: 16, rank: 1, samples: 8, end: {end}}}"


def measured_notes(folder: Path) -> list[str]:
    """Return what the plan of a run says about each measured layout."""
    notes = json.loads((folder / "plan.json").read_text())["notes"]
    (text,) = [note["text"] for note in notes if note["key"] == "search.measure"]
    found: list[str] = text.split("; ")
    return found


def test_the_few_best_are_measured_and_the_fastest_of_them_runs(tmp_path: Path, capfd) -> None:
    words = ("parallel.pipeline.stages=[1,2]", "cluster=here", "launch.nproc=2", "search.measure=2", "search.steps=4")
    found = run(tmp_path / "run", *words, "parallel.hsdp=null", steps=2)
    said = capfd.readouterr()
    assert "search: measuring layout 2 of 2" in said.out + said.err
    first, second, constants, error = measured_notes(found)[:4]
    assert " predicted, " in first
    assert " refitted: " in second
    assert " -> " in constants
    assert error.startswith("predictions of 2 measured layouts were off by ")
    assert (found / "plan/best.yaml").is_file()
    assert 'name: "here (refitted)"' in (found / "plan/cluster.yaml").read_text()
    assert status(found)["status"] == "done"
    assert len(rows(found)) >= 2


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("raise", "rank 1: MemoryError: no room for 8 samples"),
        pytest.param("kill", "rank 1 was killed by SIGKILL (out of memory? see dmesg)", marks=exhaustive),
    ],
)
def test_under_torchrun_a_layout_that_fails_on_one_rank_is_left_out_and_the_next_one_runs(
    tmp_path: Path, end: str, why: str
) -> None:
    done = torchrun(2, *CHOICE, limited(end), f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("search: measuring layout 1 of 2\nsearch: measuring layout 2 of 2\nplan of ")
    first, second, _, error = measured_notes(tmp_path / "run")[:4]
    assert first.endswith(" refitted: 2 stages 1f1b, 4 x 4")
    assert second.startswith("did not run, ")
    assert second.endswith(f" refitted: 2 stages 1f1b, 2 x 8 ({why})")
    assert error.startswith("predictions of 1 measured layout were off by ")
    assert status(tmp_path / "run")["status"] == "done"
    assert steps(tmp_path / "run") == [1, 2]


def test_a_layout_that_hangs_is_ended_and_rank_0_writes_the_result(tmp_path: Path) -> None:
    more = ("show=search", f"search.best={tmp_path}/best.yaml", "launch.timeout_s=20", "launch.nproc=null")
    done = torchrun(2, *CHOICE, limited("hang"), *more)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("search over 2 layouts on here, predicted\n") == 1
    assert " 2 stages 1f1b, 2 x 8 (rank 1 hung for 20 s (launch.timeout_s): it is at " in done.stdout
    assert done.stdout.count("\n  cluster    ") == 1
    assert "micro_batch_num: 4" in (tmp_path / "best.yaml").read_text()
    assert 'name: "here (refitted)"' in (tmp_path / "cluster.yaml").read_text()


def test_on_two_nodes_every_rank_tries_its_part(tmp_path: Path) -> None:
    """Two torchrun agents run one rank each."""
    outer = [
        "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]  # fmt: skip
    words = ["-m", "launcher", *CHOICE, limited("raise"), "launch.nnodes=2", "launch.nproc=1"]
    words = [*words, f"run_dir={tmp_path}/run"]
    with (
        child([*outer, "--node-rank=0", *words], stdout=PIPE, stderr=STDOUT) as first,
        child([*outer, "--node-rank=1", *words], stdout=PIPE, stderr=STDOUT) as second,
    ):
        said = [agent.communicate(timeout=300)[0] for agent in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    best, failed = measured_notes(tmp_path / "run")[:2]
    assert best.endswith(" refitted: 2 stages 1f1b, 4 x 4")
    assert failed.startswith("did not run, ")
    assert failed.endswith(" refitted: 2 stages 1f1b, 2 x 8 (rank 1: MemoryError: no room for 8 samples)")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_rank_while_a_layout_is_tried_ends_all_of_them(tmp_path: Path, rank: int) -> None:
    with tasks(2, *CHOICE, limited("hang"), f"run_dir={tmp_path}/run") as started:
        for task in started:
            until(lambda task=task: bool(tried(task)), task)
        alive = [pid for task in started for pid in (task.pid, *tried(task))]
        started[rank].send_signal(signal.SIGTERM)
        assert all(ended(pid, within_s=60) for pid in alive)
        codes = [task.wait(60) for task in started]
    assert codes[rank] == 75
    assert codes[0] == 75
    assert not (tmp_path / "run").exists()


def tried(task: subprocess.Popen[str]) -> list[int]:
    """The processes that train for a rank: their parent is a child of the rank's server."""
    return ranks(task)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("search.steps=2",), "search.steps = 2: the first 2 steps do not count, so at least 3 are needed"),
        (
            ("launch.nnodes=2", "show=search"),
            "search.measure = 2: layouts are measured where they would run, and launch.nnodes is 2: start it with "
            "torchrun or srun; search.measure=0 only predicts",
        ),
        (
            ("launch.nnodes=2",),
            "launch.nnodes = 2: without torchrun or srun the launcher starts ranks on this machine only; "
            "run torchrun --nnodes 2 -m launcher ... on each node, or submit it with launch=slurm",
        ),
        (
            ("launch.mode=inproc",),
            "launch.mode = inproc: one process is one rank, but the plan has 2; debug=onerank plans for one",
        ),
    ],
)
def test_layouts_that_cannot_be_measured_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    asked = (*TINY, "train.steps=2", "parallel.pipeline.stages=[1,2]", "cluster=here", "launch.nproc=2")
    assert main([*asked, "search.measure=2", f"run_dir={tmp_path}/run", *words]) == 2
    shown = capsys.readouterr()
    head = "error: 1 problem in this request; nothing was started"
    assert shown.err.startswith(f"{head}\n\n  {said}\n    set by: ")
    assert shown.out == ""
    assert not (tmp_path / "run").exists()


def test_ranks_that_torchrun_has_not_started_are_refused_before_any_layout_is_tried(tmp_path: Path) -> None:
    done = torchrun(2, *CHOICE, limited("raise"), "launch.nproc=4", f"run_dir={tmp_path}/run")
    assert done.stderr[: done.stderr.index("    set by")] == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  launch.nproc = 4: the plan has 4 ranks, torchrun or srun has started 2\n"
    )
    assert done.stdout == ""

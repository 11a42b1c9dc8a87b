"""What a pod does: it starts its ranks, forwards the signal, and ends with the exit code that its cluster expects."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.extras.k8s.k8s import cluster_job, jobset, pytorchjob
from launcher.job.compose import compose
from tests.extras.k8s.test_manifests import scripts
from tests.run.launching import until

RANK = """#!/bin/bash
# Stands for Python: says where it is, then ends as the file of its rank says.
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR:$MASTER_PORT, $*" >> "said-$RANK"
code=$(cat "ends-$RANK" 2>/dev/null || echo 0)
echo $$ > "pid-$RANK"
if [ "$code" = saves ]; then
    trap 'sleep 0.3; exit 75' TERM
    touch "ready-$RANK"
    for _ in {1..600}; do sleep 0.1; done
elif [ "$code" = starts ]; then
    touch "ready-$RANK"
    exec sleep 60
fi
exit "$code"
"""
KINDS = {"jobset": jobset, "pytorchjob": pytorchjob}


@contextmanager
def pod(folder: Path, kind: str, node: int, each: int = 2) -> Iterator[subprocess.Popen[str]]:
    """Start the pod ``node`` of two, in ``folder``."""
    python = folder / "python"
    python.write_text(RANK)
    python.chmod(0o755)
    asked = ("image=x", "claim=x", f"mount={folder}", f"workdir={folder}", f"python={python}", f"kind={kind}")
    words = ["recipe=lm_single", "name=me", "launch=k8s", "launch.nnodes=2"]
    job = compose([*words, *(f"launch.k8s.{word}" for word in asked)]).job
    assert job.launch.k8s is not None
    document = KINDS[kind](cluster_job(job, job.launch.k8s, each, folder / "run"))
    said = {"JOB_COMPLETION_INDEX": str(node)}
    if kind == "pytorchjob":
        said = {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "me-master-0", "MASTER_PORT": "23456"}
    started = subprocess.Popen(["bash", "-c", scripts(kind, document)[0]], env=os.environ | said, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def ended(folder: Path, kind: str, node: int = 0, **codes: object) -> int:
    """Return the exit code of a pod whose ranks, named r0 and r1, end with ``codes``."""
    for rank, code in codes.items():
        (folder / f"ends-{rank.removeprefix('r')}").write_text(str(code))
    with pod(folder, kind, node) as started:
        if {"saves", "starts"} & {*codes.values()}:
            until(lambda: all(_there(folder, rank[1:], code) for rank, code in codes.items()), started)
            started.send_signal(signal.SIGTERM)
        return started.wait(60)


def _there(folder: Path, rank: str, code: object) -> bool:
    """Whether a rank is ready for the signal, or has ended and the pod has noticed it."""
    if code in ("saves", "starts"):
        return (folder / f"ready-{rank}").exists()
    pid = folder / f"pid-{rank}"
    said = pid.read_text().strip() if pid.exists() else ""
    return said != "" and not Path("/proc", said).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_of_a_node_is_told_its_place(tmp_path: Path, kind: str) -> None:
    assert ended(tmp_path, kind, node=1) == 0
    where = "me-run-ranks-0-0.me-run:29500" if kind == "jobset" else "me-master-0:23456"
    words = f"-m launcher recipe={tmp_path}/run/request.yaml run_dir={tmp_path}/run"
    assert {path.name: path.read_text() for path in tmp_path.glob("said-*")} == {
        "said-2": f"2 of 4, 0 of 2, {where}, {words}\n",
        "said-3": f"3 of 4, 1 of 2, {where}, {words}\n",
    }


@pytest.mark.parametrize(
    ("first", "second", "code", "operators"),
    [
        (0, 0, 0, 0),
        (75, 75, 75, 138),
        (0, 75, 75, 138),
        (75, 1, 1, 1),
        (1, 75, 1, 1),
        (2, 2, 2, 2),
        (0, 137, 137, 1),
    ],
)
def test_a_failure_counts_more_than_a_save(tmp_path: Path, first: int, second: int, code: int, operators: int) -> None:
    assert ended(tmp_path, "jobset", r0=first, r1=second) == code
    assert ended(tmp_path, "pytorchjob", r0=first, r1=second) == operators


@pytest.mark.parametrize(
    ("first", "second"), [("saves", "saves"), ("saves", "starts"), ("starts", 0)], ids=["saves", "one starts", "starts"]
)
def test_after_a_signal_a_pod_waits_until_its_ranks_have_saved(tmp_path: Path, first: object, second: object) -> None:
    assert ended(tmp_path, "jobset", r0=first, r1=second) == 75


def test_a_rank_that_fails_when_it_is_told_to_stop_is_a_failure(tmp_path: Path) -> None:
    assert ended(tmp_path, "jobset", r0="saves", r1=1) == 1

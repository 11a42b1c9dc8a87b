"""``launcher status``, ``logs`` and ``cancel`` of a run folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from launcher.__main__ import OF_A_RUN, main
from launcher.runtime.folder import write_status
from launcher.runtime.lock import locked
from tests.run.launching import run, say, shape


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "one", *shape(), steps=3)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that Slurm has, whose commands answer."""
    answers = {"squeue": "echo 'RUNNING on n[1-2], 0:32 of 10:00, None'", "scancel": f"echo $@ > {tmp_path}/cancelled"}
    for name, text in answers.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    folder = tmp_path / "run"
    folder.mkdir()
    write_status(folder, status="submitted", slurm="77")
    return folder


def answer(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = main(words)
    out = capsys.readouterr()
    return code, out.out + out.err


def test_how_far_it_is(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer(["status", str(done)], capsys)
    assert code == 0
    assert re.fullmatch(
        rf"{done}: done\nstep 3 of 3, loss \d\.\d{{4}}, [\d.]+k? tokens/s, [\d.]+ m?s a step\n"
        "newest checkpoint: step-000003\n",
        said,
    )


def test_a_run_that_nobody_holds_was_killed(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(done, status="running")
    try:
        _, said = answer(["status", str(done)], capsys)
        assert said.splitlines()[0] == f"{done}: killed: it goes on with the same command and run_dir"
        assert answer(["cancel", str(done)], capsys) == (
            1, f"error: {done}: it is no job of Slurm, and it was killed\n"
        )  # fmt: skip
        pid = os.fork()
        if not pid:
            with locked(done):
                os.kill(os.getpid(), 19)
                os._exit(0)
        os.waitpid(pid, os.WUNTRACED)
        _, said = answer(["status", str(done)], capsys)
        assert said.splitlines()[0] == f"{done}: running"
        os.kill(pid, 18)
        os.waitpid(pid, 0)
    finally:
        say(done, status="done")


@pytest.mark.parametrize(
    ("file", "asks", "ends"),
    [
        ("job.yaml", "kubectl get -f {}/job.yaml", "kubectl delete -f {}/job.yaml"),
        ("sky.yaml", "sky jobs queue", "sky jobs cancel"),
    ],
)
@pytest.mark.parametrize("state", ["written", "running"])
def test_a_job_of_kubernetes_is_asked_for_and_ended_elsewhere(
    done: Path, capsys: pytest.CaptureFixture[str], file: str, asks: str, ends: str, state: str
) -> None:
    say(done, status=state)
    (done / file).touch()
    try:
        _, said = answer(["status", str(done)], capsys)
        first, *_, last = said.splitlines()
        assert (first, last) == (f"{done}: {state}", f"a job of Kubernetes; where it is: {asks.format(done)}")
        assert answer(["cancel", str(done)], capsys) == (
            1, f"error: {done}: it is a job of Kubernetes: {ends.format(done)} ends it, and it saves\n"
        )  # fmt: skip
    finally:
        (done / file).unlink()
        say(done, status="done")


def test_the_end_of_its_log(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (done / "logs").mkdir(exist_ok=True)
    (done / "logs/rank0.log").write_text("".join(f"line {n}\n" for n in range(60)))
    code, said = answer(["logs", str(done)], capsys)
    assert code == 0
    assert said.splitlines() == [
        *(f"line {n}" for n in range(20, 60)), f"more as it comes: tail -F {done}/logs/rank0.log"
    ]  # fmt: skip


def test_a_job_of_slurm(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["status", str(job)], capsys) == (
        0, f"{job}: submitted\njob 77 of Slurm: RUNNING on n[1-2], 0:32 of 10:00, None\n"
    )  # fmt: skip
    assert answer(["logs", str(job)], capsys) == (
        1, f"error: {job}/slurm-77.log: No such file or directory: it has not said anything yet\n"
    )  # fmt: skip
    write_status(job, status="running", job="slurm here 77")  # as the job itself says it
    code, said = answer(["cancel", str(job)], capsys)
    assert (code, (job.parent / "cancelled").read_text()) == (0, "77\n")
    assert said == "job 77 of Slurm is cancelled; where it was training it saves, and the same command goes on\n"
    write_status(job, status="failed", error="no disk", job="slurm here 77")
    assert answer(["cancel", str(job)], capsys) == (1, f"error: {job}: it is failed, and there is nothing to cancel\n")
    assert answer(["status", str(job)], capsys)[1].splitlines()[0] == f"{job}: failed: no disk"


@pytest.mark.parametrize("name", OF_A_RUN)
def test_what_is_no_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "error: 1 problem in this request; nothing was started\n\n"
    assert answer([name], capsys) == (2, f"{wrong}  {name}: takes one run folder, as launcher {name} runs/NAME/0001\n")
    text = f"{name} {tmp_path}: is no folder of a run: there is no status.json"
    assert answer([name, str(tmp_path)], capsys) == (2, f"{wrong}  {text}\n")


@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json"])
@pytest.mark.parametrize("what", ["pipe", "device", "folder", "noise", "rows of other things"])
def test_a_folder_that_somebody_made_is_answered_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, what: str
) -> None:
    run_folder = tmp_path / "theirs"
    run_folder.mkdir()
    write_status(run_folder, status="done")
    (run_folder / name).unlink(missing_ok=True)
    match what:
        case "pipe":
            os.mkfifo(run_folder / name)
        case "device":
            (run_folder / name).symlink_to("/dev/zero")
        case "folder":
            (run_folder / name).mkdir()
        case "noise":
            (run_folder / name).write_bytes(bytes(range(256)) * 99 + b"\n")
        case _:
            (run_folder / name).write_text('[]\n{"loss": "a", "step": 1}\n{"loss": 1, "step": [2]}\n1\n')
    code, said = answer(["status", str(run_folder)], capsys)
    assert code == (2 if name == "status.json" else 0)
    assert said == f"{run_folder}: done\n" if name == "metrics.jsonl" else "Traceback" not in said


def test_a_loss_that_is_no_number_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path, status="done")
    (tmp_path / "metrics.jsonl").write_text('{"loss": null, "step": 3, "steps": 9}\n')
    assert answer(["status", str(tmp_path)], capsys)[1] == f"{tmp_path}: done\nstep 3 of 9, loss nan, 0.0 us a step\n"

"""``launcher status``, ``logs`` and ``cancel`` of a run folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.__main__ import OF_A_RUN, main
from launcher.checkpoint.store import point
from launcher.job.compose import compose
from launcher.run.run import run_job
from launcher.runtime.run_folder import locked, running_launcher, write_status
from tests.run.launching import TINY, child, reached, run, say, shape, started, until


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "one", *shape(), steps=3)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was submitted to Slurm, with fake Slurm commands."""
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


def test_status_prints_progress_and_the_newest_checkpoint(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer(["status", str(done)], capsys)
    assert code == 0
    assert re.fullmatch(
        rf"{done}: done\nstep 3 of 3, loss \d\.\d{{4}}, [\d.]+k? tokens/s, [\d.]+ m?s a step\n"
        "newest checkpoint: step-000003\n",
        said,
    )


def test_the_newest_checkpoint_is_complete_and_that_of_the_last_training(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file ``latest`` decides, as for a run that resumes, and neither the names nor unfinished folders."""
    run = tmp_path / "copy"
    shutil.copytree(done, run)
    for name in ("step-000009", "step-000004.partial"):
        (run / "checkpoints" / name).mkdir()
    assert answer(["status", str(run)], capsys)[1].endswith(
        "\nnewest checkpoint: step-000003\n"
        f"{run}/checkpoints/step-000009: incomplete checkpoint: it has no manifest.json, which is written last\n"
    )

    first, again = run / "checkpoints/step-000003", run / "checkpoints/step-000001"
    shutil.copytree(first, again)
    point(again, None)  # a training that began anew
    assert answer(["status", str(run)], capsys)[1].count("\nnewest checkpoint: step-000001\n") == 1
    shutil.rmtree(again)
    assert "newest checkpoint" not in answer(["status", str(run)], capsys)[1]


def test_a_run_that_nobody_holds_was_killed(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert running_launcher(done, patience_s=60) is None  # its ranks end after it
    say(done, status="running")
    try:
        _, said = answer(["status", str(done)], capsys)
        assert said.splitlines()[0] == f"{done}: killed: the same command and run_dir resume it"
        assert answer(["cancel", str(done)], capsys) == (
            1, f"error: {done}: it is not a Slurm job: it was killed\n"
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
        assert (first, last) == (f"{done}: {state}", f"a job of Kubernetes; its state: {asks.format(done)}")
        assert answer(["cancel", str(done)], capsys) == (
            1, f"error: {done}: it is a Kubernetes job: {ends.format(done)} ends it after a save\n"
        )  # fmt: skip
    finally:
        (done / file).unlink()
        say(done, status="done")


def shown(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what ``launcher logs`` prints of a run that has begun."""
    code, said = answer(["logs", str(run_folder)], capsys)
    assert code == 0
    return said


def command(folder: Path, *overrides: str, steps: int = 3, **options: Any) -> str:
    """Run in a separate process, and return both output streams in the order in which they were written."""
    words = ["launcher", *TINY, f"run_dir={folder}", f"train.steps={steps}", *overrides]
    with child(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:
        out, _ = process.communicate(timeout=300)
    return str(out)


@pytest.mark.parametrize("how", ["spawn", "inproc"])
def test_logs_shows_what_the_console_showed_of_a_run_that_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    printed = command(tmp_path / "one", *shape(), f"launch.mode={how}")
    assert {"step 1/3", "step 3/3"} <= {line.partition("  ")[0] for line in printed.splitlines()}
    assert shown(tmp_path / "one", capsys) == printed


def test_logs_shows_the_error_of_a_run_that_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = ("security.allow=[tests]", "callbacks=[{_target_: tests.run.callbacks.Loud}]")
    printed = command(tmp_path / "one", *shape(), *mine, env={"FORCE_COLOR": "1"})
    assert {"printed by rank 0", "warned by rank 0"} <= {*printed.splitlines()}
    assert "KeyError: no such thing" in printed or "KeyError: 'no such thing'" in printed
    assert sorted(shown(tmp_path / "one", capsys).splitlines()) == sorted(
        re.sub(r"\x1b\[[0-9;]*m", "", printed).splitlines()
    )


def test_logs_of_a_run_at_work_says_how_to_go_on_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started(tmp_path / "one", *shape(), steps=1_000_000) as process:
        until(reached(tmp_path / "one", 1), process)
        *lines, last_line = shown(tmp_path / "one", capsys).splitlines()
    assert any(line.startswith("step 1/1000000") for line in lines)
    assert last_line == f"to follow the output: tail -F {tmp_path}/one/logs/console.log"


def test_logs_of_run_job_in_python_is_kept_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = compose([*TINY, *shape(), f"run_dir={tmp_path / 'one'}", "train.steps=1"]).job
    run_job(job)
    assert shown(tmp_path / "one", capsys).splitlines()[-1].startswith("done in ")


def test_logs_shows_at_most_the_last_mebibyte_and_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(tmp_path, status="done")
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs/console.log"
    path.write_text("x" * 99 + "\n" + "".join(f"line {n:094d}\n" for n in range(1 << 14)) + "\x1b[2Jend\n")
    first, *lines = shown(tmp_path, capsys).splitlines()
    assert re.fullmatch(rf"\.\.\. 576\.2 KB before this are not shown: {path}", first)
    assert lines[-2:] == [f"line {(1 << 14) - 1:094d}", "\\x1b[2Jend"]
    assert len(lines) <= (1 << 20) // 100 + 1


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "link", "folder is a link"])
def test_logs_follows_no_link_and_opens_no_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    run_folder, other = tmp_path / "theirs", tmp_path / "other"
    (run_folder / "logs").mkdir(parents=True)
    other.mkdir()
    (other / "console.log").write_text("a secret\n")
    write_status(run_folder, status="done")
    path = run_folder / "logs/console.log"
    match what:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(other / "console.log")
        case _:
            (run_folder / "logs").rmdir()
            (run_folder / "logs").symlink_to(other)
    code, said = answer(["logs", str(run_folder)], capsys)
    assert code == 2
    assert f"run_dir: {run_folder}/logs" in said
    assert "secret" not in said
    assert "Traceback" not in said


def test_a_job_of_slurm(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["status", str(job)], capsys) == (
        0, f"{job}: submitted\njob 77 of Slurm: RUNNING on n[1-2], 0:32 of 10:00, None\n"
    )  # fmt: skip
    assert answer(["logs", str(job)], capsys) == (
        1, f"error: {job}/slurm-77.log: No such file or directory: it has not printed anything yet\n"
    )  # fmt: skip
    write_status(job, status="running", job="slurm here 77")  # as the job itself writes it
    code, said = answer(["cancel", str(job)], capsys)
    assert (code, (job.parent / "cancelled").read_text()) == (0, "77\n")
    assert said == "job 77 of Slurm is cancelled; if it was training, it saves, and the same command resumes it\n"
    write_status(job, status="failed", error="no disk", job="slurm here 77")
    assert answer(["cancel", str(job)], capsys) == (1, f"error: {job}: it is failed, so there is nothing to cancel\n")
    assert answer(["status", str(job)], capsys)[1].splitlines()[0] == f"{job}: failed: no disk"


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_folder_that_is_no_run_folder_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = "error: 1 problem in this request; nothing was started\n\n"
    assert answer([name], capsys) == (2, f"{wrong}  {name}: takes one run folder, as launcher {name} runs/NAME/0001\n")
    text = f"{name} {tmp_path}: is not a run folder: it has no status.json"
    assert answer([name, str(tmp_path)], capsys) == (2, f"{wrong}  {text}\n")
    text = f"{name} {tmp_path}/none: is not a folder"
    assert answer([name, f"{tmp_path}/none"], capsys) == (2, f"{wrong}  {text}\n")


def runs(folder: Path, *states: str) -> list[str]:
    """Make runs with these states, each newer than the one before it, and return their paths."""
    names = []
    for n, state in enumerate(states):
        one = folder / f"name {n % 2}" / f"{n:04d}"
        one.mkdir(parents=True)
        write_status(one, status=state, error="why: not", slurm="77")
        os.utime(one / "status.json", (n, n))
        (one.parent / "latest").unlink(missing_ok=True)
        (one.parent / "latest").symlink_to(one.name)
        names.append(str(one))
    return names


@pytest.mark.parametrize("name", ["status", "logs"])
def test_a_folder_of_runs_is_answered_with_the_newest(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, b, c, d = runs(tmp_path, "done", "done", "failed", "submitted", "done")
    code, said = answer([name, str(tmp_path)], capsys)
    assert code == 2
    held = f"5 runs, the newest first: {d} (done), {c} (submitted), {b} (failed) and 2 more"
    assert f"  {name} {tmp_path}: is not a run folder; it contains {held}\n    try:    {name} '{d}'\n" in said
    one = Path(d).parent
    damaged = one / "0002/status.json"
    damaged.write_text("{}x")
    assert (
        f"it contains 2 runs, the newest first: {d} (done), {one}/0000 (done)\n" in answer([name, str(one)], capsys)[1]
    )


@pytest.mark.parametrize(("states", "cure"), [("dd", None), ("sd", 0), ("sdd", 0), ("ss", None)])
def test_a_run_that_cannot_be_cancelled_is_not_proposed_nor_one_of_several(
    states: str, cure: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = runs(tmp_path, *({"d": "done", "s": "submitted"}[state] for state in states))
    code, said = answer(["cancel", str(tmp_path)], capsys)
    assert (code, f"it contains {len(states)} runs, the newest first: " in said) == (2, True)
    assert ("none has a Slurm job to cancel" in said) == ("s" not in states)
    assert said.partition("    try:    ")[2] == ("" if cure is None else f"cancel '{names[cure]}'\n")


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
    if name == "status.json":
        assert "Traceback" not in said
        return
    reasons = {
        "pipe": "a named pipe, not a regular file", "folder": "Is a directory",
        "device": "a link, which is not followed: its target may belong to someone else; remove the link",
    }  # fmt: skip
    why = f"its progress cannot be read: {run_folder / name}: {reasons[what]}\n" if what in reasons else ""
    assert said == f"{run_folder}: done\n{why}"


def test_a_pipe_in_the_place_of_the_next_status_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path, status="done")
    os.mkfifo(tmp_path / ".status.json")
    why = f"the next start will be refused: {tmp_path}/.status.json: a named pipe, not a regular file\n"
    assert answer(["status", str(tmp_path)], capsys) == (0, f"{tmp_path}: done\n{why}")


def test_a_loss_that_is_no_number_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path, status="done")
    (tmp_path / "metrics.jsonl").write_text('{"loss": null, "step": 3, "steps": 9}\n')
    assert answer(["status", str(tmp_path)], capsys)[1] == f"{tmp_path}: done\nstep 3 of 9, loss nan, 0.0 us a step\n"


@pytest.mark.parametrize("number", ["--me", "-u root", "7; id", "", ["7", "8"], {"a": 1}, "7 8", "$(id)"], ids=str)
@pytest.mark.parametrize("where", ["slurm", "jobs.json"])
def test_only_the_number_of_a_job_reaches_scancel(
    job: Path, where: str, number: object, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "slurm":
        write_status(job, status="running", slurm=number)
    else:
        write_status(job, status="submitted")
        (job.parent / "jobs.json").write_text(json.dumps({job.name: number}))
    code, said = answer(["cancel", str(job)], capsys)
    assert code in (1, 2)
    assert (code == 1 and number == "") or said.rstrip().endswith(", which is not a job number")
    assert not (job.parent / "cancelled").exists()


@pytest.mark.parametrize("number", ["77", "77_3", "77+1", 77], ids=str)
def test_every_form_of_a_slurm_job_number_is_cancelled(
    job: Path, number: object, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(job, status="running", slurm=number)
    assert answer(["cancel", str(job)], capsys)[0] == 0
    assert (job.parent / "cancelled").read_text() == f"{number}\n"


def test_no_terminal_obeys_what_somebody_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path, status="\x1b[31mred\x07", error="\x9b1m")
    code, said = answer(["status", str(tmp_path)], capsys)
    assert code == 0
    assert said == f"{tmp_path}: \\x1b[31mred\\x07: \\x9b1m\n"


@pytest.mark.parametrize("name", ["status", "cancel"])
def test_a_link_in_the_place_of_the_lock_is_a_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(tmp_path, status="running")
    (tmp_path / ".lock").symlink_to("/etc/passwd")
    code, said = answer([name, str(tmp_path)], capsys)
    assert code == 2
    assert said == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  run_dir: {tmp_path}/.lock: a link, which is not followed: its target may belong to someone else; "
        "remove the link\n"
    )


@pytest.mark.parametrize(
    "row",
    [
        '{"loss": 1}',
        '{"loss": true, "step": 1}',
        '{"loss": 1, "step": 1, "step_ms": null}',
        '{"loss": 1e999, "step": 2}',
        '{"loss": 1, "step": -5}',
    ],
)
def test_a_row_without_its_figures_is_passed_over(tmp_path: Path, row: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path, status="done")
    (tmp_path / "metrics.jsonl").write_text(f'{{"loss": 2.0, "step": 1, "step_ms": 5}}\n{row}\n')
    code, said = answer(["status", str(tmp_path)], capsys)
    assert code == 0
    assert said == f"{tmp_path}: done\nstep 1 of ?, loss 2.0000, 5.0 ms a step\n"

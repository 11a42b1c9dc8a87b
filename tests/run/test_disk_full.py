"""A full disk ends a run with one line and keeps what was saved, or training continues without the checkpoint."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.checkpoint import latest, verify
from launcher.checkpoint.tensorfile.disk import Unwritten
from launcher.checkpoint.write import RankWriter
from launcher.runtime import log, run_folder
from launcher.runtime.training.metrics_file import Metrics, read
from tests.drills.disk_full import disk, leave
from tests.run.launching import ROOT, TINY, checkpoints, losses, metrics, run, status, steps, tensors
from tests.tiers import exhaustive

EVERY = ("checkpoint.every=2", "checkpoint.keep=null")
FULL = "No space left on device"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on a disk with enough room."""
    return run(tmp_path_factory.mktemp("straight") / "run", *EVERY, steps=6)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    try:
        with disk(tmp_path / "disk", 1024) as there:
            yield there
    except PermissionError as error:
        pytest.skip(f"no small file system to fill: {error}")


def failing(monkeypatch: pytest.MonkeyPatch, *at: int, rank: int = 1) -> None:
    """Let the disk be full when ``rank`` writes the checkpoints of the steps ``at``."""
    before = RankWriter.write

    def write(self: RankWriter, *rest: object) -> object:
        if self.rank == rank and any(f"{step:06d}" in self.folder.name for step in at):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / "x"))
        return before(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(RankWriter, "write", write)


def left(run_dir: Path) -> list[str]:
    """Return the names of unfinished files and checkpoints, which must not remain."""
    return [p.name for p in run_dir.rglob("*") if p.name.endswith(".partial") or p.name.startswith(".status")]


@pytest.mark.parametrize(
    "room_kb",
    [pytest.param(12, marks=exhaustive), pytest.param(60, marks=exhaustive), 400],
    ids=["at the start", "at the first save", "at the second"],
)
def test_one_line_says_which_file_and_what_is_free_and_with_room_the_run_goes_on(
    room_kb: int, small: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = small / "run"
    words = [*TINY, f"run_dir={run_dir}", *EVERY, "train.steps=6"]
    leave(small, room_kb)
    assert main(words) == 1
    line, *more = capsys.readouterr().err.splitlines()
    at = rf"{re.escape(str(run_dir))}/\S+: {FULL}: the file needs \d+ bytes, \d+ are free"
    save_of = r"rank \d: checkpoint step-00000\d was not written: "
    assert re.match(rf"error: ({save_of})?(rank \d: )?{at}", line)
    assert not [m for m in more if not re.match(r"also |log: ", m)]
    assert status(run_dir)["status"] == "failed"
    assert FULL in status(run_dir)["error"]
    assert left(run_dir) == []
    last = latest(run_dir / "checkpoints")
    assert (last is not None) == (room_kb == 400)
    assert last is None or verify(last) == []

    (small / "ballast").unlink()
    assert main([*words[:-2], "checkpoint.keep=1", words[-1]]) == 0
    assert losses(run_dir)[-3:] == losses(straight)[-3:]
    assert steps(run_dir) == [1, 2, 3, 4, 5, 6]
    assert tensors(run_dir, 6) == tensors(straight, 6)
    assert left(run_dir) == []


@pytest.mark.parametrize("how", ["false", "true"], ids=["blocking", "async"])
def test_training_goes_on_without_the_checkpoints_that_cannot_be_written(
    how: str, tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, 2, 4)
    words = (*EVERY, f"checkpoint.async={how}", "checkpoint.on_error=continue", "train.steps=8")
    run_dir = tmp_path / "run"
    assert main([*TINY, f"run_dir={run_dir}", *words]) == 0
    said = capsys.readouterr().out
    for step in (2, 4):
        where = f"{run_dir}/checkpoints/step-00000{step}.partial/x"
        assert (
            f"checkpoint step-00000{step} was not written: rank 1: {where}: {FULL}; "
            "training continues without it (checkpoint.on_error=continue)\n"
        ) in said
    assert said.endswith(f": {run_dir}; 2 checkpoints could not be written\n")
    assert checkpoints(run_dir) == ["step-000006", "step-000008"]
    assert tensors(run_dir, 6).keys() == tensors(straight, 6).keys()
    assert left(run_dir) == []
    assert status(run_dir)["metrics"]["unsaved"] == 2
    assert status(run_dir)["metrics"]["saved_step"] == 8
    told = {row["step"]: row.get("unsaved") for row in metrics(run_dir)}
    assert told[8] == 2
    assert told[2] is None


def test_a_last_save_that_fails_is_a_failure_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, 4)
    run_dir = tmp_path / "run"
    assert main([*TINY, f"run_dir={run_dir}", *EVERY, "checkpoint.on_error=continue", "train.steps=4"]) == 1
    told = f"checkpoint step-000004 was not written: rank 1: {run_dir}/checkpoints/step-000004.partial/x: {FULL}"
    assert status(run_dir)["error"].partition(": ")[2] == told
    assert capsys.readouterr().err.splitlines()[0].partition(": ")[2].partition(": ")[2] == told
    assert checkpoints(run_dir) == ["step-000002"]


def test_only_the_file_system_is_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RankWriter, *rest: object) -> object:
        raise ValueError("not one record of each rank")

    monkeypatch.setattr(RankWriter, "write", broken)
    words = [*TINY, f"run_dir={tmp_path}/run", *EVERY, "checkpoint.on_error=continue", "train.steps=3"]
    assert main(words) == 1


def test_metrics_wait_for_room_when_training_is_to_go_on(
    small: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from step 2 to step 30; the rows before 20 fit in the block that the file already has."""
    run_dir, before = small / "run", Metrics.write

    def write(self: Metrics, row: dict[str, float]) -> None:
        if row.get("step") == 2:
            leave(small, 0)
        if row.get("step") == 30:
            (small / "ballast").unlink()
        before(self, row)

    monkeypatch.setattr(Metrics, "write", write)
    words = [*TINY, f"run_dir={run_dir}", "checkpoint.on_error=continue", "train.steps=32", "steps=[train]"]
    assert main(words) == 0
    assert steps(run_dir) == list(range(1, 33))
    (said,) = [r.getMessage() for r in caplog.records if FULL in r.getMessage() and "report.html" not in r.getMessage()]
    told = rf"{run_dir}/metrics\.jsonl: {FULL}: the file needs \d+ bytes, 0 are free; rows wait in memory until .*"
    assert re.fullmatch(told, said)


@pytest.mark.parametrize("patient", [True, False])
def test_rows_that_never_find_room_are_a_failure_and_no_row_is_torn(small: Path, patient: bool) -> None:
    written: list[int] = []

    def write() -> None:
        with Metrics(small / "metrics.jsonl", patient=patient) as rows:
            leave(small, 0)
            for step in range(1, 400):
                rows.write({"step": step, "loss": 1.0})
                written.append(step)

    with pytest.raises(Unwritten, match=FULL):
        write()
    assert len(written) == 399 if patient else len(written) < 399
    assert [row["step"] for row in read(small / "metrics.jsonl")] == written[: len(read(small / "metrics.jsonl"))]
    assert (small / "metrics.jsonl").read_bytes().endswith((b"\n", b""))
    assert {p.name for p in small.iterdir()} == {"metrics.jsonl", "ballast"}


@pytest.fixture
def limit() -> Iterator[None]:
    """Limit the files of this process to 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_limit_of_file_size_is_told_too(tmp_path: Path, limit: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, f"run_dir={tmp_path}/run", "model.dim=64", "data.vocab_size=256", "train.steps=1"]
    assert main(words) == 1
    line = capsys.readouterr().err.splitlines()[0]
    assert re.search(r"File too large: the file needs \d+ bytes, 65536 are allowed \(ulimit -f\)", line)
    assert status(tmp_path / "run")["status"] == "failed"


def test_the_status_has_room_on_a_full_disk_and_leaves_nothing_beside_it(small: Path) -> None:
    run_folder.write_status(small, status="running")
    run_folder.reserve_status(small)
    leave(small, 0)
    error = "x" * 9000
    run_folder.write_status(small, status="failed", error=error)
    assert run_folder.read_status(small) == {"status": "failed", "error": error}
    assert {p.name for p in small.iterdir()} == {"status.json", "ballast"}
    leave(small, 0)
    with pytest.raises(OSError, match=FULL):
        run_folder.write_status(small, status="failed", error="x" * 90000)
    assert json.loads((small / "status.json").read_text())["error"] == error
    assert {p.name for p in small.iterdir()} == {"status.json", "ballast"}


def test_a_full_disk_loses_the_output_of_a_rank_but_not_its_work(small: Path) -> None:
    leave(small, 16)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            log.configure(1, small)
            for stream in (sys.stdout, sys.stderr):
                print("x" * 100_000, file=stream, flush=True)
            logging.getLogger("launcher").info("x" * 100_000)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert {*(small / "logs/rank1.log").read_text()} <= {"x", "\n"}


@pytest.mark.parametrize("code", [errno.EROFS, errno.EDQUOT], ids=["read-only", "quota"])
def test_whatever_the_disk_says_it_is_one_line(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From step 3 on, every write to the metrics fails."""
    run_dir, before, rows = tmp_path / "run", os.write, []

    def write(fd: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(run_dir / "metrics.jsonl"):
            rows.append(data)
            if len(rows) > 2:
                raise OSError(code, os.strerror(code))
        return before(fd, data)

    monkeypatch.setattr(os, "write", write)
    assert main([*TINY, f"run_dir={run_dir}", "train.steps=4", "checkpoint.every=2"]) == 1
    line, *more = capsys.readouterr().err.splitlines()
    room = r": the file needs \d+ bytes, \d+ are free" if code == errno.EDQUOT else ""
    told = rf"{re.escape(str(run_dir))}/metrics\.jsonl: {os.strerror(code)}{room}"
    assert re.fullmatch(f"error: {told}", line)
    assert more == []
    assert (status(run_dir)["status"], steps(run_dir)) == ("failed", [1, 2])
    assert re.fullmatch(told, status(run_dir)["error"])


def test_a_console_that_is_a_file_on_a_full_disk_ends_no_run(small: Path, tmp_path: Path) -> None:
    leave(small, 4)
    command = [sys.executable, "-m", "launcher", *TINY, f"run_dir={tmp_path}/run", "train.steps=2"]
    with (small / "slurm.out").open("w") as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert status(tmp_path / "run")["status"] == "done"
    assert (small / "slurm.out").stat().st_size <= 4096

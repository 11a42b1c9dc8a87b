"""A user's own loggers in their own processes: what they get, and that none ends or blocks a run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.__main__ import main
from launcher.extras.loggers import process as logger_process
from launcher.extras.loggers import process as start
from launcher.job.compose import compose
from launcher.optional import install_command
from tests.run.launching import ROOT, TINY, metrics, run, shape, status

ALLOW = "security.allow=[tests,nonesuch]"
OWN = "tests.run.own_loggers"


def others(*each: str) -> list[str]:
    listed = ", ".join(f"{{_target_: {OWN}.{one}}}" for one in each)
    return [*shape(), "schedule=constant", f"logger.others=[{listed}]", ALLOW]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_a_logger_gets_config_plan_folder_all_rows_and_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, bare = tmp_path / "kept", tmp_path / "bare"
    words = others(f"Keeps, path: {kept}", f"Bare, path: {bare}")
    folder = run(tmp_path / "run", *words, "train.eval_every=2")
    first, *rows, last = lines(kept)
    assert first["start"] == {
        "config": yaml.safe_load((folder / "config.yaml").read_text()),
        "plan": (folder / "plan.txt").read_text(),
        "folder": str(folder),
    }
    assert [line["row"] for line in rows] == metrics(folder)
    assert last == {"close": True}
    assert bare.read_text().split() == [str(row["step"]) for row in metrics(folder)]
    assert warned(caplog) == []


def test_a_logger_that_is_added_later_gets_the_rows_of_earlier_starts_once(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    folder = run(tmp_path / "run", *shape(), "schedule=constant", steps=2)
    words = others(f"Keeps, path: {kept}")
    run(folder, *words, steps=3)
    run(folder, *words, steps=5)
    assert [line["row"]["step"] for line in lines(kept) if "row" in line] == [1, 2, 3, 4, 5]
    assert [next(iter(line)) for line in lines(kept)] == [
        "start",
        *3 * ["row"],
        "close",
        "start",
        *2 * ["row"],
        "close",
    ]


def test_secrets_of_its_arguments_are_in_no_file_of_the_run(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    folder = run(tmp_path / "run", *others(f"Keeps, path: {kept}, api_key: hunter2hunter2"), steps=1)
    assert lines(kept)[0]["start"]["config"]["logger"]["others"][0]["api_key"] == "***"
    found = [p for p in [kept, *folder.rglob("*")] if p.is_file() and b"hunter2" in p.read_bytes()]
    assert found == []


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("Fails, path: {kept}, where: __init__", "KeyError: 'no such thing' {at}; the run continues without it"),
        ("Fails, path: {kept}, where: on_start", "KeyError: 'no such thing' {at}; the run continues without it"),
        ("Fails, path: {kept}, where: close", "KeyError: 'no such thing' {at}; the run continues without it"),
        ("Dies", "its process ended with exit code 3, 3 of 3 rows not sent; see {folder}/loggers/others.0.log"),
        ("Hangs, where: on_start", "3 of 3 rows not sent within 1 s (logger.wait_s); metrics.jsonl has all rows"),
        ("Hangs, where: log", "3 of 3 rows not sent within 1 s (logger.wait_s); metrics.jsonl has all rows"),
    ],
    ids=lambda value: value.partition("; ")[0].partition(", path")[0] if "'" not in value else "",
)
def test_a_logger_that_fails_ends_no_run_and_no_other_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, says: str
) -> None:
    kept, good = tmp_path / "kept", tmp_path / "good"
    words = others(kind.format(kept=kept), f"Keeps, path: {good}")
    wait_s = 1 if "Hangs" in kind else 300
    folder = run(tmp_path / "run", *words, f"logger.wait_s={wait_s}", steps=3)
    assert status(folder)["status"] == "done"
    (said,) = [text for text in warned(caplog) if text.startswith("logger.others.0")]
    at = f'(own_loggers.py, in {kind.rpartition(": ")[2]}: raise KeyError("no such thing"))'
    assert re.sub(r"py:\d+", "py", said) == f"logger.others.0: {says.format(at=at, folder=folder.resolve())}"
    if wait_s == 300:
        assert [line["row"]["step"] for line in lines(good) if "row" in line] == [1, 2, 3]


def test_a_row_that_it_cannot_take_is_left_out_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "kept"
    run(tmp_path / "run", *others(f"Fails, path: {kept}, where: log, step: 2"), "logger.wait_s=300", steps=4)
    assert [line["row"]["step"] for line in lines(kept)] == [1, 3, 4]
    assert [re.sub(r"py:\d+", "py", text) for text in warned(caplog)] == [
        "logger.others.0: step 2: KeyError: 'no such thing' (own_loggers.py, in log: "
        'raise KeyError("no such thing")); the run continues',
        "logger.others.0: 1 of 4 rows not logged; metrics.jsonl has all rows",
    ]


def begun(folder: Path, one: str, *words: str) -> logger_process.LoggerProcess:
    (folder / "config.yaml").write_text("name: x\n")
    (folder / "plan.txt").write_text("a plan\n")
    (process,) = start.begun(compose([*TINY, *others(one), *words]).job, folder, 0)
    return process


def test_rows_beyond_those_that_may_wait_are_lost_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger_process, "MOST_WAITING", 3)
    process = begun(tmp_path, "Hangs, where: on_start")
    for step in range(1, 7):
        process.feed(json.dumps({"step": step, "text": "x" * 1_000_000}).encode(), step)  # more than a pipe holds
    logger_process.end([process], "done", 0)
    assert warned(caplog) == [
        "logger.others.0: too slow: 3 rows wait, and further rows are dropped, from step 4 on",
        "logger.others.0: 6 of 6 rows not sent within 0 s (logger.wait_s); metrics.jsonl has all rows",
    ]


def test_a_logger_that_hangs_at_its_end_is_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = begun(tmp_path, "Hangs, where: close")
    for step in (1, 2, 3):
        process.feed(b'{"step": %d}' % step, step)
    while process.busy() and process.taken < 3:
        time.sleep(0.05)
    logger_process.end([process], "done", 0.5)
    assert warned(caplog) == ["logger.others.0: did not end within 0.5 s (logger.wait_s), and was stopped"]


KILLED = """
import os, sys, signal
from pathlib import Path
from tests.extras.loggers.test_loggers import begun
process = begun(Path(sys.argv[1]), *sys.argv[2:])
print(process.pid, flush=True)
for step in range(1, 4):
    process.feed(b'{"step": %d}' % step, step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(*words: object) -> int:
    """Start a run that is killed after three rows, and return the process id of its logger."""
    command = [sys.executable, "-c", KILLED, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    return int(done.stdout)


@pytest.mark.parametrize("where", ["on_start", "log", "close"])
def test_one_that_hangs_ends_after_a_run_that_is_killed(tmp_path: Path, where: str) -> None:
    file = Path(f"/proc/{killed(tmp_path, f'Hangs, where: {where}', 'logger.wait_s=0')}/stat")
    while file.exists() and " Z " not in file.read_text():  # its new parent may not wait for it
        time.sleep(0.05)


def test_a_run_that_is_killed_loses_no_rows(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    killed(tmp_path, f"Keeps, path: {kept}")
    while not kept.is_file() or lines(kept)[-1] != {"close": True}:
        time.sleep(0.05)
    assert [line["row"]["step"] for line in lines(kept) if "row" in line] == [1, 2, 3]


CALLED = "on_start(config, plan, folder), log(row), close()"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            f"{{_target_: {OWN}.Silent}}",
            [f"{OWN}.Silent: has no method log; a logger has {CALLED}, of which log is required"],
        ),
        (
            f"{{_target_: {OWN}.Unfit}}",
            [
                f"{OWN}.Unfit: {text}"
                for text in (
                    "cannot be called as on_start(config, plan, folder): too many positional arguments",
                    "cannot be called as log(row): missing a required argument: 'extra'",
                    "cannot be called as close(): missing a required argument: 'how'",
                )
            ],
        ),
        (
            f"{{_target_: {OWN}.Keeps}}",
            [f"{OWN}.Keeps: its arguments do not fit: missing a required argument: 'path'"],
        ),
        (f"{{_target_: {OWN}.Gone}}", [f"{OWN}.Gone: {OWN} has no 'Gone'"]),
        (
            "{_target_: nonesuch.Gone}",
            ["nonesuch.Gone: there is no module nonesuch on sys.path; start in the folder that contains it"],
        ),
    ],
    ids=["no log", "methods", "arguments", "no class", "no module"],
)
def test_a_logger_without_the_required_methods_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str, says: list[str]
) -> None:
    words = [*TINY, *shape(), f"logger.others=[{typed}]", ALLOW, "train.steps=4", f"run_dir={tmp_path}/run"]
    assert main(words) == 2
    many = f"{len(says)} problem{'s' if len(says) > 1 else ''}"
    found = "\n".join(
        f"  logger.others.0._target_: {text}\n    set by: logger.others=[{typed}] (command line)\n" for text in says
    )
    assert capsys.readouterr().err == f"error: {many} in this request; nothing was started\n\n{found}"
    assert not (tmp_path / "run").exists()


def test_a_package_that_is_not_trusted_is_refused_and_nothing_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, *shape(), "logger.others=[{_target_: nonesuch.Logger}]", "train.steps=4", "show=plan"]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        "  logger.others.0._target_: nonesuch.Logger: package 'nonesuch' is not trusted: there is no such package\n"
        "    set by: logger.others=[{_target_: nonesuch.Logger}] (command line)\n"
    )


@pytest.mark.parametrize(
    ("asked", "key", "lacks"),
    [
        ("logger=wandb", "wandb", "wandb"),
        ("logger.wandb=true", "wandb", "wandb"),
        ("logger=[csv,mlflow]", "mlflow", "mlflow"),
        ("logger=mlflow", "mlflow", "sqlalchemy"),
        ("logger.mlflow={tracking_uri: http://127.0.0.1:5000}", "mlflow", "mlflow"),
        ("logger=trackio", "trackio", "trackio"),
    ],
)
def test_a_missing_package_of_a_logger_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str,
    key: str,
    lacks: str,
) -> None:
    real = util.find_spec
    there = {name: real("json") for names in start.PACKAGES.values() for name in names if name != lacks}
    monkeypatch.setattr(start, "find_spec", lambda name: there.get(name))
    assert main([*TINY, *shape(), asked, f"run_dir={tmp_path}/run", "train.steps=1"]) == 2
    shipped = f"    set in: conf/logger/{key}.yaml:2:1\n          | {key}:\n"
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  logger.{key}: {lacks} is not installed: {install_command(key)}\n"
        + (f"    set by: {asked} (command line)\n" if "." in asked else shipped)
    )
    assert not (tmp_path / "run").exists()

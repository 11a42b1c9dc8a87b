"""Standard input, output and error may be closed, as cron and daemons leave them: every command runs to its end."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CLOSED = {"output": ">&-", "error": "2>&-", "both": ">&- 2>&-", "all three": "<&- >&- 2>&-"}
ASKING = {"--help": 0, "train.stepz=3": 2, "recipe=mlp_autoparallel show=plan": 0, "status nowhere": 2}


def shell(words, redirected, folder):
    command = f"{shlex.join([sys.executable, '-m', 'launcher', *words])} {redirected}"
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(["sh", "-c", command], capture_output=True, check=False, cwd=folder, env=where, text=True)


def code(words, closed, folder):
    return shell(words, closed, folder).returncode


@pytest.mark.parametrize("closed", CLOSED.values(), ids=CLOSED)
@pytest.mark.parametrize("words", ASKING)
def test_a_command_that_asks_ends_with_its_code(words, closed, tmp_path):
    assert code(words.split(), closed, tmp_path) == ASKING[words]


@pytest.mark.parametrize("closed", CLOSED.values(), ids=CLOSED)
def test_a_run_trains_and_saves(closed, tmp_path):
    words = ["recipe=mlp_autoparallel", "train.steps=2", "steps=[train,save]", "run_dir=run"]
    assert code(words, closed, tmp_path) == 0
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "done"
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert len([*(tmp_path / "run/checkpoints").glob("step-*/manifest.json")]) == 1


def test_a_full_standard_output_is_named_and_the_run_goes_on(tmp_path):
    words = "recipe=mlp_autoparallel train.steps=2 steps=[train] run_dir=run"
    done = shell(words.split(), "2>&1 >/dev/full", tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("standard output: No space left on device; what does not fit is lost\n") == 1


def test_a_request_is_refused_with_its_code_if_standard_error_is_full(tmp_path):
    assert code(["train.stepz=3"], "2>/dev/full", tmp_path) == 2


def test_a_file_opened_later_gets_no_standard_descriptor(tmp_path):
    script = (
        "from launcher.runtime.stdio import open_missing; import os, sys; open_missing(); "
        "fd = os.open('x', os.O_CREAT); "
        "open('said', 'w').write(f'{fd > 2} {[os.get_inheritable(n) for n in range(3)]}'); "
        "print('lost'); print('lost', file=sys.stderr, flush=True); sys.stdin.read()"
    )
    words = shlex.join([sys.executable, "-c", script])
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run(["sh", "-c", f"{words} <&- >&- 2>&-"], check=True, cwd=tmp_path, env=where)
    assert (tmp_path / "said").read_text() == "True [True, True, True]"

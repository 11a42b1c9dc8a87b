"""Metrics survive a kill and continue when the run is resumed."""

from __future__ import annotations

import json
import os
import resource

import pytest

from launcher.checkpoint.tensorfile.disk import Unwritten
from launcher.errors import RunError
from launcher.runtime.training.metrics_file import Metrics, read

ROWS = [{"step": n, "loss": n / 2} for n in range(1, 6)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        for row in ROWS:
            metrics.write(row)
    return path


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.write({"step": 1, "loss": 2.5})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n'


def test_rows_from_the_resumed_step_on_are_written_again(path):
    with Metrics(path, first_step=4) as metrics:
        metrics.write({"step": 4, "loss": 9.0})
    assert read(path) == [*ROWS[:3], {"step": 4, "loss": 9.0}]


@pytest.mark.parametrize("tail", [b'{"step": 6, "lo', b"\0\0\0\0\n", b"\0" * 5000, b'{"step": 6}'])
def test_a_torn_tail_is_cut_off(path, tail):
    with path.open("ab") as file:
        file.write(tail)
    with Metrics(path, first_step=6) as metrics:
        metrics.write({"step": 6})
    assert path.read_text() == "".join(json.dumps(row) + "\n" for row in [*ROWS, {"step": 6}])


FOREIGN = {
    '{"step": "x", "loss": 1.0}': "step is 'x', not a whole number from 0 on",
    '{"step": -5, "loss": 1.0}': "step is -5, not a whole number from 0 on",
    '{"step": true}': "step is True, not a whole number from 0 on",
    '{"step": 1.5}': "step is 1.5, not a whole number from 0 on",
    '{"step": 6, "after": null}': "after is None, not a whole number from 0 on",
    '{"step": 6, "steps": [1]}': "steps is [1], not a whole number from 0 on",
    '{"loss": 1.0}': "it has no step",
    "null": "None is not a JSON object",
    "[1]": "[1] is not a JSON object",
    '{"step": 6, "loss": NaN}': "'loss' is nan, not a finite number",
    '{"step": 6, "loss": 1e999}': "'loss' is inf, not a finite number",
    f'{{"step": 6, "loss": {10**400}}}': "'loss' is 1000000000000...00000000000000, not a finite number",
}


@pytest.mark.parametrize(("row", "why"), FOREIGN.items(), ids=map(str, range(len(FOREIGN))))
def test_a_row_that_no_run_has_written_is_refused_and_stays(path, row, why):
    with path.open("a") as file:
        file.write(f"{row}\n")
    before = path.read_bytes()
    cure = "correct the line, or move the file away to continue without its rows"
    with pytest.raises(RunError) as error:
        Metrics(path, first_step=6)
    assert str(error.value) == f"{path}: line 6: not a row of a run: {why}; {cure}"
    assert path.read_bytes() == before


def test_a_line_that_is_not_json_is_refused_if_a_row_follows(path):
    path.write_text('{"step": 1}\n{"step"\n{"step": 2}\n')
    with pytest.raises(RunError, match="line 2: not a row of a run: it is not JSON, and more follows; "):
        Metrics(path, first_step=6)
    assert len(path.read_bytes().splitlines()) == 3


def test_a_file_of_any_size_takes_little_memory(path):
    os.truncate(path, 1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RunError, match="line 6: not a row of a run: it is not JSON, and more follows; "):
        Metrics(path, first_step=6)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert path.stat().st_size == 1 << 40


def test_starting_over_starts_empty(path):
    with Metrics(path):
        assert path.read_text() == ""


def test_nan_and_infinite_metrics_are_written_as_null(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.write({"step": 1, "loss": float("nan"), "lr": float("inf")})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "lr": null}\n'


def test_a_table_has_a_column_for_every_key(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl", table=tmp_path / "metrics.csv") as metrics:
        metrics.write({"step": 1, "loss": 2.5})
        metrics.write({"step": 1, "val_loss": 2.0})
    assert (tmp_path / "metrics.csv").read_text() == "step,loss,val_loss\n1,2.5,\n1,,2.0\n"


def test_a_file_that_may_not_grow_says_how_long_it_would_be(tmp_path):
    """The rows that do not fit have fewer bytes than ``ulimit -f`` allows for the full file."""
    path, before = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with Metrics(path) as metrics:
        metrics.write({"step": 1, "loss": 1.0})
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, before[1]))
        try:
            with pytest.raises(Unwritten) as error:
                metrics.write({"step": 2, "loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(error.value) == (
        f"{path}: File too large: the file needs {2 * size} bytes, {size + 9} are allowed (ulimit -f)"
    )
    assert [row["step"] for row in read(path)] == [1]

"""Metrics survive a kill and continue when the run is resumed."""

from __future__ import annotations

import json
import resource

import pytest

from launcher.checkpoint.tensorfile.disk import Unwritten
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


@pytest.mark.parametrize("tail", [b'{"step": 6, "lo', b"\0\0\0\0\n", b"[1]\n", b'{"step": 6}'])
def test_a_torn_tail_is_cut_off(path, tail):
    with path.open("ab") as file:
        file.write(tail)
    with Metrics(path, first_step=6) as metrics:
        metrics.write({"step": 6})
    assert path.read_text() == "".join(json.dumps(row) + "\n" for row in [*ROWS, {"step": 6}])


@pytest.mark.parametrize("row", [b'{"step": "x", "loss": 1.0}\n', b'{"step": 6, "after": null}\n'])
def test_a_row_whose_step_is_no_number_ends_the_file(path, row):
    with path.open("ab") as file:
        file.write(row)
    assert read(path) == ROWS


def test_a_file_that_grew_by_zeros_is_not_read_into_memory(path):
    with path.open("ab") as file:
        file.truncate(1 << 40)
    with Metrics(path, first_step=6) as metrics:
        metrics.write({"step": 6})
    assert read(path) == [*ROWS, {"step": 6}]


def move(path):
    path.parent.rename(path.parent.with_name("moved"))


def folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("happens", [move, folder])
def test_the_table_has_the_rows_of_the_file_that_was_opened(tmp_path, caplog, happens):
    run = tmp_path / "run"
    run.mkdir()
    path = run / "metrics.jsonl"

    def fail():
        with Metrics(path, table=run / "metrics.csv") as metrics:
            metrics.write({"step": 1, "loss": 2.5})
            happens(path)
            raise ValueError("the failure")

    with pytest.raises(ValueError, match="the failure"):
        fail()
    if happens is folder:
        assert (run / "metrics.csv").read_text() == "step,loss\n1,2.5\n"
    else:
        assert "metrics.csv" in caplog.text


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

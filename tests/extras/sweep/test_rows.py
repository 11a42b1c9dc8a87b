"""The rows of a cell are read while they are written: only full lines, truncated where steps are trained again."""

from __future__ import annotations

import json
import math

import pytest

from launcher.extras.sweep.metrics_rows import RowReader, measured, reports


def text(*steps: int, **more) -> str:
    return "".join(json.dumps({"step": n, "loss": 10.0 - n, **more}) + "\n" for n in steps)


def test_rows_are_read_as_they_come(tmp_path):
    reader = RowReader(tmp_path)
    assert reader.read() == []
    path = tmp_path / "metrics.jsonl"
    path.write_text(text(1, 2) + '{"step": 3, "lo')
    assert [row["step"] for row in reader.read()] == [1, 2]
    path.write_text(text(1, 2, 3))
    assert [row["step"] for row in reader.read()] == [1, 2, 3]


def test_a_file_that_was_cut_back_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text(1, 2, 3, 4))
    reader = RowReader(tmp_path)
    reader.read()
    path.write_text(text(1, 2))
    assert [row["step"] for row in reader.read()] == [1, 2]


def test_steps_that_come_again_take_the_place_of_what_was_said(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text(1, 2, 3) + json.dumps({"step": 3, "val_loss": 1.0}) + "\n")
    reader = RowReader(tmp_path)
    assert len(reader.read()) == 4
    with path.open("a") as file:
        file.write(text(2, again=True))
    assert [(row["step"], row.get("again")) for row in reader.read()] == [(1, None), (2, True)]


def test_an_invalid_row_makes_the_reader_start_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text(1) + "xx\n")
    reader = RowReader(tmp_path)
    assert reader.read() == []
    path.write_text(text(1, 2, 3))
    assert [row["step"] for row in reader.read()] == [1, 2, 3]


def test_only_rows_with_the_metric_are_reported():
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 2, "val_loss": 1.5}]
    assert reports(rows, "val_loss") == [(2, 1.5)]
    (_, first), (step, second) = reports(rows, "loss")
    assert (first, step) == (2.0, 2)
    assert math.isnan(second)


@pytest.mark.parametrize(
    ("times", "found"),
    [((9.0, 1.0, 3.0, 2.0), 2.0), ((9.0,), 9.0), ((), None)],
    ids=["behind-the-first", "one", "none"],
)
def test_the_first_step_does_not_count_where_there_are_others(times, found):
    rows = [{"step": n, "loss": 1.0, "step_ms": t, "memory_mb": 10.0 - n} for n, t in enumerate(times)]
    assert measured(rows).get("step_ms") == found
    if len(times) > 1:
        assert measured(rows)["memory_mb"] == 9.0


@pytest.mark.parametrize("name", ["run", "run/metrics.jsonl"])
def test_rows_are_not_read_through_a_link(tmp_path, name):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    if name != "run":
        (tmp_path / "run").mkdir()
    (tmp_path / name).symlink_to(theirs if name == "run" else theirs / "metrics.jsonl")
    assert RowReader(tmp_path / "run").read() == []

"""Results of a sweep: sorted by the metric, averaged over repeats, and the Pareto front."""

from __future__ import annotations

import csv

import pytest

from launcher.extras.sweep import summary
from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.loss_differences import Gap
from launcher.extras.sweep.ranking import ranked_results
from launcher.extras.sweep.summary import WIDTH
from launcher.job.sweep_grid import Cell


def result(number: int, value: float | None = None, *, status: str = "done", repeat: int = 0, lr: str = "", **more):
    word = f"optim.lr={lr or number}"
    cell = Cell(f"{number}-x", (word, f"seed={repeat}"), (word,), repeat)
    metrics = {k: v for k, v in more.items() if k not in ("same_as", "error")}
    metrics |= {} if value is None else {"val_loss": value}
    return CellResult(cell, status, metrics, error=more.get("error", ""), same_as=more.get("same_as", ""))


def ranked(*found: CellResult, goal: str = "min"):
    return ranked_results(found, {}, "val_loss", goal, {})


def names(lines) -> list[str]:
    return [line.name for line in lines]


@pytest.mark.parametrize(("goal", "order"), [("min", "1203"), ("max", "0213")])
def test_the_best_comes_first_and_what_has_no_value_last(goal, order):
    found = ranked(result(0, 3.0), result(1, 1.0), result(2, 2.0), result(3, float("nan")), goal=goal)
    assert names(found.lines) == [f"{n}-x" for n in order]
    assert found.best.name == f"{order[0]}-x"


def test_a_cell_that_is_not_done_has_no_value():
    found = ranked(result(0, 1.0, status="pruned"), result(1, 2.0), result(2, status="failed"))
    assert names(found.lines) == ["1-x", "0-x", "2-x"]
    assert ranked(result(0, status="failed")).best is None


def test_repeats_are_sorted_by_their_mean_and_told_with_their_spread():
    found = ranked(
        result(0, 1.0, lr="a"),
        result(1, 5.0, lr="a", repeat=1),
        result(2, 2.0, lr="b"),
        result(3, 2.5, lr="b", repeat=1),
    )
    assert names(found.lines) == ["2-x", "3-x", "0-x", "1-x"]
    mean, spread = found.groups[("optim.lr=a",)]
    assert mean == 3.0
    assert spread == pytest.approx(8**0.5)
    assert "  cell  lr  val_loss  mean  spread  status" in summary.printed(found, {})
    assert "  2     b   2         2.25  0.3536  done" in summary.printed(found, {})


def test_the_front_is_what_nothing_beats_in_everything():
    found = ranked(
        result(0, 1.0, tokens_per_s=10.0, memory_mb=100.0),
        result(1, 2.0, tokens_per_s=20.0, memory_mb=100.0),
        result(2, 2.0, tokens_per_s=9.0, memory_mb=100.0),
        result(3, 3.0, tokens_per_s=5.0, memory_mb=50.0),
        result(4, 1.0, tokens_per_s=10.0, memory_mb=100.0, same_as="0-x"),
        result(5, 0.5),
    )
    assert sorted(names(found.front)) == ["0-x", "1-x", "3-x"]


def test_the_file_has_a_column_for_each_key_and_figure(tmp_path):
    found = ranked(
        result(10, 1.0, tokens_per_s=10.0, memory_mb=100.0), result(2, status="failed", error="out of luck"),
        result(3, 1.5, same_as="10-x"),
    )  # fmt: skip
    summary.write_csv(tmp_path, found, {"10-x": Gap("2-x", 1e-9, 1e-3, 1e-5)})
    with (tmp_path / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["cell"] for row in rows] == ["2-x", "3-x", "10-x"]
    assert [row["optim.lr"] for row in rows] == ["2", "3", "10"]
    assert [row["error"] for row in rows] == ["out of luck", "", ""]
    assert [row["same_as"] for row in rows] == ["", "10-x", ""]
    assert [row["front"] for row in rows] == ["", "", "yes"]
    assert [row["gap_early"] for row in rows] == ["", "", "1e-09"]


def test_the_table_fits_a_terminal_whatever_varies():
    cells = [Cell(f"{n}-x", (), tuple(f"model.a_long_key_{k}={n}{'y' * 30}" for k in range(9))) for n in range(50)]
    found = ranked_results(
        [CellResult(c, "done", {"val_loss": 1.0, "step_ms": 5.0}) for c in cells], {}, "val_loss", "min", {}
    )
    shown = list(summary.printed(found, {}))
    assert max(map(len, shown)) <= WIDTH
    assert shown[-1] == "  and 10 more in summary.csv"
    assert len(shown) == 42


def test_numbers_that_differ_are_told():
    told = list(summary.printed(ranked(result(0, 1.0), result(1, 1.0)), {"1-x": Gap("0-x", 1e-2, 1e-2, 1e-5)}))
    assert told[-1] == "  1-x: losses differ from 0-x by 1.0e-02, 1e-05 is allowed"

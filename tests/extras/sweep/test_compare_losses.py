"""Cells that differ only in their layout must have the losses of the first of their kind; otherwise it is reported."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest

from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.loss_differences import EARLY, gaps, number_settings
from launcher.job.sweep_grid import Cell

ROWS = [{"step": n, "loss": 4.0 / n, "grad_norm": 1.0} for n in range(1, 9)]


def sweep(folder: Path, *found: tuple[str, list[dict]]) -> dict[str, float]:
    results = []
    for n, (layout, rows) in enumerate(found):
        name = f"{n}-x"
        (folder / name).mkdir(parents=True)
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = (
            "recipe=lm_single",
            f"optim.lr={0.1 if layout != 'other' else 1}",
            f"parallel.pipeline.scheduler={layout}",
        )
        results.append(CellResult(Cell(name, words, ()), "done"))
    precisions = dict.fromkeys((r.cell.name for r in results), "fp64")
    return gaps(folder, results, precisions)


def changed(step: int, **values) -> list[dict]:
    return [row | values if row["step"] == step else row for row in ROWS]


@pytest.mark.parametrize(
    ("mine", "early", "whole", "right"),
    [
        (ROWS, 0.0, 0.0, True),
        (changed(2, loss=2.0 + 2e-12), 1e-12, 1e-12, True),
        (changed(2, loss=2.02), 0.0099, 0.0099, False),
        (changed(2, grad_norm=1.1), 0.0909, 0.0909, False),
        (changed(EARLY + 1, loss=0.808), 0.0, 0.0099, True),
        (changed(1, loss=None), inf, inf, False),
        (ROWS[:-1], inf, inf, False),
    ],
    ids=["same", "rounding", "loss", "gradient", "later", "nan", "fewer-steps"],
)
def test_differences_are_judged_by_the_early_steps(tmp_path, mine, early, whole, right):
    gap = sweep(tmp_path, ("1f1b", ROWS), ("gpipe", mine))["1-x"]
    assert gap.of == "0-x"
    assert gap.early == pytest.approx(early, rel=0.01)
    assert gap.all_steps == pytest.approx(whole, rel=0.01)
    assert gap.right is right


def test_cells_of_other_numbers_are_not_compared(tmp_path):
    assert sweep(tmp_path, ("1f1b", ROWS), ("other", changed(1, loss=9.0))) == {}


def test_settings_that_change_numbers_exclude_the_layout():
    layout = ("+parallel.grid.tp=2", "operators=megatron", "launch.nproc=2", "parallel.pipeline.micro_batch_num=2")
    rest = ("recipe=lm_tp2", "optim.lr=1", "parallel.gradients_mean=false", "parallel.pipeline.loss_reduction=sum")
    assert number_settings(Cell("0", (*layout, *rest), ())) == rest

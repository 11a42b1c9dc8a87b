"""Law 10 on devices: every recipe trains two steps, runs every one of its steps, and writes all of its files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from launcher.job.compose import compose
from tests.fake_accelerator.on_devices.processes import launched
from tests.run import llama
from tests.run.test_recipes import SMALLER, check_files, check_steps


@pytest.mark.parametrize("recipe", SMALLER)
def test_every_recipe_trains_two_steps_and_runs_its_other_steps(recipe: str, tmp_path: Path) -> None:
    words = [f"recipe={recipe}", "train.steps=2", "launch.device=fake", f"runs={tmp_path}", *SMALLER[recipe]]
    if recipe == "smollm2_pp2_tp2":
        llama.write(tmp_path / "weights")
        words += llama.overrides(tmp_path / "weights")
    run = tmp_path / recipe / "0001"
    done = launched(*words, folder=run)
    check_files(run, len(list((run / "logs").glob("rank*.log"))))
    check_steps(run, list(compose(words).job.steps), dict(done.figures))

    # memory is the device's
    assert [row["step"] for row in done.rows] == [1, 2]
    for row in done.rows:
        assert math.isfinite(row["loss"])
        assert 0 < row["memory_mb"] == row["memory_reserved_mb"]

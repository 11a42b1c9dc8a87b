"""Law 1: the same job gives the same plan, byte for byte; that of every recipe is in ``golden/plans``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from launcher.job.compose import compose
from launcher.plan.plan import Plan
from launcher.plan.show.plan_json import as_json
from launcher.plan.show.text import SHORT, short, text
from launcher.planner.plan_job import plan_job
from tests.tiers import some

ROOT = Path(__file__).parents[1]
PLANS = Path(__file__).parent / "golden/plans"
OF_FOLDERS = {"sft_hf_pp2_tp2"}
"""Recipes whose plans depend on a folder and on transformers: see ``tests/real``."""
RECIPES = sorted({path.stem for path in (ROOT / "recipes").glob("*.yaml")} - OF_FOLDERS)
AGAIN = "the plan changed: if that is meant, run: python -m tests.test_golden_plans"


@pytest.fixture(autouse=True)
def _away_from_any_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run elsewhere, because the fallbacks of a recipe depend on files below the current folder."""
    monkeypatch.chdir(tmp_path)


@cache
def made(recipe: str) -> Plan:
    """Return the plan with a torch before 2.15, which keeps more memory."""
    with patch("launcher.planner.plan_job.keeps_messages", return_value=True):
        return plan_job(compose([f"recipe={recipe}"]).job)


def planned(recipe: str) -> str:
    return text(made(recipe)) + "\n"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_of_a_recipe_is_its_golden_text(recipe: str) -> None:
    golden = PLANS / f"{recipe}.txt"
    assert golden.is_file(), AGAIN
    assert planned(recipe) == golden.read_text(), AGAIN


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_of_a_recipe_is_a_page_with_every_section(recipe: str) -> None:
    whole, page = text(made(recipe)), short(made(recipe))
    assert len(page.splitlines()) == min(SHORT, len(whole.splitlines()))
    assert (page == whole) == (len(whole.splitlines()) <= SHORT)
    assert [row[:12] for row in page.splitlines() if row[2] != " "] == [
        row[:12] for row in whole.splitlines() if row[2] != " "
    ]


def test_there_is_no_golden_plan_without_its_recipe() -> None:
    assert sorted(path.stem for path in PLANS.iterdir()) == RECIPES, AGAIN


def test_the_same_process_plans_the_same_twice() -> None:
    job = compose(["recipe=lm_tied_pp2_hsdp2"]).job
    first, second = plan_job(job), plan_job(job)
    assert first == second
    assert hash(first) == hash(second)
    assert (text(first), as_json(first)) == (text(second), as_json(second))


HASHED = some(RECIPES)


def test_another_process_with_other_hashes_plans_the_same(tmp_path: Path) -> None:
    """This process has its own hash seed, too."""
    code = "from tests.test_golden_plans import HASHED, planned\nprint(*map(planned, HASHED), sep='', end='')"
    env = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    golden = "".join((PLANS / f"{recipe}.txt").read_text() for recipe in HASHED)
    assert (done.stdout, done.stderr) == (golden, ""), AGAIN


def write() -> None:
    """Write every golden plan again, and delete those without a recipe."""
    for stale in PLANS.glob("*.txt"):
        stale.unlink()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        for recipe in RECIPES:
            (PLANS / f"{recipe}.txt").write_text(planned(recipe))


if __name__ == "__main__":
    write()

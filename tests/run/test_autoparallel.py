"""The recipe of AutoParallel's own example: what its calls leave behind, and what of it the next run is held to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.checkpoint.of_plan import of_plan
from launcher.checkpoint.strategy_file import load
from launcher.decide import plan_job
from launcher.job.compose import compose
from launcher.plan import operator_file, peers
from launcher.runtime.metrics import read
from tests.run.launching import losses, status

WORDS = ("recipe=mlp_autoparallel", "steps=[train]", "train.steps=2", "checkpoint.every=2")
ASKED = {"params.json", "operators.json", "groups.json", "local_norm"}


def run(folder: Path, *words: str) -> Path:
    """In an empty folder of its own, where only ``folder`` is left."""
    folder.parent.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        assert main([*WORDS, f"run_dir={folder.name}", *words]) == 0
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("autoparallel") / "first")


def norms(folder: Path) -> list[list[dict[str, object]]]:
    return [read(folder / f"local_norm/rank{rank}.jsonl") for rank in range(4)]


def test_its_files_are_in_the_run_folder_and_hold_the_next_run(first: Path, tmp_path: Path) -> None:
    assert {p.name for p in first.iterdir()} >= ASKED
    plan = plan_job(compose(WORDS).job)
    assert load(first / "params.json") == of_plan(plan)
    assert (first / "operators.json").read_text() == operator_file.as_json(plan)
    assert (first / "groups.json").read_text() == peers.as_json(plan)
    assert [[(row["step"], row.keys()) for row in rank] for rank in norms(first)] == [
        [(n, {"step", "norm"}) for n in (1, 2)]
    ] * 4

    held = [f"parallel.{what}_strategy.load={first}/{what}s.json" for what in ("param", "operator")]
    second = run(tmp_path / "second", *held)
    a, b = (json.loads((folder / "plan.json").read_text()) for folder in (first, second))
    loads = [s["key"] for s in b["settings"] if s not in a["settings"]]
    assert loads == ["parallel.param_strategy.load", "parallel.operator_strategy.load"]
    assert {k: v for k, v in a.items() if k != "settings"} == {k: v for k, v in b.items() if k != "settings"}
    assert losses(second) == losses(first)
    assert norms(second) == norms(first)


def test_a_second_start_goes_on_with_them(first: Path, tmp_path: Path) -> None:
    again = run(shutil.copytree(first, tmp_path / "first"), "train.steps=3")
    assert status(again)["status"] == "done"
    assert [rank[:2] for rank in norms(again)] == norms(first)
    assert [[row["step"] for row in rank] for rank in norms(again)] == [[1, 2, 3]] * 4

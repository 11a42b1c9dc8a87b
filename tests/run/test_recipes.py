"""Law 10: every recipe really trains two steps, runs every one of its steps, and leaves all of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.__main__ import main
from launcher.checkpoint.read import open_checkpoint
from launcher.job.compose import compose
from launcher.job.schema.paths import TAKEN
from launcher.job.schema.steps import Evaluate
from tests.run import llama
from tests.run.launching import ROOT, metrics, status
from tests.run.test_autoparallel import ASKED

OF_SEVERAL = ["step_ms_median", "step_ms_worst", "worst_rank"]
FIGURES = ["step", "steps", "loss", "lr", "grad_norm", "RATE", "step_ms", "bubble", "memory_mb"]
LM = ("model.dim=16", "model.heads=2", "data.seq_len=16", "train.batch_size=16", "steps.evaluate.batches=1")
SMALLER = {  # settings that make two steps of it short
    "lm_tied_pp2_hsdp2": (*LM, "steps.sample.tokens=8"),
    "lm_single": (*LM, "steps.sample.tokens=8"),
    "lora_lm_pp2": (*LM, "steps.sample.tokens=8"),
    "chat_lm_pp2": ("steps.evaluate.batches=1",),
    "lm_pp4_interleaved": LM,
    "lm_tp2": (*LM, "steps.sample.tokens=8"),
    "broadcast_after_load": ("steps.evaluate.batches=1",),
    "lm_recompute": LM,
    "lm_drill": (*LM, "debug.drill.kill_rank.step=2", "checkpoint.every=1"),
    "mlp_propagated": ("steps.evaluate.batches=1",),
    "lm_recursive": LM,
    "mlp_autoparallel": ("steps.evaluate.batches=1",),
    "smollm2_pp2_tp2": ("data.seq_len=16", "steps.evaluate.batches=1", "steps.sample.tokens=4"),
    "resnet50_cifar_pp2": ("model.depth=18", "model.width=8", "train.batch_size=4", "steps.evaluate.batches=1"),
    "tied_pp2_to_single": ("data.seq_len=16", "steps.evaluate.batches=1"),
}
PLANNED = ("lm_8b_h100x64",)
"""Recipes for devices that no machine of these tests has: see ``tests/test_golden_plans.py``."""
REAL = ("sft_hf_pp2_tp2",)
"""Recipes of a folder that transformers reads: see ``tests/real/test_smollm2.py``."""


def test_every_recipe_is_here():
    assert sorted((*SMALLER, *PLANNED, *REAL)) == sorted(p.stem for p in (ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", SMALLER)
def test_every_recipe_trains_two_steps_and_runs_its_other_steps(recipe, tmp_path, capsys):
    words = [f"recipe={recipe}", "train.steps=2", f"runs={tmp_path}", *SMALLER[recipe]]
    if recipe == "smollm2_pp2_tp2":  # with its own weights: tests/real
        llama.write(tmp_path / "weights")
        words += llama.overrides(tmp_path / "weights")
    assert main(words) == 0, capsys.readouterr().err
    run = tmp_path / recipe / "0001"
    assert (tmp_path / recipe / "latest").resolve() == run
    job = compose(words).job
    said = status(run)
    assert (said["status"], said["steps"], said["overrides"]) == ("done", list(job.steps), words)
    n = len(list((run / "logs").glob("rank*.log")))
    ranks = [f"rank{k}.log" for k in range(n)]
    assert sorted(p.name for p in (run / "logs").iterdir()) == ["console.log", *ranks]
    check_files(run, n)
    check_metrics(run, n, "tokens_per_s" if job.data.name in ("text", "random_tokens", "chat") else "samples_per_s")
    check_steps(run, list(job.steps), said["metrics"])
    assert any(isinstance(s, Evaluate) for s in job.steps.values())


def check_files(run: Path, ranks: int) -> None:
    """Check the files that every run has, whatever its steps."""
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["version"], plan["name"]) == (1, run.parent.name)
    assert (run / "plan.txt").read_text().startswith(f"plan of {run.parent.name}\n")
    assert "show=plan-full" not in (run / "plan.txt").read_text()
    there = {p.name for p in run.iterdir() if not p.name.startswith(".")}
    assert there - set(TAKEN) == (ASKED if run.parent.name == "mlp_autoparallel" else set())
    assert (run / "timeline.svg").read_text().startswith("<svg")
    if "sharding" not in plan:
        assert (run / "memory.svg").read_text().startswith("<svg")
    assert json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert (run / "command.txt").read_text().startswith(f"python -m launcher recipe={run.parent.name} ")
    assert f"name: {run.parent.name}\n" in (run / "config.yaml").read_text()
    checkpoint = open_checkpoint(run / "checkpoints" / "step-000002")
    assert (checkpoint.manifest.world, checkpoint.state["step"]) == (ranks, 2)
    stages = {p.name for p in (checkpoint.folder / "strategy").iterdir()}
    assert {p.name for p in (run / "strategy").iterdir()} - {"merged.json"} == stages


def check_metrics(run: Path, ranks: int, rate: str) -> None:
    keys = FIGURES + (OF_SEVERAL if ranks > 1 else [])
    rows = [row for row in metrics(run) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert list(row) == [rate if key == "RATE" else key for key in keys]
        assert all(value is not None and value >= 0 for value in row.values())


def check_steps(run: Path, steps: list[str], figures: dict[str, float]) -> None:
    """Check the files and figures that each step leaves."""
    assert figures["saved_step"] == 2
    assert ("transform" in steps) == (run / "transformed" / "manifest.json").exists()
    assert ("merge_strategies" in steps) == (run / "strategy" / "merged.json").exists()
    exported = [str(p.relative_to(run / "exports")) for p in (run / "exports").rglob("*.safetensors")]
    assert ("export" in steps) == (len(exported) == 1)
    assert ("export" in steps) == ("exported_loss" in figures)
    if "export" in steps and "val_loss" in figures:
        assert figures["export_gap"] < 1e-5

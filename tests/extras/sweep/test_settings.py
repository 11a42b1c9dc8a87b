"""Impossible ``sweep`` settings are refused before anything runs, with a cure that works."""

from __future__ import annotations

import re

import pytest

from launcher.__main__ import main
from launcher.optional import install_command

LINE = (
    "-m", "recipe=lm_single", "model=lm_tiny", "model.dim=16", "data=random_tokens", "data.vocab_size=64",
    "data.seq_len=8", "data.samples=64", "train.batch_size=16", "train.steps=20", "steps=[train,evaluate]",
)  # fmt: skip
KNOWN = "val_loss, loss, seconds, memory_mb, samples_per_s, tokens_per_s, step_ms"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["optim.lr=interval(1e-4,1e-2)"],
            """
  optim.lr: interval(1e-4,1e-2): a grid needs a list of values, as in optim.lr=A,B; only samplers take intervals
    try:    sweep.sampler=tpe sweep.cells=20
""",
        ),
        (
            ["optim.lr=1,2", "sweep.cells=5"],
            """
  sweep.cells = 5: only for samplers; a grid runs every combination
    set by: sweep.cells=5 (command line)
    try:    sweep.cells=5 sweep.sampler=tpe
""",
        ),
        (
            ["optim.lr=1,2", "sweep.prune=asha"],
            """
  sweep.prune = asha: only for samplers; a grid runs every cell to its end
    set by: sweep.prune=asha (command line)

  sweep.prune = asha: needs val_loss during training, but no validation runs then
    set by: sweep.prune=asha (command line)
    try:    sweep.prune=asha train.eval_every=2
""",
        ),
        (
            ["optim.lr=1,2", "sweep.sampler=tpe"],
            """
  sweep.cells = null: set how many cells the sampler proposes, or set sweep.minutes
    set in: conf/config.yaml:LINE
          |   cells: null     # number of cells that a sampler proposes; null: as many as minutes allows
    try:    sweep.cells=20
""",
        ),
        (
            ["sweep.sampler=random", "sweep.minutes=1"],
            """
  sweep.sampler = random: no key varies; give one a list, A,B, or an interval, interval(LOW, HIGH)
    set by: sweep.sampler=random (command line)
""",
        ),
        (
            ["optim.lr=1,2", "sweep.metric=val_acuracy"],
            f"""
  sweep.metric = val_acuracy: no cell reports it; use one of {KNOWN}
    set by: sweep.metric=val_acuracy (command line)
""",
        ),
        (
            ["optim.lr=1,2", "sweep.metric=val_los"],
            f"""
  sweep.metric = val_los: no cell reports it; use one of {KNOWN}
    set by: sweep.metric=val_los (command line)
    try:    sweep.metric=val_loss
""",
        ),
        (
            ["optim.lr=1,2", "seed=1,2", "sweep.seeds=2"],
            """
  sweep.seeds = 2: seed already has several values
    set by: sweep.seeds=2 (command line)
""",
        ),
        (
            ["optim.lr=1,2", "sweep.goal=min,max"],
            """
  sweep.goal: min,max: all cells share one sweep.goal; give one value
    try:    sweep.goal=min
""",
        ),
        (
            ["optim.lr=1,2", "sweep.sampler=annealing"],
            """
  sweep.sampler = annealing: should be one of grid, random, tpe
    set by: sweep.sampler=annealing (command line)
""",
        ),
        (
            [
                "optim.lr=1,2", "sweep.sampler=tpe", "sweep.cells=3", "sweep.prune=asha", "train.eval_every=5",
                "sweep.seeds=2",
            ],
            """
  sweep.seeds = 2: sweep.prune judges a cell by its only run, but each cell has several
    set by: sweep.seeds=2 (command line)
    try:    sweep.seeds=1
""",
        ),
        (
            ["optim.lr=1,2", "sweep.certify=true", "steps=[evaluate]"],
            """
  sweep.certify = true: no cell trains, so there are no losses to compare
    set by: sweep.certify=true (command line)
""",
        ),
        (
            ["sweep.over={optim.lrr: [1, 2]}"],
            """
  sweep.over.optim.lrr: there is no such setting, did you mean 'optim.lr'?
    set by: sweep.over={optim.lrr: [1, 2]} (command line)
""",
        ),
        (
            ["optim.lr=interval(-1,1e-2)", "sweep.sampler=tpe", "sweep.cells=3"],
            """
  optim.lr = -1.0: should be at least 0
    set by: optim.lr=-1.0 (command line)
""",
        ),
    ],
    ids=[
        "interval-of-a-grid", "cells-of-a-grid", "pruned-grid", "endless", "nothing-varies", "unknown-metric", "metric",
        "seed-twice", "two-goals", "sampler", "pruned-repeats", "nothing-to-certify",
        "written-axis", "end-of-an-interval",
    ],
)  # fmt: skip
def test_sweep_settings_that_contradict_each_other_are_refused(words, told, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna", reason="optuna is not installed")
    monkeypatch.chdir(tmp_path)
    assert main([*LINE, *words]) == 2
    problems = told.count("\n  ") - told.count("\n    ")
    noun = "problem" if problems == 1 else "problems"
    found = re.sub(r"(?<=config.yaml:)[\d:]+", "LINE", capsys.readouterr().err)
    assert found == f"error: {problems} {noun} in this request; nothing was started\n{told}"
    assert list(tmp_path.iterdir()) == []


def test_problems_of_all_cells_are_reported_together(capsys):
    assert main([*LINE, "optim.lr=-1,1,x"]) == 2
    assert capsys.readouterr().err == (
        """error: 2 problems in this request; nothing was started

  optim.lr = -1: should be at least 0
    set by: optim.lr=-1 (command line)

  optim.lr = x: should be a number
    set by: optim.lr=x (command line)
"""
    )


def test_without_optuna_there_are_grids_only(monkeypatch, capsys):
    monkeypatch.setattr("launcher.extras.sweep.requests.find_spec", lambda name: None)
    assert main([*LINE, "optim.lr=1,2", "sweep.sampler=tpe", "sweep.cells=2"]) == 2
    assert capsys.readouterr().err == (
        f"""error: 1 problem in this request; nothing was started

  sweep.sampler = tpe: optuna is not installed: {install_command("optuna")}
    set by: sweep.sampler=tpe (command line)
"""
    )


def test_settings_of_a_sweep_without_one_are_refused(capsys):
    assert main([*LINE[1:], "sweep.seeds=3", "sweep_dir=x"]) == 2
    assert capsys.readouterr().err == (
        """error: 2 problems in this request; nothing was started

  sweep_dir: x: only a sweep has this setting
    try:    -m sweep_dir=x

  sweep.seeds: 3: only a sweep has this setting
    try:    -m sweep.seeds=3
"""
    )

"""Cells that optuna proposes: the same seed gives the same cells, also after a resume; refused cells cost nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="optuna is not installed")

from launcher.extras.sweep import folder
from launcher.extras.sweep.cell_process import CellResult
from launcher.extras.sweep.metrics_rows import Reports
from launcher.extras.sweep.optuna_sampler import OptunaSampler
from launcher.extras.sweep.requests import CheckedCell, composed
from launcher.job.args import parse
from tests.extras.sweep.test_settings import LINE

LR = "optim.lr=tag(log,interval(1e-4,1))"


def sampler(at: Path, *words: str, window: int = 1, metric: str = "val_loss") -> OptunaSampler:
    at.mkdir(exist_ok=True)
    asked = composed(parse([*LINE, "sweep.sampler=tpe", *words]))
    known = [*folder.known_cells(at).values()]
    return OptunaSampler(asked, metric, lambda cells: folder.named(at, cells), known, window)


def lr(one: CheckedCell) -> float:
    return float(dict(word.split("=") for word in one.cell.varied)["optim.lr"])


def value(one: CheckedCell) -> float:
    return (math.log10(lr(one)) + 2) ** 2


def done(one: CheckedCell, of: Callable[[CheckedCell], float] = value) -> CellResult:
    return CellResult(one.cell, "done", {"val_loss": of(one)})


def all_of(some: OptunaSampler, reports: Sequence[tuple[int, float]] = ()) -> list[CheckedCell]:
    out = []
    while not some.finished:
        one = some.ask()
        if one is None:
            break
        out.append(one)
        some.tell(CellResult(one.cell, "refused") if one.refused else done(one), reports)
    return out


def names(cells: Sequence[CheckedCell]) -> list[str]:
    return [one.cell.name for one in cells]


def test_the_same_seed_proposes_the_same_and_learns(tmp_path):
    words = (LR, "sweep.cells=24")
    first = all_of(sampler(tmp_path / "a", *words))
    assert len(first) == 24
    assert names(first) == names(all_of(sampler(tmp_path / "b", *words)))
    assert names(first) != names(all_of(sampler(tmp_path / "c", *words, "sweep.seed=1")))
    early, late = [value(one) for one in first[:10]], [value(one) for one in first[10:]]
    assert sum(late) / 14 < sum(early) / 10  # it proposes values near the good ones


def test_a_sweep_that_goes_on_proposes_what_it_would_have(tmp_path):
    whole = names(all_of(sampler(tmp_path / "a", LR, "sweep.cells=14")))
    all_of(sampler(tmp_path / "b", LR, "sweep.cells=11"))
    assert names(all_of(sampler(tmp_path / "b", LR, "sweep.cells=14"))) == whole


def test_known_cells_stay_though_others_would_be_proposed_now(tmp_path):
    before = names(all_of(sampler(tmp_path, LR, "sweep.cells=3")))
    after = names(all_of(sampler(tmp_path, LR, "sweep.cells=5", "sweep.seed=9")))
    assert after[:3] == before
    assert len({*after}) == 5


def test_proposals_wait_for_those_before_the_window_whichever_ends_first(tmp_path):
    some, other = (sampler(tmp_path / name, LR, "sweep.cells=8", window=2) for name in "ab")
    one, two = some.ask(), some.ask()
    assert some.ask() is None
    some.tell(done(two), ())
    assert some.ask() is None
    some.tell(done(one), ())
    three = some.ask()
    other.tell(done(other.ask()), ())
    other.ask()
    assert names([three]) == names([other.ask()])


def test_cells_that_cannot_run_are_refused_and_not_counted(tmp_path):
    found = all_of(sampler(tmp_path, LR, "parallel.pipeline.stages=1,3", "launch.nproc=1", "sweep.cells=4"))
    refused = [one.refused for one in found if one.refused]
    assert len(found) - len(refused) == 4
    assert refused
    assert all("cannot be divided evenly into 3 pipeline stages" in why for why in refused)


def test_a_finite_space_is_run_once_and_then_there_is_no_more(tmp_path):
    some = sampler(tmp_path, "optim.lr=0.1,0.2", "sweep.sampler=random", "sweep.minutes=5")
    found = all_of(some)
    assert sorted(map(lr, found)) == [0.1, 0.2]
    assert some.finished


def test_repeats_are_one_proposal_and_count_by_their_mean(tmp_path):
    some = sampler(tmp_path, LR, "sweep.cells=2", "sweep.seeds=3", "seed=5")
    assert some.size == 6
    first = [some.ask() for _ in range(3)]
    assert [one.cell.overrides[-1] for one in first] == ["seed=5", "seed=6", "seed=7"]
    assert len({one.cell.varied for one in first}) == 1
    assert some.ask() is None
    for n, one in enumerate(first):
        some.tell(done(one, lambda _, n=n: float(n)), ())
    assert some._study.trials[0].value == 1.0


def test_the_sampler_learns_from_seconds_as_from_any_metric(tmp_path):
    some = sampler(tmp_path, LR, "sweep.cells=2", metric="seconds")
    some.tell(replace(done(some.ask()), seconds=7.5), ())
    assert some._study.trials[0].value == 7.5


def test_successive_halving_ends_cells_that_are_behind_at_a_rung(tmp_path):
    some = sampler(tmp_path, LR, "sweep.cells=9", "sweep.prune=asha", "train.eval_every=2")
    told = []
    for worse in (0.0, 1.0, -1.0, 2.0):
        one = some.ask()
        reports = [(2, 5.0 + worse), (8, 4.0 + worse)]
        told.append(some.prune_reason(one.cell.name, reports[:1]))
        some.tell(replace(done(one), status="pruned") if told[-1] else done(one), reports)
    behind = "val_loss {} at step 2 is worse than in other cells"
    assert told == ["", behind.format(6), "", behind.format(7)]


@pytest.mark.parametrize(
    ("result", "state"),
    [
        ({"status": "failed"}, "FAIL"),
        ({"metrics": {}}, "FAIL"),
        ({"metrics": {"val_loss": math.nan}}, "FAIL"),
        ({"status": "pruned"}, "FAIL"),
        ({}, "COMPLETE"),
    ],
    ids=["failed", "no-metric", "no-number", "pruned-without-a-report", "done"],
)
def test_the_sampler_learns_only_from_finite_metrics(result, state, tmp_path):
    some = sampler(tmp_path, LR, "sweep.cells=2")
    one = some.ask()
    some.tell(replace(done(one), **result), ())
    assert some._study.trials[0].state.name == state


def test_a_cell_that_is_behind_is_hopeless_and_that_is_known_when_the_sweep_goes_on(tmp_path):
    words = (LR, "sweep.cells=9", "sweep.prune=median", "train.eval_every=2")

    def feed(some: OptunaSampler) -> list[str]:
        told = []
        for n in range(6):
            one = some.ask()
            reports: Reports = [(2, 1.0 + (n == 5)), (4, 0.5)]
            told.append(some.prune_reason(one.cell.name, reports[:1]))
            some.tell(replace(done(one), status="pruned") if told[-1] else done(one), reports)
        return told

    first = sampler(tmp_path, *words)
    assert feed(first) == [*[""] * 5, "val_loss 2 at step 2 is worse than in other cells"]
    again = sampler(tmp_path, *words)
    assert feed(again)[5]
    assert [t.state.name for t in again._study.trials] == [*["COMPLETE"] * 5, "PRUNED"]
    assert names([again.ask()]) == names([first.ask()])

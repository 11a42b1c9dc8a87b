"""A model whose samples depend on one another is refused where the batch is cut, as a loss is; BatchNorm is known."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parity import own

MIXES = "its output for a sample depends on the rest of its batch"
TEXT = (
    f"model: {MIXES}, and the batch is cut over {{}}, so each layout would train another model; compute each sample by "
    "itself, or train with one data-parallel rank, stage and micro batch"
)
CUTS: dict[str, dict[str, Any]] = {
    "1 micro batch and 2 data-parallel ranks": {"grid": {"dp_replicate": 2}},
    "2 micro batches and 1 data-parallel rank": {"pipeline": {"micro_batch_num": 2}},
}
MIXING = [
    *("negatives", "mean", "mean and dropout", "dropout before a mean", "capacity", "mixup", "hardest", "slightly"),
    "divided by its number",
]


def net(kind: str, parallel: dict[str, Any], name: str = "Net") -> Job:
    model = {"_target_": f"tests.parallel.mixing_nets.{name}", "kind": kind}
    return own(f"mixing_nets.{name}", [6], stages=1, model=model, parallel=parallel)


def notes(job: Job) -> list[str]:
    return [n.text for n in plan_job(job).notes if n.key == "model"]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", MIXING)
def test_samples_that_depend_on_one_another_are_refused_where_the_batch_is_cut(kind, cut):
    with pytest.raises(RequestError) as refused:
        plan_job(net(kind, CUTS[cut]))
    cure = " (try: parallel.pipeline.micro_batch_num=1)" if "1 data-parallel rank" in cut else ""
    assert str(refused.value) == TEXT.format(cut) + cure


def test_what_the_cure_says_is_planned():
    cured = {"pipeline": {"micro_batch_num": 1}}
    assert notes(net("negatives", cured)) == notes(net("negatives", {}))


def test_it_is_training_that_counts():
    with pytest.raises(RequestError):
        plan_job(net("mean", {"grid": {"dp_replicate": 2}}, "OnlyTrained"))


@pytest.mark.parametrize("kind", MIXING)
def test_in_one_piece_the_plan_says_so(kind):
    assert notes(net(kind, {})) == [f"{MIXES}: another batch size, or a batch in parts, trains to other numbers"]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["functional norm", "layer norm", "dropout", "experts", "experts and dropout"])
def test_other_models_are_planned(kind, cut):
    assert notes(net(kind, CUTS[cut])) == []


@pytest.mark.parametrize(
    ("cut", "samples"), [({}, None), *((cut, 6) for cut in CUTS.values())], ids=["in one piece", *CUTS]
)
@pytest.mark.parametrize("kind", ["batch norm", "untracked norm", "own batch norm"])
def test_the_plan_says_which_samples_a_batch_norm_normalizes_by(kind, cut, samples):
    text = (
        f"BatchNorm (norm) normalizes by the {samples} samples of a rank's micro batch, not by all 12: another number "
        "of data-parallel ranks or micro batches trains to other numbers"
    )
    assert notes(net(kind, cut)) == ([text] if samples else [])

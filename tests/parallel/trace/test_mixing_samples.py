"""A model that mixes samples is refused where the batch is split, and so is such a loss; BatchNorm is recognized."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.trace.mixing_samples import mixing
from launcher.parallel.trace.sample_values import TrialValues, using_trial_values
from launcher.planner.plan_job import plan_job
from tests.parallel import mixing_nets
from tests.parallel.mixing_nets import Sentences, Words
from tests.parity import own

GRADIENT = "the gradient of a sample depends on the rest of its batch"
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
    *("divided by its number", "gated from zero", "in half precision"),
    *("later", "later by a dict", "later by a buffer", "bound"),
    *("more than eight", "groups of six", "classes of one", "mean and draws"),
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


BACKWARDS = [
    *("centred", "normalized", "mean of gradients", "slightly centred", "straight through", "hook"),
    "later in the backward",
]


@pytest.mark.parametrize(
    "kind",
    [
        *("learned scale", "weight's gradient", "rounded weight's gradient"),
        *("clipped by a hook", "clipped after its sum", "halved after its sum"),
    ],
)
def test_a_weight_whose_gradient_depends_on_the_batch_size_is_refused(kind):
    """The outputs and the gradients of samples do not: only those of a weight do."""
    what = "the gradient of a weight depends on the rest of its batch"
    for cut, parallel in CUTS.items():
        with pytest.raises(RequestError) as refused:
            plan_job(net(kind, parallel))
        assert TEXT.format(cut).replace(MIXES, what) in str(refused.value)
    assert notes(net(kind, {})) == [f"{what}: another batch size, or a batch in parts, gives other results"]


@pytest.mark.parametrize("kind", BACKWARDS)
def test_gradients_of_samples_that_depend_on_one_another_are_refused_too(kind):
    """Only the gradients depend on other samples; the outputs do not."""
    with pytest.raises(RequestError) as refused:
        plan_job(net(kind, CUTS["1 micro batch and 2 data-parallel ranks"]))
    assert TEXT.format("1 micro batch and 2 data-parallel ranks").replace(MIXES, GRADIENT) in str(refused.value)
    text = f"{GRADIENT}: another batch size, or a batch in parts, gives other results"
    assert notes(net(kind, {})) == [text]


@pytest.mark.parametrize(
    ("kind", "first", "what"),
    [
        ("centred", False, "the gradient of a sample"),
        ("normalized", False, "the gradient of a sample"),
        ("turned round", False, ""),
        ("turned round", True, ""),
        ("mean", False, "its output for a sample"),
    ],
    ids=["centred", "normalized", "turned round", "positions before samples", "in the forward"],
)
def test_gradients_of_tokens_are_those_of_what_is_looked_up(kind, first, what):
    """Positions are not mistaken for samples, even if there are as many of them as samples in a trial."""
    torch.manual_seed(0)
    real = Words(kind, first)
    tokens = torch.randint(0, 16, (8, 8))
    with using_trial_values(TrialValues(((tokens,),), lambda name: real.get_parameter(name).detach())):
        assert mixing(copy.deepcopy(real).to("meta"), [tokens[:1].to("meta")]) == what


@pytest.mark.parametrize(
    ("kind", "mixed"),
    [
        ("mixup by numpy", True),
        ("mixup in numpy's order", True),
        ("one draw by Python", False),
        ("draws of each by Python", False),
    ],
)
def test_draws_of_python_and_numpy_hide_no_mixing(kind, mixed):
    cut = "2 micro batches and 1 data-parallel rank"
    if not mixed:
        assert not any("depends on the rest" in note for note in notes(net(kind, CUTS[cut])))
        return
    with pytest.raises(RequestError) as refused:
        plan_job(net(kind, CUTS[cut]))
    assert str(refused.value).startswith(TEXT.format(cut))


@pytest.mark.parametrize(("room", "what"), [(0.9, "its output for a sample"), (1.0, "")])
def test_experts_with_much_room_are_tried_with_tokens_that_choose_one(room, what):
    """The tokens of a sample choose different experts, and so do those of eight equal samples."""
    torch.manual_seed(0)
    real = Sentences(room)
    tokens = torch.stack([torch.randperm(16)[:8] for _ in range(8)])
    with using_trial_values(TrialValues(((tokens,),), lambda name: real.get_parameter(name).detach())):
        assert mixing(copy.deepcopy(real).to("meta"), [tokens[:1].to("meta")]) == what


def test_a_clock_that_agrees_by_chance_mixes_nothing(monkeypatch):
    monkeypatch.setattr(mixing_nets, "TICKS", itertools.chain([1.0, 1.0], itertools.count(2.0)))
    real = mixing_nets.Net("clock")
    x = torch.randn(8, 6)
    with using_trial_values(TrialValues(((x,),), lambda name: real.get_parameter(name).detach())):
        assert mixing(copy.deepcopy(real).to("meta"), [x[:1].to("meta")]) is None


def test_a_model_too_large_to_try_is_noted_where_the_batch_is_cut(monkeypatch):
    monkeypatch.setattr("launcher.parallel.trace.mixing_samples.FEW", 10)
    for cut in CUTS.values():
        assert notes(net("negatives", cut)) == [
            "a model of 0.0M numbers is too large to test whether its samples depend on one another, as in a "
            "contrastive loss; if they do, another number of data-parallel ranks or micro batches gives other "
            "results"
        ]
    assert notes(net("negatives", {})) == []


def test_samples_from_all_over_the_data_are_tried():
    """The first samples are of one class, as in a data set that is sorted."""
    torch.manual_seed(0)
    real, x = mixing_nets.Domains(""), torch.randn(16, 6)
    domain = torch.arange(16) // 8

    def tried(**more: Any) -> str | None:
        first = ((x[:8], domain[:8]),)
        with using_trial_values(TrialValues(first, lambda name: real.get_parameter(name).detach(), **more)):
            return mixing(copy.deepcopy(real).to("meta"), [x[:1].to("meta"), domain[:1].to("meta")], 16)

    assert tried() == ""
    assert tried(spread=lambda count: (x[:count], domain[:count])) == "its output for a sample"


def test_a_model_that_fails_in_other_batches_is_noted_where_the_batch_is_cut():
    for cut in CUTS.values():
        (note,) = notes(net("no equal ends", cut))
        assert note.startswith("its forward fails, or is not repeatable, for samples in other batches, which")
    assert notes(net("no equal ends", {})) == []


def test_the_cure_for_mixed_samples_is_planned():
    cured = {"pipeline": {"micro_batch_num": 1}}
    assert notes(net("negatives", cured)) == notes(net("negatives", {}))


def test_a_model_that_mixes_samples_only_in_training_is_refused():
    with pytest.raises(RequestError):
        plan_job(net("mean", {"grid": {"dp_replicate": 2}}, "OnlyTrained"))


@pytest.mark.parametrize("kind", MIXING)
def test_an_undivided_batch_of_mixed_samples_is_noted(kind):
    assert notes(net(kind, {})) == [f"{MIXES}: another batch size, or a batch in parts, gives other results"]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", [
    "layer norm", "dropout", "experts", "experts and dropout", "turned round", "clipped by sample",
    "bias before softmax",
    "recomputed", "counts", "chaos", "draws of the sample",
])  # fmt: skip
def test_models_that_do_not_mix_samples_get_no_note(kind, cut):
    counting = "the forward changes calls once for each of 2 micro batches of a step, and then reads it"
    assert [n for n in notes(net(kind, CUTS[cut])) if not n.startswith(counting)] == []


@pytest.mark.parametrize(("parallel", "samples"), [({}, None), ({"pipeline": {"micro_batch_num": 2}}, 6)])
@pytest.mark.parametrize(
    ("name", "kind", "kept"),
    [("mixing_nets", "renormalized", "seen"), ("remembering_nets", "mean", "middle.kept")],
    ids=["in a buffer", "in Python"],
)
def test_a_model_that_remembers_micro_batches_is_planned_with_a_note(name, kind, kept, parallel, samples):
    """The results equal those of a plain loop that accumulates the gradients of micro batches."""
    model = {"_target_": f"tests.parallel.{name}.Net", "kind": kind}
    text = (
        f"the forward updates {kept} from the {samples} samples of a micro batch and then reads it: another "
        "number of micro batches gives other results"
    )
    job = own(f"{name}.Net", [6], stages=1, model=model, parallel=parallel)
    assert notes(job) == ([text] if samples else [])


@pytest.mark.parametrize(
    ("cut", "samples"), [({}, None), *((cut, 6) for cut in CUTS.values())], ids=["in one piece", *CUTS]
)
@pytest.mark.parametrize("kind", ["batch norm", "untracked norm", "own batch norm"])
def test_the_plan_says_which_samples_a_batch_norm_normalizes_by(kind, cut, samples):
    text = (
        f"BatchNorm (norm) normalizes by the {samples} samples of a rank's micro batch, not by all 12: another number "
        "of data-parallel ranks or micro batches gives other results"
    )
    assert notes(net(kind, cut)) == ([text] if samples else [])


def test_a_batch_norm_that_a_function_computes_is_noted_too():
    (note,) = notes(net("functional norm", CUTS["1 micro batch and 2 data-parallel ranks"]))
    assert note.startswith("BatchNorm (the model's own forward) normalizes by the 6 samples of a rank's micro batch")

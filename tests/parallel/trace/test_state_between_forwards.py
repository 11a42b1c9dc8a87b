"""The plan names what a forward remembers in Python or non-persistent buffers; if it depends on data, it is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.model_state.hooks import hooked_for_all
from launcher.parallel.trace import state_between_forwards
from launcher.planner.plan_job import plan_job
from tests.parity import own

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {}, "replicas": {"grid": {"dp_replicate": 2}}, "stages": {"pipeline": {"stages": 2, "micro_batch_num": 2}},
}  # fmt: skip


def net(kind: str, layout: str = "one", told: bool = False, every: int | None = 2, forgets: bool = False) -> Job:
    model = {"_target_": "tests.parallel.remembering_nets.Net", "kind": kind, "told": told, "forgets": forgets}
    more = {"model": model, "parallel": LAYOUTS[layout], "checkpoint": {"every": every}}
    return own("remembering_nets.Net", [6], stages=1, **more)


def checkpoint_notes(job: Job) -> list[str]:
    return [n.text for n in plan_job(job).notes if n.key == "checkpoint"]


KEPT = (
    "middle.kept: the forward changes and reads it, and it is Python state; no "
    "checkpoint stores it, so a resumed run resets it; make it a buffer, or "
    "return it from get_extra_state"
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["number", "list", "deque", "array", "python", "numpy"])
def test_python_state_that_a_forward_changes_is_noted(kind, layout):
    assert checkpoint_notes(net(kind, layout)) == [KEPT]


def test_changed_class_attributes_are_noted_and_write_only_globals_are_not():
    assert checkpoint_notes(net("calls")) == [
        KEPT.replace("middle.kept", "tests.parallel.remembering_nets.Remembers.calls")
    ]
    assert checkpoint_notes(net("log")) == []


@pytest.mark.parametrize("kind", ["torch", "shaped", "mean", "seen"])
def test_changed_state_of_a_data_dependent_model_is_noted(kind):
    assert checkpoint_notes(net(kind)) == [KEPT]


def test_a_buffer_outside_the_state_dict_is_named():
    assert checkpoint_notes(net("buffer")) == [
        "middle.kept: the forward changes and reads it, and persistent=False keeps it out of the state dict; no "
        "checkpoint stores it, so a resumed run resets it; register it as a persistent buffer"
    ]


@pytest.mark.parametrize("kind", ["cache", "unread"])
def test_state_that_is_filled_once_or_never_read_gets_no_note(kind):
    assert checkpoint_notes(net(kind)) == []


def test_saved_extra_state_and_runs_without_checkpoints_get_no_note():
    assert checkpoint_notes(net("number", told=True)) == []
    assert checkpoint_notes(net("number", every=None)) == []


@pytest.mark.parametrize("kind", ["number", "deque", "array"])
def test_extra_state_that_is_not_restored_is_noted(kind):
    assert checkpoint_notes(net(kind, forgets=True)) == [
        KEPT.replace("it is Python state", "set_extra_state does not restore it").replace(
            "return it from get_extra_state", "a part of the extra state"
        )
    ]


def test_attributes_of_weights_are_noted_like_those_of_modules():
    job = own("remembering_nets.CountsOnWeight", [6], stages=1, checkpoint={"every": 2})
    assert checkpoint_notes(job) == [KEPT.replace("middle.kept", "middle.weight.calls")]


@pytest.mark.parametrize("layout", ["replicas", "stages"])
def test_a_count_of_micro_batches_is_noted(layout):
    notes = [n.text for n in plan_job(net("number", layout)).notes if n.key == "model"]
    text = (
        "the forward changes middle.kept once for each of 2 micro batches of a step, and then reads it: another number "
        "of micro batches gives other results"
    )
    assert (text in notes) == (layout == "stages")


@pytest.mark.parametrize("reads", [True, False], ids=["read", "unread"])
def test_a_count_of_backwards_is_noted_if_they_read_it(reads):
    model = {"_target_": "tests.parallel.remembering_nets.CountsBackwards", "reads": reads}
    job = own(
        "remembering_nets.CountsBackwards", [6], stages=1, model=model, checkpoint={"every": 2},
        parallel={"pipeline": {"micro_batch_num": 2}},
    )  # fmt: skip
    texts = sorted(n.text for n in plan_job(job).notes if "middle.calls" in n.text)
    assert texts == reads * [
        "middle.calls: the backward changes and reads it, and it is Python state; no checkpoint stores it, so a "
        "resumed run resets it; make it a buffer, or return it from get_extra_state",
        "the backward changes middle.calls once for each of 2 micro batches of a step, and then reads it: another "
        "number of micro batches gives other results",
    ]


@pytest.mark.parametrize("kind", ["mean", "seen"])
def test_a_number_of_each_ranks_own_batch_is_refused(kind):
    with pytest.raises(RequestError) as refused:
        plan_job(net(kind, "replicas"))
    assert str(refused.value) == (
        "model: the forward changes middle.kept from rank-local data and then reads it: each of 2 "
        "data-parallel ranks would train another model; use one data-parallel rank (try: launch.nproc=1 "
        "parallel.grid.dp_replicate=1)"
    )


def holder(part: str, place: str, layout: str = "replicas") -> Job:
    model = {"_target_": "tests.parallel.remembering_nets.Holder", "part": part, "place": place}
    return own(
        "remembering_nets.Holder", [6], stages=1, model=model, parallel=LAYOUTS[layout], checkpoint={"every": 2}
    )  # fmt: skip


def refusal(job: Job) -> str:
    try:
        plan_job(job)
    except RequestError as error:
        return str(error)
    return ""


LOCAL = (
    "model: the {} changes middle.{} from rank-local data and then reads it: each of 2 data-parallel ranks would train "
    "another model; use one data-parallel rank (try: launch.nproc=1 parallel.grid.dp_replicate=1)"
)


@pytest.mark.parametrize("place", ["attribute", "inplace", "once", "list", "deque", "dict", "object"])
def test_a_tensor_of_an_earlier_batch_is_refused(place):
    assert refusal(holder("Carries", place)) == LOCAL.format("forward", "prev")


@pytest.mark.parametrize("place", ["attribute", "inplace", "list", "deque", "dict", "object"])
def test_a_tensor_of_an_earlier_batch_is_refused_if_the_model_is_too_large_to_run(place, monkeypatch):
    monkeypatch.setattr(state_between_forwards, "FEW", 10)
    assert refusal(holder("Carries", place)) == LOCAL.format("forward", "prev")


@pytest.mark.parametrize(
    ("place", "layout"), [*itertools.product(["tensor", "dict"], LAYOUTS), ("number", "one")]
)  # fmt: skip
def test_what_each_forward_overwrites_before_it_reads_it_is_no_state(place, layout):
    assert checkpoint_notes(holder("Overwrites", place, layout)) == []


@pytest.mark.parametrize("kind", ["truth", "number"])
def test_a_number_that_changes_in_a_branch_on_data_is_refused(kind):
    assert refusal(holder("Branches", kind)) == LOCAL.format("forward", "beta")


def test_a_count_of_batches_that_changes_no_result_is_planned():
    assert refusal(holder("Branches", "unread")) == ""


@pytest.mark.parametrize("place", ["attribute", "tensor", "list", "buffer", "module"])
def test_state_that_a_hook_computes_from_a_gradient_is_refused(place):
    assert refusal(holder("SavesGradient", place)) == LOCAL.format("backward", "kept")


def test_a_gradient_that_no_forward_reads_is_planned():
    assert refusal(holder("SavesGradient", "unread")) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["own", "instance"])
def test_a_buffer_that_ranks_or_micro_batches_update_differently_is_noted(kind, layout):
    """An instance norm's is the mean over the ranks. Stages have two micro batches."""
    first = (
        "the forward updates middle.average from the samples of a data-parallel rank, and each step takes over those "
        "of the first rank: another number of data-parallel ranks gives other values"
    )
    buffers = "middle.average" if kind == "own" else "middle.norm.running_mean, middle.norm.running_var"
    micro = (
        f"the forward updates {buffers} once for each of 2 micro batches of a step: another number of micro batches "
        "gives other values"
    )
    notes = [n.text for n in plan_job(holder("Average", kind, layout)).notes if n.key == "model"]
    assert notes == {("own", "replicas"): [first], (kind, "stages"): [micro]}.get((kind, layout), [])


@pytest.mark.parametrize(
    ("where", "layout", "noted"),
    [
        ("outside", {}, False),
        ("reentrant", {}, False),
        ("inside", {}, False),
        ("outside", {"pipeline": {"stages": 2}}, True),
        ("outside", {"recompute": {"modules": "middle"}}, True),
        ("reentrant", {"recompute": {"modules": "middle"}}, True),
        ("inside", {"recompute": {"modules": "middle"}}, False),
    ],
)
def test_statistics_that_the_models_own_checkpoint_updates_twice_are_noted(where, layout, noted):
    model = {"_target_": "tests.parallel.remembering_nets.Checkpointed", "where": where}
    job = own("remembering_nets.Checkpointed", [6], stages=1, model=model, parallel=layout)
    notes = [n.text for n in plan_job(job).notes if "checkpoint" in n.text]
    kept = "middle.norm.num_batches_tracked, middle.norm.running_mean, middle.norm.running_var"
    text = (
        f"the model's own torch.utils.checkpoint updates {kept} twice in each step of a plain loop, in the forward and "
        "again in the backward, but this layout once: these get other values; use parallel.recompute in place of that "
        "checkpoint: then every layout and a plain loop run it once"
    )
    assert notes == ([text] if noted else [])


@pytest.mark.parametrize("what", ["weight", "input"])
def test_observers_of_weights_are_planned_and_those_of_samples_are_refused(what):
    model = {"_target_": "tests.parallel.remembering_nets.Observes", "what": what}
    job = own("remembering_nets.Observes", [6], stages=1, model=model, parallel=LAYOUTS["replicas"])
    text = LOCAL.format("forward", "").replace("changes middle.", "changes the buffer observer.most")
    assert refusal(job) == (text if what == "input" else "")


def test_the_state_of_torchs_own_modules_is_not_named():
    job = own("remembering_nets.Recurrent", [6], stages=1, checkpoint={"every": 2})
    assert checkpoint_notes(job) == [KEPT.replace("middle.kept", "hidden")]


def test_hooks_for_all_modules_are_refused_and_taken_off():
    with hooked_for_all():  # removes the hooks of this process
        job = own("remembering_nets.HookedForAll", [6], stages=1)
    with pytest.raises(RequestError) as refused:
        plan_job(job)
    assert str(refused.value) == (
        "model: the constructor calls register_module_forward_hook, which registers "
        "a hook for all modules of the process: it would also run in the copies of the model that the launcher makes; "
        "register hooks on the modules of the model"
    )
    x = torch.ones(1)
    assert nn.Identity()(x) is x

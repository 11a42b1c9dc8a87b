"""State that a model keeps in Python is right on every stage, or the model is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from launcher.errors import RequestError
from launcher.parallel.model_state.deep_copy import copied
from launcher.parallel.model_state.python_state import changed, reading, snapshot
from launcher.planner.plan_job import plan_job
from tests.parallel import python_state_nets as nets
from tests.parity import TOLERANCE, alone, assert_parity, assert_same, outcome, own, rank_step
from tests.ranks import on_ranks

CUT = {"a": 0, "b": 0, "head": 1}
LOST = "model: the forward changes {}, which is on no stage: no other stage and no later step would see the change; "
LOST += "keep it in "
READ = (
    "parallel.pipeline.stage_config: cannot trace the code between the named "
    "modules of {} (python_state_nets.py): it reads b.calls, which b changes as "
    "it runs; name a larger module in stage_config, so that this code runs "
    "inside it"
)
REFUSED = {
    "Table": LOST.format("table") + "a module that has a stage",
    "Nested": LOST.format("box") + "a module that has a stage",
    "Cycle": LOST.format("turn") + "a module that has a stage",
    "Generated": LOST.format("turn") + "a module that has a stage",
    "CountRead": READ.format("CountRead"),
    "CountOfLookingRead": READ.format("CountOfLookingRead"),
    "CountReadByModule": READ.format("CountReadByModule"),
    "Shared": "model: the forward changes b.box, a Python object that is also head.box: another stage would not see "
    "the change; give each module its own, or pass a tensor from one to the other",
    "GlobalCount": "parallel.pipeline.stage_config: cannot trace the code between the named modules of GlobalCount "
    "(python_state_nets.py): it changes tests.parallel.python_state_nets.CALLS, which head would not see on its stage; "
    "name a larger module in stage_config, so that this code runs inside it",
}


@pytest.mark.parametrize(("net", "text"), list(REFUSED.items()), ids=list(REFUSED))
def test_python_state_that_modules_of_two_stages_share_is_refused(net, text):
    with pytest.raises(RequestError) as refused:
        plan_job(own(f"python_state_nets.{net}", [6], stages=CUT))
    assert re.sub(r"\.py:\d+", ".py", str(refused.value)) == text


@pytest.mark.parametrize("net", ["CountedAlone", "Recurrent"])
def test_python_state_of_one_module_is_exact_on_stages(net):
    assert_parity(own(f"python_state_nets.{net}", [6], stages=CUT, train__batch_size=4))


def streams(kind, share):
    model = {"_target_": "tests.parallel.python_state_nets.Streams", "kind": kind, "share": share}
    return own("python_state_nets.Streams", [6], stages=CUT, train__batch_size=4, model=model)


@pytest.mark.parametrize("kind", nets.STREAMS)
def test_a_stream_of_a_module_goes_on_as_in_one_process(kind):
    assert_parity(streams(kind, share=False), parts=2)


@pytest.mark.parametrize("kind", nets.STREAMS)
def test_a_stream_of_modules_of_two_stages_is_refused(kind):
    text = r"the forward changes b.stream, a Python object that is also head.stream: another stage would not see"
    with pytest.raises(RequestError, match=text):
        plan_job(streams(kind, share=True))


def test_counts_of_constructors_start_again_in_each_construction():
    job = own("python_state_nets.ByNumber", [6], stages=CUT, train__batch_size=4)
    nets.Numbered.made = 0
    plan = plan_job(job)
    assert nets.Numbered.made == 0
    ranks = on_ranks(plan.sizes.grid.size, rank_step, job, plan)
    nets.Numbered.made = 0
    assert_same(outcome(plan, ranks), alone(job, plan), TOLERANCE["fp64"])


def test_a_model_that_nobody_can_copy_is_shared_where_it_has_to_be():
    model = nets.Generated()
    twin = copied(model)
    assert twin.turn is model.turn
    assert twin.a is not model.a
    assert twin.a.weight is not model.a.weight


def stateful() -> nn.Module:
    """A model with one attribute of each kind."""
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.number = 1.0
    model.both = model.inner.both = [1]
    model.nan, model.table, model.box = float("nan"), np.zeros(3), nets.Box()
    model.names, model.space = {"a": {1, 2}}, SimpleNamespace(x=1)
    model.many = [*range(5000)]
    return model


def grow(model: nn.Module) -> None:
    model.many[2500] = -1


def write(model: nn.Module) -> None:
    model.table[1] = 2


def renew(model: nn.Module) -> None:
    model.both = model.inner.both = [1]
    model.table, model.names = np.zeros(3), {"a": {2, 1}}


CHANGES = {
    "nothing": (lambda m: None, []),
    "the same in new containers": (renew, []),
    "a number": (lambda m: setattr(m.inner, "number", 2.0), [("inner.number", "")]),
    "an array": (write, [("table", "")]),
    "an object": (lambda m: m.box.steps.append(1), [("box", ".steps[1]")]),
    "a set": (lambda m: m.names["a"].add(3), [("names", "['a']")]),
    "a namespace": (lambda m: setattr(m.space, "x", 2), [("space", ".x")]),
    "a long list": (grow, [("many", "")]),
    "something new": (lambda m: setattr(m, "new", 1), [("new", "")]),
    "a kind": (lambda m: setattr(m.inner, "number", 1), [("inner.number", "")]),
}


@pytest.mark.parametrize(("act", "keys"), list(CHANGES.values()), ids=list(CHANGES))
def test_every_change_is_seen(act, keys):
    model = stateful()
    before = snapshot(model)
    act(model)
    assert changed(before, snapshot(model)) == keys


def test_a_changed_object_is_reported_under_all_its_names():
    model = stateful()
    before = snapshot(model)
    model.both[0] = 2
    after = snapshot(model)
    (key,) = changed(before, after)
    assert after.names(key) == ["both", "inner.both"]


def test_reads_are_told_and_nothing_stays_patched():
    model, seen = nets.CountRead(), []
    with reading(model, ["b.calls"], seen.append):
        model.b.looks, model.b.calls  # noqa: B018
        model(torch.zeros(1, 6))
    assert seen == ["b.calls"] * 3  # read here, by the module's count, and in the glue
    assert "__getattribute__" not in vars(nets.Counting)

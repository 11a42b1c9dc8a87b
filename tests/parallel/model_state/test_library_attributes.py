"""State that a model's code keeps on modules, classes and functions of libraries is the model's state too."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import copy_context
from functools import partial

import pytest
import torch

from launcher.errors import RequestError
from launcher.parallel.model_state.module_globals import files, put_back, variables
from launcher.parallel.model_state.python_state import changed
from launcher.planner.plan_job import plan_job
from tests.parallel import library_nets as nets
from tests.parity import own

PLACES = {
    "module": "torch.library_nets_calls",
    "import": "sys.library_nets_calls",
    "inner": "torch.backends.library_nets_calls",
    "class": "torch.nn.modules.module.Module.library_nets_calls",
    "function": "torch.nn.functional.relu.library_nets_calls",
    "dict": "torch.library_nets_memo",
    "main": "__main__.library_nets_calls",
    "thread": "threading._MainThread.library_nets_calls",
}


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    with put_back(files(nets.Net)):  # the helper that makes a job runs the model
        yield


@pytest.mark.parametrize("how", PLACES)
def test_state_on_attributes_of_libraries_is_named_and_restored(how: str) -> None:
    names, net = files(nets.Net), nets.Net(how)
    before = variables(names)
    with put_back(names):
        net(torch.zeros(2, 6))
        assert PLACES[how] in [name for name, _ in changed(before, variables(names))]
    assert not changed(before, variables(names))


def test_state_of_libraries_themselves_is_not_compared() -> None:
    assert "sys.modules" not in {name for name, _ in variables(files(nets.Net)).marks}


@pytest.mark.parametrize("how", PLACES)
def test_on_stages_it_is_refused_and_on_one_rank_planning_leaves_none(how: str) -> None:
    model = {"_target_": "tests.parallel.library_nets.Net", "how": how}
    two = {"pipeline": {"stages": 2, "micro_batch_num": 2}}
    with pytest.raises(RequestError) as refused:
        plan_job(own("library_nets.Net", [6], stages=1, model=model, parallel=two))
    text = "whose value differs in each process; keep it in a module that has a stage"
    assert str(refused.value) == f"model: every call of the forward changes {PLACES[how]}, {text}"

    one = own("library_nets.Net", [6], stages=1, model=model)
    before = variables(files(nets.Net))
    plan = plan_job(one)
    assert not changed(before, variables(files(nets.Net)))
    assert [n for n in plan.notes if n.key == "model"] == []


def test_a_context_variable_without_a_value_has_none_after_planning() -> None:
    model = {"_target_": "tests.parallel.library_nets.Net", "how": "context"}
    job = copy_context().run(partial(own, "library_nets.Net", [6], stages=1, model=model))  # it runs the model
    plan_job(job)
    assert nets.COUNT.get(0) == 0

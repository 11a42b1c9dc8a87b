"""Values that code between modules passes outside arguments are refused; counts of own functions are not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.parallel.model_state.deep_copy import copied
from launcher.planner.plan_job import plan_job
from tests.parallel import aside_nets as nets
from tests.parity import assert_parity, own

CUT = {"a": 0, "b": 0, "head": 1}
SETS = (
    "parallel.pipeline.stage_config: cannot trace the code between the named modules of {}: it changes"
    " {}, which {} would not see on its stage; name a larger module in stage_config, so that this code runs inside it"
)
SET = {
    "Attribute": ("head.factor", "head"),
    "Toggled": ("head.factor", "head"),
    "TensorLaid": ("head.factor", "head"),
    "Hooked": ("the hooks of head", "head"),
    "Global": ("tests.parallel.aside_nets.TABLE", "a"),
    "Context": ("tests.parallel.aside_nets.FACTOR", "a"),
    "Local": ("tests.parallel.aside_nets.LOCAL", "a"),
}


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    nets.forget()


def refusal(net: str) -> str:
    with pytest.raises(RequestError) as refused:
        plan_job(own(f"aside_nets.{net}", [6], stages=CUT))
    return re.sub(r" \(\w+\.py:\d+\)", "", str(refused.value))


@pytest.mark.parametrize("net", list(SET))
def test_values_that_another_stage_sets_outside_of_arguments_are_refused(net):
    assert refusal(net) == SETS.format(net, *SET[net])


def test_an_attribute_set_for_the_next_forward_is_refused():
    assert refusal("SetAfter") == SETS.format("SetAfter", "head.factor", "head")


LEAVES = (
    "parallel.pipeline.stage_config: cannot trace the code between the named modules of Passes: a leaves a value in {}"
    " for another module, which may be on another stage; name a larger module in stage_config, so that this code runs "
    "inside it"
)
LEFT = {
    "Place": "tests.parallel.aside_nets.KEPT",
    "InThread": "tests.parallel.aside_nets.LOCAL",
    "InContext": "tests.parallel.aside_nets.GIVEN",
    "InEnvironment": "the environment variable ASIDE",
    "InClass": "tests.parallel.aside_nets.InClass.value",
    "InTorch": "torch.aside",
    "InObject": "head.place",
    "InModel": "value",
}


def passes(place: str, number: bool, stays: bool = False, **settings: Any) -> Job:
    model = {"_target_": "tests.parallel.aside_nets.Passes", "place": place, "number": number, "stays": stays}
    job = own("aside_nets.Passes", [6], model=model, train__batch_size=4, **settings)
    nets.forget()  # ``own`` has run a forward
    return job


@pytest.mark.parametrize("number", [True, False])
@pytest.mark.parametrize("place", LEFT)
def test_a_value_that_one_module_leaves_and_another_takes_away_is_refused(place: str, number: bool) -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(passes(place, number, stages=CUT))
    assert re.sub(r" \(\w+\.py:\d+\)", "", str(refused.value)) == LEAVES.format(LEFT[place])


@pytest.mark.parametrize("place", ["Place", "InThread", "InContext", "InEnvironment", "InClass", "InTorch"])
def test_a_number_that_one_module_leaves_for_good_and_another_reads_is_refused(place: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan_job(passes(place, True, stays=True, stages=CUT))
    assert str(refused.value) == (
        "model: head computes something else if no other module has run: it reads a value that one of them leaves "
        "behind (in a global variable, a class or an attribute), which stages do not send; pass the value as an "
        "argument, or put both in one module"
    )


@pytest.mark.parametrize("place", LEFT)
def test_values_passed_outside_of_arguments_are_exact_on_one_rank(place: str) -> None:
    assert_parity(passes(place, False, stages=1))


def test_a_table_that_each_module_makes_if_it_is_not_there_is_exact():
    job = own("aside_nets.Tables", [6], stages=CUT, train__batch_size=4)
    nets.forget()
    assert_parity(job, parts=2)


def test_a_default_that_counts_calls_is_refused():
    job = own("aside_nets.Default", [6], stages=CUT)
    (seen,) = nets._ByDefault.forward.__defaults__
    seen.clear()  # ``own`` has run a forward
    with pytest.raises(RequestError) as refused:
        plan_job(job)
    assert seen == {}
    assert str(refused.value) == (
        "model: every call of the forward changes the defaults of tests.parallel.aside_nets._ByDefault.forward, "
        "whose value differs in each process; keep it in a module that has a stage"
    )


def test_a_generator_that_a_plan_would_move_on_is_refused():
    assert refusal("Generated") == (
        "model: b.turn is a generator, which cannot be copied: planning would advance it; make it in the forward, or "
        "use an iterator of itertools"
    )


def test_a_function_of_the_model_itself_that_counts_is_refused():
    assert refusal("RootClosure") == (
        "model: the forward changes up, which is on no stage: no other stage and no later step would see the "
        "change; keep it in a module that has a stage"
    )


def test_functions_that_share_a_count_share_it_in_a_copy_and_with_nobody_else():
    up, down = nets.counter()
    model = nets.Closures()
    model.b.up, model.b.down = up, down
    twin = copied(model)
    twin.b.up()
    assert (twin.b.down(), down()) == (1 / 2, 1)


def test_a_module_whose_functions_count_is_exact():
    assert_parity(own("aside_nets.Closures", [6], stages=CUT, train__batch_size=4), parts=2)

"""What the code between modules tells them past their arguments is refused; what their own functions count is not."""

from __future__ import annotations

import re

import pytest

from launcher.errors import RequestError
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


def refusal(net: str) -> str:
    with pytest.raises(RequestError) as refused:
        plan_job(own(f"aside_nets.{net}", [6], stages=CUT))
    return re.sub(r" \(\w+\.py:\d+\)", "", str(refused.value))


@pytest.mark.parametrize("net", list(SET))
def test_what_a_module_would_not_be_told_on_its_stage_is_refused(net):
    assert refusal(net) == SETS.format(net, *SET[net])


def test_what_is_set_for_the_next_forward_is_refused():
    assert refusal("SetAfter") == SETS.format("SetAfter", "head.factor", "head")


def test_a_default_that_counts_calls_is_refused():
    job = own("aside_nets.Default", [6], stages=CUT)
    (seen,) = nets._ByDefault.forward.__defaults__
    seen.clear()  # ``own`` has run one
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

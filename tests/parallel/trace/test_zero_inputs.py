"""What a module returns to Python, and not to torch, must not hang on data where the code around it runs once."""

from __future__ import annotations

import re

import pytest

from launcher.errors import RequestError
from launcher.planner.plan_job import plan_job
from tests.parity import assert_parity, own

CUT = {"a": 0, "head": 1}
TEXT = (
    "parallel.pipeline.stage_config: cannot follow the code between the named modules of {}: a returns {} with other "
    "data; let it return a tensor of a fixed shape; name a larger module there, so that this code runs inside it"
)
REFUSED = {"Summed": "another Python number", "Counted": "another Python number", "Picked": "tensors of another shape"}
REFUSED["SummedUnderAutocast"] = REFUSED["Summed"]


@pytest.mark.parametrize("net", list(REFUSED))
def test_what_would_be_that_of_zeros_for_ever_is_refused(net):
    with pytest.raises(RequestError) as refused:
        plan_job(own(f"returned_nets.{net}", [6], stages=CUT))
    assert re.sub(r" \(\w+\.py:\d+\)", "", str(refused.value)) == TEXT.format(net, REFUSED[net])


@pytest.mark.parametrize("net", list(REFUSED))
def test_on_one_stage_it_is_fine(net):
    plan_job(own(f"returned_nets.{net}", [6], stages={"*": 0}))


def test_numbers_that_are_the_same_for_any_data_are_exact():
    assert_parity(own("returned_nets.Sized", [6], stages=CUT))

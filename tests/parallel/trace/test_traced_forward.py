"""Code between modules that computes something else while it is traced is refused; all other code is as traced."""

from __future__ import annotations

import re

import pytest

from launcher.errors import RequestError
from launcher.planner.plan_job import plan_job
from tests.parallel import traced_nets as nets
from tests.parity import assert_parity, own

CUT = {"a": 0, "b": 0, "head": 1}
EXACT = ["is_meta", "device", "the default device", "is_compiling", "grad mode"]


def asks(way):
    model = {"_target_": "tests.parallel.traced_nets.Asks", "way": way}
    return own("traced_nets.Asks", [6], stages=CUT, model=model, train__batch_size=4)


@pytest.mark.parametrize("way", [w for w in nets.WAYS if w not in EXACT])
def test_code_that_asks_for_the_modes_of_a_trace_is_refused(way):
    with pytest.raises(RequestError) as refused:
        plan_job(asks(way))
    assert re.sub(r" \(\w+\.py:\d+\)", "", str(refused.value)) == (
        "parallel.pipeline.stage_config: the code between the named modules of Asks computes something else while it "
        "is traced (output 0 differs), as code does that asks for torch's modes or for the kind of a tensor; name a "
        "larger module in stage_config, so that this code runs inside it"
    )


@pytest.mark.parametrize("way", EXACT)
def test_what_a_trace_answers_as_a_forward_is_exact(way):
    assert_parity(asks(way), parts=2)


def test_code_that_draws_is_as_traced():
    plan_job(own("traced_nets.Draws", [6], stages=CUT, train__batch_size=4))

"""A model that computes with a clock or its process is refused on several ranks; one that only reads them is not."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import RequestError
from launcher.job.schema.job import Job
from launcher.planner.plan_job import plan_job
from tests.parity import own

REPLICAS: dict[str, Any] = {"grid": {"dp_replicate": 2}}
AGAIN: dict[str, Any] = {"recompute": {"modules": "b"}}
CLOCKS = {"clock": "time.time()", "identifier": "uuid.uuid4()", "system": "os.urandom()"}
WAY_OUT = "draw random numbers with torch, and count forwards in a buffer"


def net(how: str, parallel: dict[str, Any]) -> Job:
    model = {"_target_": "tests.parallel.process_nets.Asks", "how": how}
    return own("process_nets.Asks", [6], stages=1, model=model, parallel=parallel)


def refusal(how: str, parallel: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as refused:
        plan_job(net(how, parallel))
    return str(refused.value)


@pytest.mark.parametrize("how", CLOCKS)
def test_a_number_that_is_another_one_at_each_call_is_refused_where_it_is_asked_for_twice(how: str) -> None:
    text = f"model: its output depends on {CLOCKS[how]}, and"
    assert refusal(how, REPLICAS) == f"{text} each of 2 ranks gets a different value; {WAY_OUT}"
    cure = "(try: parallel.recompute=null)"
    assert refusal(how, AGAIN) == f"{text} a recomputed forward gets a different value; {WAY_OUT} {cure}"


@pytest.mark.parametrize("how", CLOCKS)
def test_on_one_rank_it_is_noted(how: str) -> None:
    notes = [n.text for n in plan_job(net(how, {})).notes if n.key == "model"]
    assert notes == [f"its output depends on {CLOCKS[how]}: no other run gives the same numbers"]


def test_a_number_of_its_process_is_refused_on_several_ranks() -> None:
    text = "asks for os.getpid() in its forward, but 2 ranks get another answer than one process"
    assert text in refusal("process", REPLICAS)
    assert [n for n in plan_job(net("process", {})).notes if n.key == "model"] == []


@pytest.mark.parametrize("parallel", [{}, REPLICAS, AGAIN], ids=["one rank", "replicas", "recomputation"])
def test_a_model_that_times_its_forward_is_planned(parallel: dict[str, Any]) -> None:
    assert [n for n in plan_job(net("unused", parallel)).notes if n.key == "model"] == []

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from launcher.job.compose import compose
from launcher.plan.plan import Plan
from launcher.plan.values.text import seconds_text
from launcher.planner.plan_job import plan_job
from launcher.run.plan_pictures import PIPELINE, pictures
from tests.parity import job
from tests.plan.time.test_prediction import FAST


@pytest.fixture(scope="module")
def predicted() -> Plan:
    return plan_job(compose(["recipe=lm_8b_h100x64", "model.layers=8"]).job)


def title(text: str) -> str:
    return ElementTree.fromstring(text)[0].text or ""


def test_where_speeds_are_known_pictures_are_in_seconds_up_to_the_end_of_the_step(predicted: Plan) -> None:
    step = predicted.estimate.step
    assert step is not None
    found = pictures(predicted)
    assert title(found["timeline.svg"]).endswith(f", {seconds_text(step.seconds)} (predicted)")
    assert ">seconds</text>" in found["timeline.svg"]
    assert ">seconds</text>" in found["memory.svg"]

    # the parts drawn within and after the schedule are the complete step
    within = sum(t.seconds for t in step.terms if t.name in PIPELINE)
    assert within == pytest.approx(step.timeline.makespan)
    trace = [e for e in json.loads(found["timeline.json"])["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in trace) == pytest.approx(step.seconds * 1e6, abs=0.1)
    assert {e["name"] for e in trace if e["cat"] == "after the schedule"} == {
        t.name for t in step.terms if t.name not in PIPELINE and t.seconds
    }
    assert f"{predicted.estimate.timeline.messages} messages between ranks" in found["timeline.svg"]


def test_collectives_are_drawn_and_told_as_they_are_predicted(predicted: Plan) -> None:
    step = predicted.estimate.step
    assert step is not None
    assert [lane.name for lane in step.lanes] == ["tp", "data-parallel"]
    found = pictures(predicted)

    # the picture: one name per stretch
    titles = [
        e.text or "" for e in ElementTree.fromstring(found["timeline.svg"]).iter("{http://www.w3.org/2000/svg}title")
    ]
    for lane in step.lanes:
        assert {f"{s.name}, {seconds_text(s.seconds)}" for s in lane.stretches} <= {t.split(";")[0] for t in titles}
        assert f">{lane.label}</text>" in found["timeline.svg"]

    # the trace: the seconds of each stretch
    trace = [e for e in json.loads(found["timeline.json"])["traceEvents"] if e["ph"] == "X"]
    for lane in step.lanes:
        told = [e["args"]["seconds"] for e in trace if e["cat"] == lane.label]
        assert told == [round(s.seconds, 9) for s in lane.stretches]
    assert len([e for e in trace if e["cat"] == "messages between stages"]) == len(step.timeline.sent)


@pytest.mark.parametrize("scheduler", ["gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v", "seqpipe"])
def test_memory_is_drawn_in_seconds_whatever_the_schedule(scheduler: str) -> None:
    pipeline: dict[str, Any] = {"stages": 2, "micro_batch_num": 4, "scheduler": scheduler}
    if scheduler == "interleaved":
        pipeline |= {"scheduler": "1f1b", "interleave": True}
    if scheduler == "seqpipe":
        pipeline |= {"seq_chunks": 2}
    found = pictures(plan_job(job(cluster=FAST, parallel__pipeline=pipeline, launch__nproc=2)))
    assert list(found) == ["timeline.svg", "timeline.json", "memory.svg"]
    assert "share of the step" not in found["timeline.svg"]
    assert "seconds</text>" in found["memory.svg"]


def test_the_memory_of_a_predicted_step_is_that_of_the_plan(predicted: Plan) -> None:
    text = pictures(predicted)["memory.svg"]
    for pp in range(predicted.sizes.grid["pp"]):
        rank = max(predicted.sizes.grid.ranks(pp=pp), key=lambda r: (predicted.estimate.memory[r].total, -r))
        assert f"<title>rank {rank}: {predicted.estimate.memory[rank].total} bytes at most</title>" in text


def test_without_speeds_time_has_no_unit() -> None:
    found = pictures(plan_job(job(parallel__pipeline__stages=2)))
    assert list(found) == ["timeline.svg", "timeline.json", "memory.svg"]
    assert "share of the step" in found["timeline.svg"]
    assert "predicted" not in found["timeline.svg"]
    assert "actions, in their order" in found["memory.svg"]
    assert "seconds" not in found["timeline.json"]


def test_over_device_matrices_no_memory_is_drawn() -> None:
    plan = plan_job(compose(["recipe=lm_recursive"]).job)
    assert plan.sharding is not None
    assert list(pictures(plan)) == ["timeline.svg", "timeline.json"]

from __future__ import annotations

import json

import pytest

from launcher.plan.schedule.simulate import Timeline
from launcher.plan.schedule.timeline import chrome, text
from tests.plan.schedule.drawn import NOTHING, TIMELINES, drawn, every, split

GOLDEN = {
    "1f1b": (
        drawn("1f1b", 3, 1, 4), 54,
        "rank 0 |000111222............AAAAAA333BBBBBB...CCCCCC...DDDDDD|\n"
        "rank 1 |...000111......AAAAAA222BBBBBB333CCCCCC...DDDDDD......|\n"
        "rank 2 |......000AAAAAA111BBBBBB222CCCCCC333DDDDDD............|",
    ),
    "more than ten": (drawn("1f1b", 1, 1, 12), 36, "rank 0 |0AA1BB2CC3DD4EE5FF6GG7HH8II9JJ0AA1BB|"),
    "split backward": (split(), 6, "rank 0 |00aaww|"),
    "nothing": (NOTHING, 4, "rank 0 |....|"),
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN)
def test_text_shows_who_does_what_when(case: str) -> None:
    timeline, width, golden = GOLDEN[case]
    assert text(timeline, width) == golden


@every
def test_text_has_a_row_a_rank_as_wide_as_asked(timeline: Timeline) -> None:
    rows = text(timeline, 50).splitlines()
    assert len(rows) == len(timeline.busy)
    assert {len(row) for row in rows} == {len(f"rank {len(rows) - 1} ||") + 50}


@every
def test_the_trace_has_one_event_an_action(timeline: Timeline) -> None:
    trace = json.loads(chrome(timeline))["traceEvents"]
    ran = [(e["tid"], e["name"], e["args"]) for e in trace if e["ph"] == "X"]
    wanted = [
        (e.rank, str(e.action), {"stage": e.action.stage, "micro batch": e.action.micro}) for e in timeline.events
    ]
    assert ran == wanted
    assert [e["args"]["name"] for e in trace if e["ph"] == "M"] == [
        f"pipeline rank {r}" for r in range(len(timeline.busy))
    ]


def test_the_trace_is_to_scale() -> None:
    trace = json.loads(chrome(TIMELINES["gpipe"], step_us=12_000))["traceEvents"]
    assert [(e["ts"], e["dur"], e["cat"]) for e in trace if e["ph"] == "X"][2:5] == [
        (2000.0, 1000.0, "forward"), (6000.0, 2000.0, "backward"), (8000.0, 2000.0, "backward"),
    ]  # fmt: skip


def test_a_trace_in_seconds_says_them_and_goes_on_to_the_end_of_the_step() -> None:
    timeline = TIMELINES["gpipe"]
    after = (("gradients and weights on the network", 0.5), ("optimizer", 0.25))
    trace = json.loads(chrome(timeline, after=after))["traceEvents"]
    events = [e for e in trace if e["ph"] == "X"]
    n = len(timeline.events)
    assert [(e["ts"], e["dur"], e["args"]["seconds"]) for e in events[:n]] == [
        (1e6 * e.start, 1e6 * (e.end - e.start), e.end - e.start) for e in timeline.events
    ]
    assert [{k: v for k, v in e.items() if k in ("name", "cat", "tid", "ts", "dur", "args")} for e in events[n:]] == [
        {"name": name, "cat": "after the schedule", "tid": rank, "ts": 1e6 * start, "dur": 1e6 * long,
         "args": {"seconds": long}}
        for (name, long), start in zip(after, (timeline.makespan, timeline.makespan + 0.5), strict=True)
        for rank in (0, 1)
    ]  # fmt: skip

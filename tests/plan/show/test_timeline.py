from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from launcher.plan.schedule.simulate import Timeline
from launcher.plan.show.timeline import chrome, text
from tests.plan.show.drawn import NOTHING, TIMELINES, drawn, every, lanes, split

AFTER = (("gradients and weights on the network", 0.5), ("optimizer", 0.25))
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
    trace = json.loads(chrome(timeline, after=AFTER))["traceEvents"]
    events = [e for e in trace if e["ph"] == "X"]
    n = len(timeline.events)
    assert [(e["ts"], e["dur"], e["args"]["seconds"]) for e in events[:n]] == [
        (1e6 * e.start, 1e6 * (e.end - e.start), e.end - e.start) for e in timeline.events
    ]
    assert [{k: v for k, v in e.items() if k in ("name", "cat", "tid", "ts", "dur", "args")} for e in events[n:]] == [
        {"name": name, "cat": "after the schedule", "tid": rank, "ts": 1e6 * start, "dur": 1e6 * long,
         "args": {"seconds": long}}
        for (name, long), start in zip(AFTER, (timeline.makespan, timeline.makespan + 0.5), strict=True)
        for rank in (0, 1)
    ]  # fmt: skip


def threads(text: str) -> dict[str, list[dict[str, Any]]]:
    """Return events by the name of their thread, in the order in which viewers show threads."""
    rows = json.loads(text)["traceEvents"]
    place = {e["tid"]: e["args"]["sort_index"] for e in rows if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in rows if e["name"] == "thread_name"}
    ordered = sorted(names, key=lambda tid: place.get(tid, tid))
    return {names[tid]: [e for e in rows if e["ph"] == "X" and e["tid"] == tid] for tid in ordered}


def test_lanes_are_threads_below_that_of_their_rank() -> None:
    timeline = drawn("1f1b", 2, 1, 3, transfer=0.25)
    over_tp, weights = lanes(timeline)
    found = threads(chrome(timeline, after=AFTER, lanes=(over_tp, weights)))
    kinds = ("", ": messages", ": tp", ": data-parallel")
    assert list(found) == [f"pipeline rank {r}{kind}" for r in (0, 1) for kind in kinds]
    for rank in (0, 1):
        for lane in (over_tp, weights):
            events = found[f"pipeline rank {rank}: {lane.name}"]
            assert [(e["name"], e["cat"], e["ts"], e["dur"], e["args"]["seconds"]) for e in events] == [
                (s.name, lane.label, round(1e6 * s.start, 3), round(1e6 * s.seconds, 3), round(s.seconds, 9))
                for s in lane.stretches
                if s.rank == rank
            ]
    assert found["pipeline rank 1: data-parallel"][0]["args"] == {
        "seconds": 2.5,
        "all_gather": {"count": 4, "bytes": 3 << 30, "seconds": 1.5},
        "reduce_scatter": {"count": 1, "bytes": 1 << 20, "seconds": 1.0},
    }


def test_messages_are_told_with_where_they_go() -> None:
    found = threads(chrome(drawn("gpipe", 2, 1, 2, transfer=0.25), after=AFTER))
    sent = {name: [(e["name"], e["ts"], e["dur"]) for e in rows] for name, rows in found.items() if ":" in name}
    assert sent == {
        "pipeline rank 0: messages": [("0F0 to stage 1", 1e6, 250000.0), ("0F1 to stage 1", 2e6, 250000.0)],
        "pipeline rank 1: messages": [("1B0 to stage 0", 5.25e6, 250000.0), ("1B1 to stage 0", 7.25e6, 250000.0)],
    }


def test_messages_that_overlap_are_on_threads_of_their_own() -> None:
    """A message takes 2.5, and two more leave in that time."""
    trace = json.loads(chrome(drawn("gpipe", 2, 1, 4, transfer=2.5), after=AFTER))["traceEvents"]
    names = [e["args"]["name"] for e in trace if e["name"] == "thread_name"]
    assert names.count("pipeline rank 0: messages") == 3
    for tid in range(len(names)):
        ends = [(e["ts"], e["ts"] + e["dur"]) for e in trace if e["ph"] == "X" and e["tid"] == tid]
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(ends)))


def test_a_trace_of_too_many_actions_has_no_lanes_as_long() -> None:
    timeline = drawn("1f1b", 20, 1, 128, transfer=0.25)
    found = threads(chrome(timeline, after=AFTER, lanes=lanes(timeline)))
    assert {name.partition(": ")[2] for name in found} == {"", "messages", "data-parallel"}


@every
def test_without_seconds_a_trace_has_no_other_threads(timeline: Timeline) -> None:
    assert chrome(replace(timeline, transfer=0.25), lanes=lanes(timeline)) == chrome(timeline)

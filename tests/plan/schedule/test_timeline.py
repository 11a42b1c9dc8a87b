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

"""A simulated schedule to look at: as text, or as a trace for a viewer."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from launcher.plan.schedule.actions import Action
from launcher.plan.schedule.simulate import Event, Timeline
from launcher.plan.schedule.svg import NAMES, svg

__all__ = ["chrome", "svg", "text"]

GLYPHS = {"F": "0123456789", "B": "ABCDEFGHIJ", "I": "abcdefghij", "W": "w"}


def text(timeline: Timeline, width: int = 72) -> str:
    """One row a pipeline rank, ``width`` columns of equal time, each showing what runs in its middle.

    A forward is the last digit of its micro batch, a backward that digit as a letter (A is 0; small when only
    the input gradient), a weight gradient w, a bubble a dot.
    """
    rows: list[list[Event]] = [[] for _ in timeline.busy]
    for e in timeline.events:
        rows[e.rank].append(e)
    wide = len(str(len(rows) - 1))
    middles = [(col + 0.5) * timeline.makespan / width for col in range(width)]
    return "\n".join(
        f"rank {r:<{wide}} |{''.join(_glyph(row, t, timeline.pieces) for t in middles)}|"
        for r, row in enumerate(rows)
    )


def _glyph(row: list[Event], time: float, pieces: int) -> str:
    last = bisect_right(row, time, key=attrgetter("start")) - 1
    return _letter(row[last].action, pieces) if last >= 0 and time < row[last].end else "."


def _letter(a: Action, pieces: int) -> str:
    return GLYPHS[a.kind][a.micro // pieces % len(GLYPHS[a.kind])]


def chrome(timeline: Timeline, step_us: float = 1e6, after: Sequence[tuple[str, float]] | None = None) -> str:
    """A trace for chrome://tracing or Perfetto, one event an action; a step of ``step_us`` microseconds.

    With ``after``, as ``svg`` takes it, microseconds are those of the timeline: each event says its seconds,
    and what comes after the schedule is an event of every rank.
    """
    scale = step_us / (timeline.makespan or 1.0) if after is None else 1e6

    # a thread a rank, and a complete event ("X") an action
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": r, "args": {"name": f"pipeline rank {r}"}}
        for r in range(len(timeline.busy))
    ]
    events = [
        {"name": str(e.action), "cat": NAMES[e.action.kind], "ph": "X", "pid": 0, "tid": e.rank,
         "ts": round(e.start * scale, 3), "dur": round((e.end - e.start) * scale, 3),
         "args": _args(e.action, timeline.pieces) | ({} if after is None else _seconds(e.end - e.start))}
        for e in timeline.events
    ]  # fmt: skip
    start = timeline.makespan
    for name, n in after or ():
        event = {"name": name, "cat": "after the schedule", "ph": "X", "pid": 0}
        at = {"ts": round(start * scale, 3), "dur": round(n * scale, 3), "args": _seconds(n)}
        events += [event | {"tid": r} | at for r in range(len(timeline.busy))]
        start += n

    rows = ",\n".join(json.dumps(e) for e in names + events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{rows}\n]}}\n'


def _seconds(n: float) -> dict[str, float]:
    """To the nanosecond."""
    return {"seconds": round(n, 9)}


def _args(a: Action, pieces: int) -> dict[str, int]:
    cut = {"piece": a.micro % pieces} if pieces > 1 else {}
    return {"stage": a.stage, "micro batch": a.micro // pieces, **cut}

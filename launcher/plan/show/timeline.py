"""A simulated schedule as text, or as a trace for a viewer."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from operator import attrgetter
from typing import Any

from launcher.plan.schedule.lanes import Lane, Stretch, messages
from launcher.plan.schedule.schedules import Action
from launcher.plan.schedule.simulate import Event, Timeline
from launcher.plan.show.timeline_svg import MANY, NAMES

GLYPHS = {"F": "0123456789", "B": "ABCDEFGHIJ", "I": "abcdefghij", "W": "w"}


def text(timeline: Timeline, width: int = 72) -> str:
    """Returns one row per pipeline rank; each of ``width`` columns shows the action at its midpoint in time.

    A forward is the last digit of its micro batch. A backward is that digit as a letter (A is 0), in lower
    case if it is only the input gradient. A weight gradient is w, a bubble is a dot.
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


def chrome(
    timeline: Timeline,
    step_us: float = 1e6,
    after: Sequence[tuple[str, float]] | None = None,
    lanes: Sequence[Lane] = (),
) -> str:
    """Returns a trace for chrome://tracing or Perfetto with one event per action.

    A schedule takes ``step_us`` microseconds. With ``after`` and ``lanes``, as ``svg`` takes them, it takes
    the time of the timeline instead: each event has its seconds, what follows the schedule is an event of
    every rank, and messages and lanes are separate threads below that of their rank. Lanes with more than
    ``MANY`` stretches are left out.
    """
    scale = step_us / (timeline.makespan or 1.0) if after is None else 1e6
    ranks = range(len(timeline.busy))

    # one thread per rank, and one complete event ("X") per action
    names = [_thread(r, "thread_name", name=f"pipeline rank {r}") for r in ranks]
    events = []
    for e in timeline.events:
        seconds = {} if after is None else _seconds(e.end - e.start)
        args = _args(e.action, timeline.pieces) | seconds
        events.append(_event(e, str(e.action), NAMES[e.action.kind], e.rank, scale=scale, args=args))
    start = timeline.makespan
    for name, n in after or ():
        at = Stretch(0, start, start + n, name)
        events += [_event(at, name, "after the schedule", r, scale=scale, args=_seconds(n)) for r in ranks]
        start += n

    # threads of network traffic, numbered after the ranks and each shown below its rank
    network = [] if after is None else [*_network([messages(timeline), *lanes], ranks)]
    for tid, (lane, row) in enumerate(network, start=len(ranks)):
        names.append(_thread(tid, "thread_name", name=f"pipeline rank {row[0].rank}: {lane.name}"))
        events += [_event(s, s.name, lane.label, tid, scale=scale, args=_made(s)) for s in row]
    if network:
        owners = [*ranks, *(row[0].rank for _, row in network)]
        order = sorted(range(len(owners)), key=owners.__getitem__)
        names += [_thread(tid, "thread_sort_index", sort_index=i) for i, tid in enumerate(order)]

    rows = ",\n".join(json.dumps(e) for e in names + events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{rows}\n]}}\n'


def _network(lanes: Sequence[Lane], ranks: Iterable[int]) -> Iterator[tuple[Lane, list[Stretch]]]:
    """Yields rows of stretches of one rank that do not overlap, as viewers require of a thread."""
    for rank, lane in product(ranks, (lane for lane in lanes if len(lane.stretches) <= MANY)):
        rows: list[list[Stretch]] = []
        for s in (s for s in lane.stretches if s.rank == rank):
            free = next((row for row in rows if row[-1].end <= s.start), None)
            if free is None:
                rows.append(free := [])
            free.append(s)
        yield from ((lane, row) for row in rows)


def _thread(tid: int, record: str, **args: str | int) -> dict[str, Any]:
    return {"name": record, "ph": "M", "pid": 0, "tid": tid, "args": args}


def _event(
    at: Event | Stretch, name: str, cat: str, tid: int, *, scale: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(at.start * scale, 3), "dur": round((at.end - at.start) * scale, 3)}
    return {"name": name, "cat": cat, "ph": "X", "pid": 0, "tid": tid, **times, "args": args}


def _seconds(n: float) -> dict[str, float]:
    """Returns the seconds, rounded to nanoseconds."""
    return {"seconds": round(n, 9)}


def _made(s: Stretch) -> dict[str, Any]:
    parts = {p.kind: {"count": p.count, "bytes": p.nbytes} | _seconds(p.seconds) for p in s.parts}
    return _seconds(s.seconds) | parts


def _args(a: Action, pieces: int) -> dict[str, int]:
    cut = {"piece": a.micro % pieces} if pieces > 1 else {}
    return {"stage": a.stage, "micro batch": a.micro // pieces, **cut}

"""A simulated schedule as an SVG: one row per pipeline rank, time to the right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle

from launcher.plan.schedule.lanes import Lane, Stretch
from launcher.plan.schedule.schedules import Kind
from launcher.plan.schedule.simulate import Event, Timeline
from launcher.plan.show import chart_axis as time_axis
from launcher.plan.values.text import many, seconds_text

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
COLORS: dict[Kind, str] = {"F": "#2c6fbb", "B": "#2e8b57", "I": "#158a92", "W": "#d9902f"}
PALER = 0.6
"""How close to white the color of a rank's last chunk is."""
MANY = 5000
"""The most actions that are drawn as separate bars with names: more would make megabytes."""

LATER = ("#8250df", "#bf3989", "#57606a", "#a40e26")
"""The colors of what follows the schedule, used in turn."""
LEFT, RIGHT, TOP, LEGEND, ROW, BAR = 136, 28, 96, 20, 38, 30
NEXT, BEFORE, LINE = BAR + 2.5, BAR + 5.5, 2.5
"""Messages to the next stage and to the one before: how far below the top of a row, and how thick."""
LANES = {"tp": "#cf222e", "data-parallel": "#24292f"}
LANE, THICK, APART = 5, 3.5, 3
"""Lanes of collectives: their distance, their thickness, and the extra distance to the next row."""
STYLE = (
    "text{font-family:sans-serif;font-size:12px;fill:#24292f}"
    ".head{font-size:16px;font-weight:600}.soft{fill:#6e7781;font-size:11px}"
    ".light{fill:#fff;text-anchor:middle}.dark{text-anchor:middle}.tick{fill:#6e7781;font-size:11px;text-anchor:middle}"
)


@dataclass(frozen=True)
class _Picture:
    """The timeline to draw.

    ``after``: names and seconds of what follows the schedule; ``None`` if time has no unit. ``lanes``: those
    of collectives.
    """

    timeline: Timeline
    after: tuple[tuple[str, float], ...] | None
    lanes: tuple[Lane, ...]

    @cached_property
    def span(self) -> float:
        """The length of the time axis, in the unit of the timeline."""
        return self.timeline.makespan + sum(n for _, n in self.after or ())

    @cached_property
    def inner(self) -> float:
        """The pixels of the time axis: enough for the number in an action of average length."""
        t = self.timeline
        mean = sum(t.busy) / max(len(t.events), 1) or 1.0
        return min(max(760.0, 26 * self.span / mean), 2400.0)

    @cached_property
    def scale(self) -> float:
        return self.inner / (self.span or 1.0)

    @property
    def top(self) -> int:
        """The y of the first row, below the legend."""
        more = [self.after, self.sent or self.lanes, self.lanes]
        return TOP + LEGEND * sum(map(bool, more))

    @property
    def row(self) -> int:
        """The height of the row of a rank."""
        return ROW + (LANE * len(self.lanes) + APART if self.lanes else 0)

    @property
    def bottom(self) -> int:
        return self.top + self.row * len(self.timeline.busy)

    @cached_property
    def sent(self) -> tuple[Event, ...]:
        """The messages that are drawn."""
        t = self.timeline
        return t.sent if t.transfer and len(t.events) <= MANY else ()


def svg(
    timeline: Timeline, after: Sequence[tuple[str, float]] | None = None, lanes: Sequence[Lane] = ()
) -> str:
    """Draws a timeline: colors show kinds of actions, numbers micro batches, paler shades later chunks.

    With ``after``, time is in seconds. What follows the schedule is then drawn across all ranks. Messages are
    drawn below the actions of the rank that sends them, from the end of an action to their arrival. Below
    them are the ``lanes`` of collectives, which may last longer than the schedule.

    Hovering shows torch's name of an action. The picture is as wide as its labels need, within bounds;
    actions too narrow for a number have none. With more than ``MANY`` actions, those of one kind that touch
    are drawn as one, without names, numbers and messages, and the picture says so.
    """
    picture = _Picture(timeline, None if after is None else tuple(after), tuple(lanes))
    width, height = LEFT + picture.inner + RIGHT, picture.bottom + 46

    # title, legend and axes
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<title>{_title(picture)}</title>",
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *_head(picture),
        *_grid(picture),
        *_later(picture),
    ]

    # the actions
    chunks = _chunks(timeline)
    shaded = [(e, _shade(e.action.kind, *chunks[e.action.stage])) for e in timeline.events]
    if len(shaded) > MANY:
        lines += _merged(shaded, picture, BAR / 2, BAR)
    else:
        lines += [line for e, fill in shaded for line in _bar(e, picture, fill)]

    # the network traffic
    for kinds, y in (("F", NEXT), ("BI", BEFORE)):
        going = [(e, COLORS["F" if kinds == "F" else "B"]) for e in picture.sent if e.action.kind in kinds]
        lines += _merged(going, picture, y, LINE) if going else ()
    lines += [line for i, lane in enumerate(picture.lanes) for line in _lane(lane, picture, i)]
    return "\n".join([*lines, "</svg>\n"])


def _title(picture: _Picture) -> str:
    t = picture.timeline
    micros = many(len({e.action.micro // t.pieces for e in t.events}), "micro batch")
    cut = f" in {t.pieces} pieces" if t.pieces > 1 else ""
    long = "" if picture.after is None else f", {seconds_text(picture.span)} (predicted)"
    return f"One step: {many(len(t.busy), 'pipeline rank')}, {micros}{cut}, bubble {t.bubble:.1%}{long}"


def _head(picture: _Picture) -> Iterator[str]:
    """Draws the title and the legend."""
    t = picture.timeline
    yield f'<text class="head" x="{LEFT}" y="28">{_title(picture)}</text>'
    bar = "a bar shows its micro batch"
    if len(t.events) > MANY:
        bar = f"a bar merges adjacent actions of one kind ({len(t.events)} actions)"
    below = ", its messages are below it" if picture.sent else ""
    sent = f"{t.messages} messages between ranks; {bar}{below}; holds: the most micro batches at once"
    yield f'<text class="soft" x="{LEFT}" y="48">{sent}</text>'

    # a box for every shade of a kind, then the name of the kind
    x = LEFT
    shades = max((n for _, n in _chunks(t).values()), default=1)
    for kind in [k for k in NAMES if any(e.action.kind == k for e in t.events)]:
        for chunk in range(shades):
            yield f'<rect x="{x}" y="62" width="14" height="14" rx="2" fill="{_shade(kind, chunk, shades)}"/>'
            x += 16
        label = NAMES[kind] + (f", chunks 0 to {shades - 1}" if shades > 1 else "")
        yield f'<text x="{x + 4}" y="73">{label}</text>'
        x += 28 + 7 * len(label)

    idle = f'<text x="{x + 20}" y="73">idle</text>'
    yield f'<rect x="{x}" y="62" width="14" height="14" rx="2" fill="#eef1f4"/>{idle}'

    # what follows the schedule and the network traffic, in separate rows
    y = 62
    if picture.after:
        y += LEGEND
        later = zip(picture.after, cycle(LATER), strict=False)
        yield from _legend(y, [([fill], f"{name} {seconds_text(n)}") for (name, n), fill in later])
    if picture.sent or picture.lanes:
        yield from _legend(y + LEGEND, _network(picture))
    if picture.lanes:
        caption = (
            "collectives are drawn as late as possible: their durations are predicted, their starts are not"
        )
        yield f'<text class="soft" x="{LEFT}" y="{y + 2 * LEGEND + 11}">{caption}</text>'


def _network(picture: _Picture) -> Iterator[tuple[list[str], str]]:
    """Yields the colors and names of the lanes that are drawn."""
    if picture.sent:
        yield [COLORS["F"], COLORS["B"]], "messages"
    for lane in picture.lanes:
        yield [LANES[lane.name]], lane.label


def _legend(y: int, entries: Iterable[tuple[list[str], str]]) -> Iterator[str]:
    """Draws a row of boxes with their names."""
    x = LEFT
    for fills, label in entries:
        for fill in fills:
            yield f'<rect x="{x}" y="{y}" width="14" height="14" rx="2" fill="{fill}"/>'
            x += 16
        yield f'<text x="{x + 4}" y="{y + 11}">{label}</text>'
        x += 28 + 7 * len(label)


def _grid(picture: _Picture) -> Iterator[str]:
    """Draws one row per rank, and the time axis."""
    t, inner, top = picture.timeline, picture.inner, picture.top
    for rank, (busy, in_flight) in enumerate(zip(t.busy, t.in_flight, strict=True)):
        y = top + picture.row * rank
        share = busy / picture.span if picture.span else 0.0
        yield f'<rect x="{LEFT}" y="{y}" width="{inner:.1f}" height="{BAR}" fill="#eef1f4"/>'
        yield f'<text x="16" y="{y + 13}">rank {rank}</text>'
        yield f'<text class="soft" x="16" y="{y + 27}">busy {share:.0%}, holds {in_flight}</text>'

    ticks = time_axis.shares() if picture.after is None else time_axis.seconds(picture.span)
    yield from time_axis.drawn(ticks, left=LEFT, inner=inner, bottom=picture.bottom)


def _later(picture: _Picture) -> Iterator[str]:
    """Draws what follows the schedule, across all ranks."""
    start = picture.timeline.makespan
    high = picture.bottom - picture.top - (APART if picture.lanes else ROW - BAR)
    for (name, n), fill in zip(picture.after or (), cycle(LATER), strict=False):
        x, wide = LEFT + start * picture.scale, n * picture.scale
        box = f'x="{x:.2f}" y="{picture.top}" width="{wide:.2f}" height="{high}" fill="{fill}"'
        yield f"<rect {box}><title>{name}, {seconds_text(n)}</title></rect>"
        start += n


def _bar(e: Event, picture: _Picture, fill: str) -> Iterator[str]:
    scale, pieces = picture.scale, picture.timeline.pieces
    x, wide, y = LEFT + e.start * scale, (e.end - e.start) * scale, picture.top + picture.row * e.rank
    gap = 1.0 if wide > 4 else 0.0
    box = f'x="{x:.2f}" y="{y}" width="{wide - gap:.2f}" height="{BAR}" fill="{fill}"'
    long = "" if picture.after is None else f", {seconds_text(e.end - e.start)}"
    yield f"<rect {box}><title>{e.action}{long}</title></rect>"
    micro, piece = divmod(e.action.micro, pieces)
    label = f"{micro}.{piece}" if pieces > 1 else str(micro)
    if wide > 8 * len(label):
        tone = "dark" if _bright(fill) else "light"
        yield f'<text class="{tone}" x="{x + (wide - gap) / 2:.2f}" y="{y + 19}">{label}</text>'


def _lane(lane: Lane, picture: _Picture, at: int) -> Iterator[str]:
    """Draws lane number ``at``, counted downwards from the messages."""
    fill, scale = LANES[lane.name], picture.scale
    y = (ROW if picture.sent else BAR + 2) + LANE * at
    if len(lane.stretches) > MANY:
        yield from _merged([(s, fill) for s in lane.stretches], picture, y + THICK / 2, THICK)
        return
    yield f'<g fill="{fill}">'
    for s in lane.stretches:
        x, wide = LEFT + s.start * scale, s.seconds * scale
        box = f'x="{x:.2f}" y="{picture.top + picture.row * s.rank + y}" width="{wide:.2f}" height="{THICK}"'
        made = "".join(f"; {part}" for part in s.parts)
        yield f"<rect {box}><title>{s.name}, {seconds_text(s.seconds)}{made}</title></rect>"
    yield "</g>"


def _merged(
    shaded: Iterable[tuple[Event | Stretch, str]], picture: _Picture, y: float, thick: float
) -> Iterator[str]:
    """Draws one path per color, with a stretch for each run of bars that touch, in tenths of a pixel.

    ``y``: the distance below the top of a row.
    """
    runs: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for e, fill in shaded:
        spans = runs.setdefault(fill, {}).setdefault(e.rank, [])
        start, end = round(10 * picture.scale * e.start), round(10 * picture.scale * e.end)
        if spans and spans[-1][1] >= start:
            start, _ = spans.pop()
        spans.append((start, end))
    yield f'<g transform="translate({LEFT} {picture.top + y:g}) scale(.1 1)" stroke-width="{thick:g}">'
    for fill, rows in runs.items():
        path = "".join(_stretches(picture.row * rank, spans) for rank, spans in rows.items())
        yield f'<path stroke="{fill}" d="{path}"/>'
    yield "</g>"


def _stretches(y: int, spans: list[tuple[int, int]]) -> str:
    """Returns the path of the ``spans`` of one row, each relative to the end of the one before."""
    (start, end), *rest = spans
    ends = [end, *(b for _, b in rest)]
    more = (f"m{a - before} 0h{b - a}" for before, (a, b) in zip(ends, rest, strict=False))
    return f"M{start} {y}h{end - start}{''.join(more)}"


def _chunks(t: Timeline) -> dict[int, tuple[int, int]]:
    """Returns for each stage the number of its chunk on its rank, and how many chunks the rank has."""
    stages_of: dict[int, set[int]] = {}
    for e in t.events:
        stages_of.setdefault(e.rank, set()).add(e.action.stage)
    return {s: (n, len(stages)) for stages in stages_of.values() for n, s in enumerate(sorted(stages))}


def _shade(kind: Kind, chunk: int, chunks: int) -> str:
    pale = PALER * chunk / max(chunks - 1, 1)
    return "#" + "".join(f"{round(c + (255 - c) * pale):02x}" for c in bytes.fromhex(COLORS[kind][1:]))


def _bright(color: str) -> bool:
    red, green, blue = bytes.fromhex(color[1:])
    return 299 * red + 587 * green + 114 * blue > 150_000

"""The memory of a step as an SVG: one chart per pipeline rank, time to the right, bytes upwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import ceil, floor

from launcher.plan.memory.memory_curves import MemoryCurve, MemoryPeriod
from launcher.plan.show import chart_axis
from launcher.plan.values.text import bytes_text, many, spans

GB = 1 << 30
TEMPORARY, ALWAYS, ROOM = "#2c6fbb", "#aac4e2", "#cf222e"
LEFT, RIGHT, TOP, ROW, HIGH, WIDE = 160, 28, 96, 92, 72, 900
STYLE = (
    "text{font-family:sans-serif;font-size:12px;fill:#24292f}"
    ".head{font-size:16px;font-weight:600}.soft{fill:#6e7781;font-size:11px}"
    ".left{fill:#6e7781;font-size:11px;text-anchor:end}.end{text-anchor:end}"
    ".tick{fill:#6e7781;font-size:11px;text-anchor:middle}"
)


@dataclass(frozen=True)
class _Picture:
    """The curves to draw; ``room``: bytes of a device, if known; ``seconds``: time is in seconds."""

    curves: tuple[MemoryCurve, ...]
    room: int | None
    seconds: bool

    @cached_property
    def span(self) -> float:
        return max(c.spans[-1].end for c in self.curves)

    @cached_property
    def most(self) -> int:
        """Bytes at the upper end of each chart."""
        return max(*(c.fullest.nbytes for c in self.curves), self.room or 0, 1)

    def x(self, time: float) -> float:
        return WIDE * time / (self.span or 1.0)

    def y(self, nbytes: int) -> float:
        """Returns the pixels from the upper end of a chart down to ``nbytes``."""
        return HIGH - HIGH * nbytes / self.most


def svg(curves: Sequence[MemoryCurve], room: int | None = None, *, seconds: bool = False) -> str:
    """Draws charts of one scale below each other; each marks its peak, and a dashed line shows ``room``.

    A pixel shows the most bytes in use during its time. Hovering shows the bytes of the peak.
    """
    picture = _Picture(tuple(curves), room, seconds)
    width, height = LEFT + WIDE + RIGHT, TOP + ROW * len(curves) + 46
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<title>{_title(picture)}</title>",
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *_head(picture),
    ]
    for i, curve in enumerate(curves):
        lines += _chart(curve, picture, TOP + ROW * i)
    ticks = (
        chart_axis.seconds(picture.span)
        if seconds
        else chart_axis.numbers("actions, in their order", picture.span)
    )
    lines += chart_axis.drawn(ticks, left=LEFT, inner=WIDE, bottom=TOP + ROW * len(curves))
    return "\n".join([*lines, "</svg>\n"])


def _title(picture: _Picture) -> str:
    most = max(c.fullest.nbytes for c in picture.curves)
    of = "" if picture.room is None else f" of {bytes_text(picture.room)}"
    ranks = many(len(picture.curves), "pipeline rank")
    return f"Memory over one step: {ranks}, at most {bytes_text(most)}{of} on a device"


def _head(picture: _Picture) -> Iterator[str]:
    """Draws the title and the legend."""
    yield f'<text class="head" x="{LEFT}" y="28">{_title(picture)}</text>'
    caption = "each chart is of the fullest rank of a pipeline rank; its peak is the total in the plan"
    yield f'<text class="soft" x="{LEFT}" y="48">{caption}</text>'
    x = LEFT
    for fill, label in (
        (ALWAYS, "weights and optimizer"),
        (TEMPORARY, "gradients, gathered weights, activations"),
    ):
        yield f'<rect x="{x}" y="62" width="14" height="14" rx="2" fill="{fill}"/>'
        yield f'<text x="{x + 20}" y="73">{label}</text>'
        x += 44 + 7 * len(label)
    if picture.room is not None:
        yield f'<path d="M{x} 69h20" stroke="{ROOM}" stroke-dasharray="6 4"/>'
        yield f'<text x="{x + 26}" y="73">memory of a device, {bytes_text(picture.room)}</text>'


def _chart(curve: MemoryCurve, picture: _Picture, top: int) -> Iterator[str]:
    """Draws the chart of one pipeline rank."""
    who = f"rank{'s' if len(curve.ranks) > 1 else ''} {spans(curve.ranks)}"
    yield f'<rect x="{LEFT}" y="{top}" width="{WIDE}" height="{HIGH}" fill="#eef1f4"/>'
    yield f'<text x="16" y="{top + 13}">{who}</text>'

    # the scale of bytes has two labels: 0 and the largest round number
    upper = chart_axis.ticks(picture.most / GB)[-1]
    for n in dict.fromkeys((0.0, upper)):
        y = top + picture.y(round(n * GB))
        yield f'<text class="left" x="{LEFT - 6}" y="{y + 4:.1f}">{n:g} GB</text>'
        yield f'<path d="M{LEFT - 4} {y:.1f}h4" stroke="#8c959f"/>'

    # all bytes, and the part of them that is always in use
    peak = curve.fullest
    name = f"rank {curve.rank}: {peak.nbytes} bytes at most"
    path = "".join(f"V{picture.y(nbytes):.1f}h{n}" for n, nbytes in _pixels(curve.spans, picture))
    at = f'transform="translate({LEFT} {top})"'
    yield f'<path {at} fill="{TEMPORARY}" d="M0 {HIGH}{path}V{HIGH}z"><title>{name}</title></path>'
    low = picture.y(curve.always)
    yield f'<rect x="{LEFT}" y="{top + low:.1f}" width="{WIDE}" height="{HIGH - low:.1f}" fill="{ALWAYS}"/>'
    if picture.room is not None:
        y = top + picture.y(picture.room)
        yield f'<path d="M{LEFT} {y:.1f}h{WIDE}" stroke="{ROOM}" stroke-dasharray="6 4"/>'
    yield from _peak(peak, picture, top)


def _peak(peak: MemoryPeriod, picture: _Picture, top: int) -> Iterator[str]:
    """Draws the peak as a point, with its bytes on the side that has space."""
    x, y = LEFT + picture.x((peak.start + peak.end) / 2), top + picture.y(peak.nbytes)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    right = x < LEFT + WIDE / 2
    beside = f'x="{x + 7:.1f}"' if right else f'class="end" x="{x - 7:.1f}"'
    yield f'<text {beside} y="{y - 5:.1f}">{bytes_text(peak.nbytes)}</text>'


def _pixels(held_spans: Sequence[MemoryPeriod], picture: _Picture) -> Iterator[tuple[int, int]]:
    """Yields runs of pixel columns as (count, bytes); a column shows the most bytes in use in its time."""
    columns = [0] * WIDE
    for s in held_spans:
        first = min(floor(picture.x(s.start)), WIDE - 1)
        for x in range(first, max(first + 1, min(ceil(picture.x(s.end)), WIDE))):
            columns[x] = max(columns[x], s.nbytes)
    for nbytes, same in groupby(columns):
        yield len([*same]), nbytes

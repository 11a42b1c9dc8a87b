"""A simulated schedule as a picture: one row a pipeline rank, time to the right."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.plan.schedule.actions import Kind
from launcher.plan.schedule.simulate import Event, Timeline
from launcher.plan.values.text import many

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
COLOURS: dict[Kind, str] = {"F": "#2c6fbb", "B": "#2e8b57", "I": "#158a92", "W": "#d9902f"}
PALER = 0.6
"""How far towards white the last chunk of a rank goes."""
MANY = 5000
"""Beyond so many actions each bar by itself, with its name, would make megabytes."""

LEFT, RIGHT, TOP, ROW, BAR = 136, 28, 96, 38, 30
STYLE = (
    "text{font-family:sans-serif;font-size:12px;fill:#24292f}"
    ".head{font-size:16px;font-weight:600}.soft{fill:#6e7781;font-size:11px}"
    ".light{fill:#fff;text-anchor:middle}.dark{text-anchor:middle}.tick{fill:#6e7781;font-size:11px;text-anchor:middle}"
)


def svg(timeline: Timeline) -> str:
    """Colour says what runs, the number which micro batch, a paler shade a later chunk.

    Hovering shows torch's name of it. As wide as its labels need, within bounds; actions too narrow for a
    number have none. Of more than ``MANY`` actions those of one kind that touch are drawn as one, without
    names and numbers, and the picture says so.
    """
    # wide enough for the number in an action of average length
    mean = sum(timeline.busy) / max(len(timeline.events), 1) or 1.0
    inner = min(max(760.0, 26 * timeline.makespan / mean), 2400.0)
    width, height = LEFT + inner + RIGHT, TOP + ROW * len(timeline.busy) + 46
    scale = inner / (timeline.makespan or 1.0)

    # what stands around the actions
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<title>{_title(timeline)}</title>",
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *_head(timeline),
        *_grid(timeline, inner),
    ]

    # the actions themselves
    chunks = _chunks(timeline)
    shaded = [(e, _shade(e.action.kind, *chunks[e.action.stage])) for e in timeline.events]
    if len(shaded) > MANY:
        lines += _merged(shaded, scale)
    else:
        lines += [line for e, fill in shaded for line in _bar(e, scale, fill, timeline.pieces)]
    return "\n".join([*lines, "</svg>\n"])


def _title(t: Timeline) -> str:
    micros = many(len({e.action.micro // t.pieces for e in t.events}), "micro batch")
    cut = f" in {t.pieces} pieces" if t.pieces > 1 else ""
    return f"One step: {many(len(t.busy), 'pipeline rank')}, {micros}{cut}, bubble {t.bubble:.1%}"


def _head(t: Timeline) -> Iterator[str]:
    """Title and legend."""
    yield f'<text class="head" x="{LEFT}" y="28">{_title(t)}</text>'
    bar = "a bar shows its micro batch"
    if len(t.events) > MANY:
        bar = f"a bar merges those of one kind that touch, of {len(t.events)} actions"
    sent = f"{t.messages} messages between ranks; {bar}, a rank the most it holds at once"
    yield f'<text class="soft" x="{LEFT}" y="48">{sent}</text>'

    # a box for every shade of a kind, then its name
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


def _grid(t: Timeline, inner: float) -> Iterator[str]:
    """A row a rank, and the time axis in tenths of the step."""
    bottom = TOP + ROW * len(t.busy)
    for rank, (busy, held) in enumerate(zip(t.busy, t.in_flight, strict=True)):
        y = TOP + ROW * rank
        share = busy / t.makespan if t.makespan else 0.0
        yield f'<rect x="{LEFT}" y="{y}" width="{inner:.1f}" height="{BAR}" fill="#eef1f4"/>'
        yield f'<text x="16" y="{y + 13}">rank {rank}</text>'
        yield f'<text class="soft" x="16" y="{y + 27}">busy {share:.0%}, holds {held}</text>'

    # the axis below
    for tenth in range(11):
        x = LEFT + inner * tenth / 10
        yield f'<path d="M{x:.1f} {bottom}v6" stroke="#8c959f"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 19}">{tenth * 10} %</text>'
    yield f'<path d="M{LEFT} {bottom}h{inner:.1f}" stroke="#8c959f"/>'
    yield f'<text class="tick" x="{LEFT + inner / 2:.1f}" y="{bottom + 37}">share of the step</text>'


def _bar(e: Event, scale: float, fill: str, pieces: int) -> Iterator[str]:
    x, wide, y = LEFT + e.start * scale, (e.end - e.start) * scale, TOP + ROW * e.rank
    gap = 1.0 if wide > 4 else 0.0
    box = f'x="{x:.2f}" y="{y}" width="{wide - gap:.2f}" height="{BAR}" fill="{fill}"'
    yield f"<rect {box}><title>{e.action}</title></rect>"
    micro, piece = divmod(e.action.micro, pieces)
    label = f"{micro}.{piece}" if pieces > 1 else str(micro)
    if wide > 8 * len(label):
        tone = "dark" if _bright(fill) else "light"
        yield f'<text class="{tone}" x="{x + (wide - gap) / 2:.2f}" y="{y + 19}">{label}</text>'


def _merged(shaded: list[tuple[Event, str]], scale: float) -> Iterator[str]:
    """A path a colour, with a stretch for each run of bars that touch; its units are tenths of a pixel."""
    runs: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for e, fill in shaded:
        spans = runs.setdefault(fill, {}).setdefault(e.rank, [])
        start, end = round(10 * scale * e.start), round(10 * scale * e.end)
        if spans and spans[-1][1] == start:
            start, _ = spans.pop()
        spans.append((start, end))
    yield f'<g transform="translate({LEFT} {TOP + BAR // 2}) scale(.1 1)" stroke-width="{BAR}">'
    for fill, rows in runs.items():
        path = "".join(_stretches(ROW * rank, spans) for rank, spans in rows.items())
        yield f'<path stroke="{fill}" d="{path}"/>'
    yield "</g>"


def _stretches(y: int, spans: list[tuple[int, int]]) -> str:
    """``spans`` of one row, each told from where the one before ended."""
    (start, end), *rest = spans
    ends = [end, *(b for _, b in rest)]
    more = (f"m{a - before} 0h{b - a}" for before, (a, b) in zip(ends, rest, strict=False))
    return f"M{start} {y}h{end - start}{''.join(more)}"


def _chunks(t: Timeline) -> dict[int, tuple[int, int]]:
    """For each stage: which of its rank's chunks it is, and how many the rank has."""
    held: dict[int, set[int]] = {}
    for e in t.events:
        held.setdefault(e.rank, set()).add(e.action.stage)
    return {s: (n, len(stages)) for stages in held.values() for n, s in enumerate(sorted(stages))}


def _shade(kind: Kind, chunk: int, chunks: int) -> str:
    pale = PALER * chunk / max(chunks - 1, 1)
    return "#" + "".join(f"{round(c + (255 - c) * pale):02x}" for c in bytes.fromhex(COLOURS[kind][1:]))


def _bright(colour: str) -> bool:
    red, green, blue = bytes.fromhex(colour[1:])
    return 299 * red + 587 * green + 114 * blue > 150_000

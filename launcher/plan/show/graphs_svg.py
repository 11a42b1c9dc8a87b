"""The graph of a stage as an SVG: one box per call, in the order of execution."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from launcher.plan.cut.debug_graphs import ORDER_ONLY, RECEIVED, SHAPES, Call, StageGraph, shapes
from launcher.plan.values.text import bytes_text, scaled

FILLS = {
    "input": "#eef1f4", RECEIVED: "#eef1f4", "module": "#ddebfa", "glue": "#fff4d6", "output": "#dcf2e1",
}  # fmt: skip
LEFT, TOP, WIDE, HIGH, GAP, LANE = 24, 72, 460, 40, 18, 12
STYLE = (
    "text{font-family:sans-serif;font-size:13px;fill:#24292f}"
    ".head{font-size:16px;font-weight:600}.soft{fill:#6e7781;font-size:11px}.end{text-anchor:end}"
    "path{stroke:#8c959f;fill:none}rect{stroke:#8c959f}"
)
ARROW = (
    '<marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" style="fill:#8c959f"/></marker>'
)


def svg(stage: StageGraph) -> str:
    """Draws a stage.

    A straight line leads to the next box; lines to other boxes run at the side. A dashed box runs again in
    the backward. Hovering shows the call with its constants.
    """
    links = list(_links(stage))
    lanes = max([lane for _, _, lane in links], default=0)
    count = len(stage.calls) + any(c.sent for c in stage.calls)
    width, height = LEFT + WIDE + LANE * (lanes + 2) + 24, TOP + (HIGH + GAP) * count + 8
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<title>{escape(stage.title)}</title>",
            f"<style>{STYLE}</style>",
            '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>',
            ARROW,
            f'<text class="head" x="{LEFT}" y="28">{escape(stage.title)}</text>',
            f'<text class="soft" x="{LEFT}" y="48">{SHAPES if stage.linked else ORDER_ONLY}</text>',
            *(_link(start, end, lane) for start, end, lane in links),
            *(line for row, call in enumerate(stage.calls) for line in _box(row, call)),
            *_sent(stage),
            "</svg>\n",
        ]
    )


def _links(stage: StageGraph) -> Iterator[tuple[int, int, int]]:
    """Yields the first box, the last box and the lane of each link; lane 0 is the straight line.

    Links that overlap are in different lanes. The box after the last call is what the stage sends.
    """
    row = {c.name: i for i, c in enumerate(stage.calls)}
    if not stage.linked:
        yield from ((i, i + 1, 0) for i in range(len(row) - 1))
        return
    links = [(row[m], i) for i, c in enumerate(stage.calls) for m in c.inputs if m in row]
    links += [(i, len(stage.calls)) for i, c in enumerate(stage.calls) if c.sent]
    free: list[int] = []  # the box down to which each lane is in use
    for start, end in sorted(set(links)):
        if end == start + 1:
            yield start, end, 0
            continue
        lane = next((k for k, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [end]
        yield start, end, lane + 1


def _y(row: int) -> int:
    return TOP + (HIGH + GAP) * row


def _link(start: int, end: int, lane: int) -> str:
    middle = LEFT + WIDE // 2
    if not lane:
        return f'<path d="M{middle} {_y(start) + HIGH}V{_y(end)}" marker-end="url(#to)"/>'
    right, x = LEFT + WIDE, LEFT + WIDE + LANE * (lane + 1)
    low, high = _y(start) + HIGH - 8, _y(end) + 8
    return f'<path d="M{right} {low}H{x}V{high}H{right}" marker-end="url(#to)"/>'


def _box(row: int, c: Call) -> Iterator[str]:
    y = _y(row)
    dashes = ' stroke-dasharray="6 4"' if c.again else ""
    about = escape(c.text or c.call or c.name)
    yield f'<g><title>{about}</title><rect x="{LEFT}" y="{y}" width="{WIDE}" height="{HIGH}" rx="4" '
    yield f'style="fill:{FILLS.get(c.kind, "#fff")}"{dashes}/>'
    name = f"{c.name} from {c.call}" if c.kind == RECEIVED else c.call or c.name
    yield f'<text x="{LEFT + 10}" y="{y + 17}">{escape(_cut(name))}</text>'
    yield f'<text class="soft" x="{LEFT + 10}" y="{y + 32}">{escape(_cut(shapes(c.out)))}</text>'
    costs = [f"{bytes_text(c.weights)} of weights"] if c.weights else []
    costs += [f"{''.join(scaled(c.flops))} FLOPs"] if c.flops else []
    costs += [f"{bytes_text(c.saved)} saved"] if c.saved else []
    yield f'<text class="soft end" x="{LEFT + WIDE - 10}" y="{y + 32}">{", ".join(costs)}</text></g>'


def _cut(text: str, most: int = 56) -> str:
    """Shortens ``text`` to fit a box.

    >>> _cut("a" * 60, 5)
    'aa...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _sent(stage: StageGraph) -> Iterator[str]:
    if any(c.sent for c in stage.calls):
        y = _y(len(stage.calls))
        yield f'<rect x="{LEFT}" y="{y}" width="{WIDE}" height="{HIGH}" rx="4" style="fill:#eef1f4"/>'
        yield f'<text x="{LEFT + 10}" y="{y + 24}">to stage {stage.index + 1}</text>'

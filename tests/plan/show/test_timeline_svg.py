from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from launcher.plan.schedule.lanes import Lane
from launcher.plan.schedule.simulate import Timeline
from launcher.plan.show.timeline_svg import MANY, ROW, svg
from tests.plan.show.drawn import TIMELINES, drawn, every, lanes

SVG = "{http://www.w3.org/2000/svg}"


def bars(picture: str) -> list[tuple[str, dict[str, str]]]:
    """(action, attributes) of every bar."""
    rects = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return [(str(title.text), r.attrib) for r in rects if (title := r.find(f"{SVG}title")) is not None]


@every
def test_the_picture_has_a_bar_an_action(timeline: Timeline) -> None:
    assert [name for name, _ in bars(svg(timeline))] == [str(e.action) for e in timeline.events]


@every
def test_bars_of_a_rank_lie_side_by_side_in_its_own_row(timeline: Timeline) -> None:
    found = [at for _, at in bars(svg(timeline))]
    rows = [float(at["y"]) for at in found]
    assert len(set(rows)) == len({e.rank for e in timeline.events})
    for a, b in pairwise(found):
        same = a["y"] == b["y"]
        assert float(a["y"]) < float(b["y"]) or (same and float(a["x"]) + float(a["width"]) <= float(b["x"]) + 0.02)


@every
def test_nothing_is_drawn_outside_the_picture(timeline: Timeline) -> None:
    root = ElementTree.fromstring(svg(timeline))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"
    for at in (e.attrib for e in root.iter() if "x" in e.attrib):
        assert 0 <= float(at["x"]) <= float(at["x"]) + float(at.get("width", 0)) <= width
        assert 0 <= float(at["y"]) <= float(at["y"]) + float(at.get("height", 0)) <= height


def words(picture: str) -> Iterator[str]:
    return (str(e.text) for e in ElementTree.fromstring(picture).iter(f"{SVG}text"))


def test_the_picture_says_what_it_shows() -> None:
    said = [w for w in words(svg(TIMELINES["gpipe"])) if not w.isdigit()]
    assert said == [
        "One step: 2 pipeline ranks, 3 micro batches, bubble 25.0%",
        "6 messages between ranks; a bar shows its micro batch; holds: the most micro batches at once",
        "forward", "backward", "idle",
        "rank 0", "busy 75%, holds 3", "rank 1", "busy 75%, holds 3",
        *(f"{n} %" for n in range(0, 101, 10)), "share of the step",
    ]  # fmt: skip


def test_the_legend_has_what_occurs() -> None:
    assert {"forward", "input gradient", "weight gradient", "idle"} <= {*words(svg(TIMELINES["split"]))}
    assert "backward" not in {*words(svg(TIMELINES["split"]))}
    assert "backward, chunks 0 to 2" in {*words(svg(TIMELINES["interleaved"]))}


def test_each_kind_and_chunk_has_its_own_color() -> None:
    colors = {(a[1], int(a[0]) // 2): at["fill"] for a, at in bars(svg(TIMELINES["interleaved"]))}
    assert len(colors) == len({*colors.values()}) == 2 * 3


def test_a_bar_too_narrow_for_its_number_has_none() -> None:
    wide, narrow = svg(TIMELINES["gpipe"]), svg(drawn("1f1b", 2, 1, 400))
    assert sum(w.isdigit() for w in words(wide)) == 12
    assert not any(w.isdigit() for w in words(narrow))


STRETCH = re.compile(r"M(\d+) (\d+)|m(\d+) 0|h(\d+)")
AFTER = (("gradients and weights on the network", 2.0), ("optimizer", 1.0))


def stretches(picture: str) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """Return stretches (from, to) in tenths of a pixel, by row and color."""
    found: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for path in ElementTree.fromstring(picture).iterfind(f"{SVG}g/{SVG}path"):
        x = y = 0
        for start, row, skip, length in STRETCH.findall(path.attrib["d"]):
            x, y = (int(start), int(row)) if row else (x + int(skip or 0), y)
            if length:
                found.setdefault((y, path.attrib["stroke"]), []).append((x, x + int(length)))
                x += int(length)
    return found


@pytest.mark.parametrize("scheduler", ["gpipe", "1f1b"])
def test_bars_of_too_many_actions_are_merged_where_they_touch_and_the_picture_says_so(scheduler: str) -> None:
    timeline = drawn(scheduler, 20, 1, 128)
    assert len(timeline.events) > MANY
    picture = svg(timeline)
    scale, runs = 10 * 2400 / timeline.makespan, stretches(picture)
    for rank in range(20):
        rows = [spans for (y, _), spans in runs.items() if y == ROW * rank]
        assert all(b[0] > a[1] for spans in rows for a, b in pairwise(spans))
        drawn_in_all = sum(b - a for spans in rows for a, b in spans)
        assert abs(drawn_in_all - timeline.busy[rank] * scale) <= sum(map(len, rows))
    said = f"a bar merges adjacent actions of one kind ({len(timeline.events)} actions); holds: the most"
    assert any(said in w for w in words(picture))
    assert not bars(picture)
    assert len(picture) < 12 * len(timeline.events)


def test_in_seconds_the_picture_ends_with_the_step() -> None:
    timeline = drawn("gpipe", 2, 1, 3, transfer=0.5)
    picture = svg(timeline, AFTER)
    assert [w for w in words(picture) if not w.isdigit()] == [
        "One step: 2 pipeline ranks, 3 micro batches, bubble 30.8%, 16.0 s (predicted)",
        "6 messages between ranks; a bar shows its micro batch, its messages are below it; holds: the most micro "
        "batches at once",
        "forward", "backward", "idle",
        "gradients and weights on the network 2.0 s", "optimizer 1.0 s", "messages",
        "rank 0", "busy 56%, holds 3", "rank 1", "busy 56%, holds 3", "seconds",
    ]  # fmt: skip

    # the last part reaches the end of the axis and covers both rows
    named = bars(picture)
    assert [name for name, _ in named[:2]] == ["gradients and weights on the network, 2.0 s", "optimizer, 1.0 s"]
    assert [name for name, _ in named[2:4]] == ["0F0, 1.0 s", "0F1, 1.0 s"]
    network, optimizer = (at for _, at in named[:2])
    last = max(float(at["x"]) + float(at["width"]) for _, at in named[2:])
    assert float(network["x"]) == pytest.approx(last + 1, abs=0.02)
    assert float(optimizer["x"]) == pytest.approx(float(network["x"]) + float(network["width"]), abs=0.02)
    assert float(optimizer["x"]) + float(optimizer["width"]) == pytest.approx(136 + 760, abs=0.02)
    assert float(network["height"]) == 2 * ROW - 8


def test_messages_lie_below_the_bars_of_who_sends_them_while_they_are_on_their_way() -> None:
    timeline = drawn("1f1b", 3, 1, 4, transfer=0.25)
    scale = 10 * 760 / (timeline.makespan + 3)
    found = stretches(svg(timeline, AFTER))
    wanted: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for e in timeline.sent:
        color = "#2c6fbb" if e.action.kind == "F" else "#2e8b57"
        wanted.setdefault((ROW * e.rank, color), []).append((round(scale * e.start), round(scale * e.end)))
    assert found == wanted


def test_of_too_many_actions_no_messages_are_drawn() -> None:
    timeline = drawn("1f1b", 20, 1, 128, transfer=0.25)
    picture = svg(timeline, AFTER)
    assert not any("its messages" in w for w in words(picture))
    assert picture.count("<path stroke") == 2
    assert len(picture) < 12 * len(timeline.events)


def test_lanes_lie_below_the_bars_of_their_rank_and_make_rows_higher() -> None:
    timeline = drawn("1f1b", 3, 1, 4, transfer=0.25)
    over_tp, weights = lanes(timeline)
    picture = svg(timeline, AFTER, (over_tp, weights))
    scale, named = 760 / (timeline.makespan + 3), bars(picture)

    def wanted(lane: Lane, below: int) -> list[tuple[float, float, float]]:
        top, row = 96 + 3 * 20, ROW + 2 * 5 + 3
        return [
            (pytest.approx(136 + scale * s.start, abs=0.01), top + row * s.rank + below,
             pytest.approx(scale * s.seconds, abs=0.01))
            for s in lane.stretches
        ]  # fmt: skip

    def at(names: str) -> list[tuple[float, float, float]]:
        found = (at for name, at in named if names in name)
        return [(float(at["x"]), float(at["y"]), float(at["width"])) for at in found]

    assert at(": over tp") == wanted(over_tp, ROW)
    assert at("weights, 2.5 s") == wanted(weights, ROW + 5)
    hover = "weights, 2.5 s; 4 x all_gather, 3.0 GB, 1.5 s; 1 x reduce_scatter, 1.0 MB, 1.0 s"
    assert [name for name, _ in named].count(hover) == 3
    rows = sorted({float(at["y"]) for name, at in named if name[1] in "FB" and ":" not in name})
    assert [b - a for a, b in pairwise(rows)] == [ROW + 13] * 2


def test_the_legend_has_the_lanes_that_are_drawn() -> None:
    timeline = drawn("gpipe", 2, 1, 3)
    over_tp, weights = lanes(timeline)
    note = "collectives are drawn as late as possible: their durations are predicted, their starts are not"
    said = [w for w in words(svg(timeline, AFTER, (weights,))) if not w.isdigit()]
    assert said[2:9] == [
        "forward", "backward", "idle", "gradients and weights on the network 2.0 s", "optimizer 1.0 s",
        weights.label, note,
    ]  # fmt: skip
    assert over_tp.label not in said
    assert over_tp.label in {*words(svg(timeline, AFTER, (over_tp,)))}
    assert note not in {*words(svg(timeline, AFTER))}


def test_lanes_of_too_many_actions_are_merged() -> None:
    timeline = drawn("1f1b", 20, 1, 128)
    over_tp, weights = lanes(timeline)
    picture = svg(timeline, AFTER, (over_tp, weights))
    scale = 10 * 2400 / (timeline.makespan + 3)
    found = [spans for (_, color), spans in stretches(picture).items() if color == "#cf222e"]
    assert sum(map(len, found)) == len(timeline.events)
    assert sum(b - a for spans in found for a, b in spans) == pytest.approx(scale * sum(timeline.busy) / 10, rel=0.05)
    assert len([name for name, _ in bars(picture) if name.startswith("weights")]) == 20
    assert len(picture) < 24 * len(timeline.events)


@every
@pytest.mark.parametrize("drawn_too", [True, False], ids=["lanes", "no lanes"])
def test_nothing_is_drawn_outside_a_picture_in_seconds(timeline: Timeline, drawn_too: bool) -> None:
    root = ElementTree.fromstring(svg(timeline, AFTER, lanes(timeline) if drawn_too else ()))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for at in (e.attrib for e in root.iter() if "x" in e.attrib):
        assert 0 <= float(at["x"]) <= float(at["x"]) + float(at.get("width", 0)) <= width + 0.01
        assert 0 <= float(at["y"]) <= float(at["y"]) + float(at.get("height", 0)) <= height

from __future__ import annotations

from itertools import product

import pytest

from launcher.plan.show.terminal import PageRow, shares, shortened

WIDTH = 40


def rows(*lines: int, stays: tuple[int, ...] = ()) -> list[PageRow]:
    """Return rows with so many lines each: ``0``, ``0 .1``, ``0 .2`` ..."""
    return [
        PageRow(tuple(str(i) if n == 0 else f"  {i} .{n}" for n in range(count)), i in stays)
        for i, count in enumerate(lines)
    ]


@pytest.mark.parametrize(
    ("found", "room", "lines"),
    [
        (rows(1, 2), 3, ["0", "1", "  1 .1"]),
        (rows(1, 2, 2), 4, ["0", "1 ...", "2", "  2 .1"]),
        (rows(1, 1, 1, 1, 1), 4, ["0", "1", "... 2 rows more: show=plan-full", "4"]),
        (rows(1, 1, 1, 1, 1), 3, ["0", "... 3 rows more: show=plan-full", "4"]),
        (rows(1, 1, 1, 1, 1), 2, ["0", "... 4 rows more: show=plan-full"]),
        (rows(1, 1), 1, ["0 ... 1 row more: show=plan-full"]),
        (rows(2), 1, ["0 ..."]),
        (rows(1, 1, 1, 2, 1, stays=(3,)), 4, ["0", "... 3 rows more: show=plan-full", "3", "  3 .1"]),
        (rows(1, 1, 1, 2, 1, stays=(3,)), 1, ["3 ... 4 rows more: show=plan-full"]),
        (rows(3, 3, 3, stays=(1, 2)), 4, ["... 1 row more: show=plan-full", "1 ...", "2", "  2 .1 ..."]),
    ],
    ids=["all", "one is cut", "ends", "two", "first", "one line", "cut", "what stays", "only that", "too much of it"],
)  # fmt: skip
def test_a_section_keeps_its_ends_and_what_stays(found: list[PageRow], room: int, lines: list[str]) -> None:
    assert shortened(found, room, WIDTH) == lines


def test_a_line_that_has_no_room_for_its_ending_loses_words() -> None:
    long = PageRow(("four words, of which some", "  and more"))
    assert shortened([long], 1, 19) == ["four words, of ..."]
    assert shortened([long, long], 1, 43) == ["four words ... 1 row more: show=plan-full"]


@pytest.mark.parametrize("room", range(1, 9))
def test_a_section_never_has_more_lines_than_room(room: int) -> None:
    for lines in product((1, 2, 3), repeat=4):
        for stays in ((), (1,), (0, 3), (0, 1, 2, 3)):
            found = shortened(rows(*lines, stays=stays), room, WIDTH)
            assert len(found) == min(room, sum(lines)) or any("row" in line for line in found)
            assert len(found) <= room
            assert max(map(len, found)) <= WIDTH


def test_remaining_lines_are_shared_in_turns_between_sections() -> None:
    least = {"a": 1, "b": 2, "c": 1}
    assert shares({"a": 9, "b": 9, "c": 9}, least, 6) == {"a": 2, "b": 3, "c": 1}
    assert shares({"a": 2, "c": 9}, least, 6) == {"a": 2, "c": 4}
    assert shares({"a": 2, "b": 1}, least, 60) == {"a": 2, "b": 1}

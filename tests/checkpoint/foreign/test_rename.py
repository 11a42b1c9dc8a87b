from __future__ import annotations

import pytest

from launcher.checkpoint.foreign.names import Renamed, Table, renamed
from tests.checkpoint.refusal import refusal


@pytest.mark.parametrize(
    ("table", "name", "new"),
    [
        (None, "a.b", "a.b"),
        ({"": "model"}, "a.b", "model.a.b"),
        ({"a": "x.y"}, "a.b", "x.y.b"),
        ({"a": ""}, "a.b", "b"),
        ({"a": "x"}, "a", "x"),
        ({"a": "x", "": ""}, "ab.c", "ab.c"),
        ({"a": "x", "a.b": "y"}, "a.b", "x.b"),
        ({r"^h\.(\d+)\.(w|b)": r"layers.\1.\2"}, "h.12.w", "layers.12.w"),
        ({r"^h.*": "x", "hh": "y"}, "hh", "x"),
    ],
)
def test_the_first_row_that_matches_decides(table: Table | None, name: str, new: str) -> None:
    assert renamed([name], table) == Renamed({name: new})


@pytest.mark.parametrize(
    ("table", "names", "text"),
    [
        (
            {"a": "b"},
            ["x.w", "a.w", "y"],
            "names: no row of the table matches x.w, y; add rows, with null to leave a tensor out, or strict: false",
        ),
        ({"a": "c", "b": "c"}, ["a.w", "b.w"], "names: a.w and b.w would both become c.w"),
        ({"a": ""}, ["a"], "names: a: it gives a an empty name"),
        ({"^(": "x"}, ["a"], "names: ^( is not a regular expression: missing ), unterminated subpattern at position 1"),
        ({"^a": r"\1"}, ["a"], r"names: ^a: \1 does not fit this expression: invalid group reference 1 at position 1"),
    ],
    ids=["unmatched", "two become one", "nothing left", "no expression", "no group"],
)
def test_a_table_that_does_not_work_is_refused(table: Table, names: list[str], text: str) -> None:
    assert refusal(lambda: renamed(names, table)) == text


def test_left_out_and_unmatched_names_are_reported() -> None:
    found = renamed(["a.w", "rot.f", "x"], {"rot": None, "a": "a"}, strict=False)
    assert found == Renamed({"a.w": "a.w"}, ("rot.f",), ("x",))

"""The compatibility matrix: no cell may be wrong, and each is as ``golden/compatibility.json`` says."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

from launcher.plan.partition.sizes import sizes
from launcher.plan.settings.legal import illegal
from tests.compatibility import LAYOUTS, SCHEDULES, TIES, asked, once

GOLDEN = Path(__file__).parent / "golden/compatibility.json"
AGAIN = "the matrix changed: if that is meant, run: python -m tests.test_compatibility"


def test_no_combination_is_wrong() -> None:
    cells = [(s, lay, t, once()[s][lay][t]) for s in SCHEDULES for lay in LAYOUTS for t in TIES]
    assert [c for c in cells if not c[3].startswith(("exact to 1e-12", "refused: parallel."))] == []


def test_every_combination_is_as_written_down() -> None:
    assert text() == GOLDEN.read_text(), AGAIN


def test_what_is_refused_is_refused_by_the_planners_one_table() -> None:
    for cell in product(SCHEDULES, LAYOUTS, TIES):
        found = [f"{p.key}: {p.text}" for p in illegal(asked(cell), sizes(asked(cell))[0])]
        said = once()[cell[0]][cell[1]][cell[2]]
        assert said == (f"refused: {'; '.join(found)}" if found else "exact to 1e-12")


def text() -> str:
    return json.dumps(once(), indent=1) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(text())

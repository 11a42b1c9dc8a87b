"""The compatibility matrix: no cell may be wrong, and each is as in ``golden/compatibility.json``."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

from launcher.plan.resolve import device_matrix, pipeline
from launcher.plan.resolve.device_matrix import choose_engine
from launcher.plan.resolve.grid import sizes
from tests.compatibility import LAYOUTS, SCHEDULES, TIES, TRIED, Cell, job_of_cell, once

GOLDEN = Path(__file__).parent / "golden/compatibility.json"
AGAIN = "the matrix changed: if that is meant, run: TESTS=all python -m tests.test_compatibility"


def golden() -> dict[Cell, str]:
    rows = json.loads(GOLDEN.read_text())
    return {
        (s, lay, t): said for s, layouts in rows.items() for lay, ties in layouts.items() for t, said in ties.items()
    }


def test_no_combination_is_wrong() -> None:
    assert {c: s for c, s in once().items() if not s.startswith(("exact to 1e-12", "refused: parallel."))} == {}


def test_every_combination_is_as_written_down() -> None:
    assert list(golden()) == list(product(SCHEDULES, LAYOUTS, TIES)), AGAIN
    assert once() == {cell: golden()[cell] for cell in TRIED}, AGAIN


def test_every_refusal_of_the_matrix_comes_from_the_settings_of_the_plan() -> None:
    for cell, said in golden().items():
        job = job_of_cell(cell)
        problems = [*device_matrix.problems(job, 4)] if choose_engine(job).over_matrices else []
        found = [f"{p.key}: {p.text}" for p in [*problems, *pipeline.problems(job, sizes(job)[0])]]
        assert said == (f"refused: {'; '.join(found)}" if found else "exact to 1e-12")


def text() -> str:
    found = once()
    rows = {s: {lay: {t: found[s, lay, t] for t in TIES} for lay in LAYOUTS} for s in SCHEDULES}
    return json.dumps(rows, indent=1) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(text())

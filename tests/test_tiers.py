"""What ``make test`` leaves to ``make test-long`` is there."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.long import CASES, FILE, slow

ROOT = Path(__file__).parents[1]


def test_every_long_test_is_there() -> None:
    names = [line.removesuffix(CASES) for line in FILE.read_text().split()]
    assert names == sorted(set(names))
    there: dict[str, set[str]] = {}
    for path, _, _ in (name.partition("::") for name in names):
        if path not in there:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            there[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    gone = [name for name in names if name.partition("::")[2] not in there[name.partition("::")[0]]]
    assert not gone, f"renamed or gone, so that make test tries all of it: {gone}"


def test_a_case_stays_where_one_is_quick() -> None:
    log = [
        "9.00s call     tests/a.py::test_alone",
        "4.00s call     tests/a.py::test_short",
        "30.00s setup    tests/a.py::test_of_something",
        "1.20s call     tests/b.py::test_cases[one]",
        "1.00s call     tests/b.py::test_cases[two - it has :: and [brackets]]",
        "6.00s setup    tests/b.py::test_made_together[1]",
        "5.00s call     tests/b.py::test_made_together[1]",
        "0.10s call     tests/b.py::test_made_together[2]",
        "90.00s call     launcher/a.py::launcher.a.f",
    ]
    assert list(slow(log)) == [
        "tests/a.py::test_alone", "tests/a.py::test_of_something", "tests/b.py::test_cases[...]",
        "tests/b.py::test_made_together",
    ]  # fmt: skip

"""Finds the tests that take long, from a timed run, for ``tests/long.txt``.

    TESTS=all python -m pytest -n 2 --dist loadfile --durations=0 --durations-min=0 > LOG
    python -m tests.long < LOG > tests/long.txt

A test is named with ``[...]`` if each of its cases is quick enough for ``make test``, which tries the first.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

ALONE_S, TOGETHER_S, CASE_S = 3.0, 2.0, 2.5
"""Seconds in ``make test``: of a test with one case, of all cases of another test, and of the one case that is tried.

They were measured on two busy cores, where everything is about a third slower.
"""
KEPT = (
    "tests/parallel/fsdp/test_gather_order.py", "tests/parallel/test_recompute.py::test_gathers_",
    "tests/parallel/test_unusual.py::test_unusual_state_that_no", "tests/run/test_killed.py",
    "tests/run/test_resume.py::test_a_stopped_run", "tests/run/test_same_again.py::test_the_same_command_gives",
    "tests/steps/test_certify_new_faults.py::test_a_new_fault", "tests/steps/test_going_on.py::test_weights",
    "tests/test_docs.py", "tests/test_imports.py", "tests/test_parity.py", "tests/test_readme.py",
)  # fmt: skip
"""What ``make test`` always tries, however long it takes: one proof of each law. These are beginnings of names."""
FILE = Path(__file__).with_name("long.txt")
TOOK = re.compile(r"\s*([\d.]+)s (?:call|setup) +(tests/\S+?::\S+?)(\[.*)?$")
CASES = "[...]"


def slow(log: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the file.

    Work that cases share counts for one of them, but any case that is tried alone needs it.
    """
    took: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for found in filter(None, map(TOOK.match, log)):
        took[found[2]][found[3] or ""] += float(found[1])
    for name, cases in sorted(took.items()):
        several, kept = len(cases) > 1, name.startswith(KEPT)
        if sum(cases.values()) >= (TOGETHER_S if several else ALONE_S) and (several or not kept):
            yield name + CASES * (several and (kept or max(cases.values()) < CASE_S))


def left_to_ci(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return those of ``items`` that ``make test`` leaves to ``make test-long``."""
    named = frozenset(FILE.read_text().split())
    tried: set[str] = set()
    return {item for item in items if _left(item, named, tried)}


def _left(item: pytest.Item, named: Collection[str], tried: set[str]) -> bool:
    name = item.nodeid.partition("[")[0]
    if name + CASES not in named:
        return name in named
    first = name not in tried
    tried.add(name)
    return not first


if __name__ == "__main__":
    print(*slow(sys.stdin), sep="\n")

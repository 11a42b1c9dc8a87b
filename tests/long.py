"""What takes long: ``tests/long.txt``, from a run that was timed.

    TESTS=all python -m pytest -n 2 --dist loadfile --durations=0 --durations-min=0 > LOG
    python -m tests.long < LOG > tests/long.txt

A test is named with ``[...]`` where one of its cases is quick enough for ``make test``, which tries the first.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

ALONE_S, TOGETHER_S, CASE_S = 5.0, 2.0, 6.0
"""What a test of one case may take in ``make test``, what all cases of another may, and what the one may that stays.

Measured on two cores that were busy with other things too, where all is about a third slower.
"""
FILE = Path(__file__).with_name("long.txt")
TOOK = re.compile(r"\s*([\d.]+)s (?:call|setup) +(tests/\S+?::\S+?)(\[.*)?$")
CASES = "[...]"


def slow(log: Iterable[str]) -> Iterator[str]:
    """The lines of the file. What cases make together is measured with one of them, and with any one that stays."""
    took: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for found in filter(None, map(TOOK.match, log)):
        took[found[2]][found[3] or ""] += float(found[1])
    for name, cases in sorted(took.items()):
        several = len(cases) > 1
        if sum(cases.values()) >= (TOGETHER_S if several else ALONE_S):
            yield name + CASES * (several and max(cases.values()) < CASE_S)


def left_to_ci(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Those of ``items`` that ``make test`` leaves to ``make test-long``."""
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

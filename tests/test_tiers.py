"""The tests that ``make test`` leaves to ``make test-long`` exist, and CI tries all of them in four turns."""

from __future__ import annotations

import ast
import zlib
from pathlib import Path

import pytest

from tests import turns
from tests.changed import ALWAYS, paths_of
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
        "2.90s call     tests/a.py::test_short",
        "30.00s setup    tests/a.py::test_of_something",
        "1.20s call     tests/b.py::test_cases[one]",
        "1.00s call     tests/b.py::test_cases[two - it has :: and [brackets]]",
        "6.00s setup    tests/b.py::test_made_together[1]",
        "5.00s call     tests/b.py::test_made_together[1]",
        "0.10s call     tests/b.py::test_made_together[2]",
        "9.00s call     tests/test_parity.py::test_always[1]",
        "9.00s call     tests/test_parity.py::test_always[2]",
        "90.00s call     launcher/a.py::launcher.a.f",
    ]
    assert list(slow(log)) == [
        "tests/a.py::test_alone", "tests/a.py::test_of_something", "tests/b.py::test_cases[...]",
        "tests/b.py::test_made_together", "tests/test_parity.py::test_always[...]",
    ]  # fmt: skip


PATHS = sorted({line.partition("::")[0] for line in FILE.read_text().split()})


def test_four_turns_try_every_long_test() -> None:
    tried = [{p for p in PATHS if not turns.waits(p, quarter, ())} for quarter in range(turns.QUARTERS)]
    assert set().union(*tried) == set(PATHS)
    assert all(set(PATHS) > part for part in tried)


def test_forty_turns_try_every_odd_model(monkeypatch: pytest.MonkeyPatch) -> None:
    models, tried = range(300), []
    for landing in range(1500, 1540):
        monkeypatch.setenv("TURN", str(landing))
        tried += turns.due(models)
    assert sorted(tried) == [*models]


def test_every_long_test_is_of_a_part() -> None:
    assert [p for p in PATHS if not any(p.startswith(part.tests) for part in turns.PARTS.values())] == []


def test_a_long_test_of_no_part_is_tried_in_every_turn() -> None:
    assert not any(turns.waits("tests/new/test_thing.py", quarter, ()) for quarter in range(turns.QUARTERS))


@pytest.mark.parametrize("part", turns.PARTS)
def test_a_part_that_has_changed_is_tried_whole(part: str) -> None:
    of = turns.PARTS[part]
    mine = [path for path in PATHS if path.startswith(of.tests)]
    for changed in of.tests:
        whole = turns.whole(frozenset({changed}))
        assert part in whole
        assert [p for p in mine if any(turns.waits(p, q, whole) for q in range(4))] == []


def test_each_source_makes_its_part_whole_unless_a_third_of_the_parts_contain_it() -> None:
    for name, part in turns.PARTS.items():
        for changed in part.sources:
            assert name in turns.whole(frozenset({changed}))


ALL_OVER = frozenset(path for part in turns.PARTS.values() for path in part.tests)


@pytest.mark.parametrize("files", [None, ALL_OVER])
def test_a_landing_all_over_the_house_gets_its_quarter_alone(files: frozenset[str] | None) -> None:
    assert turns.whole(files) == []


def test_without_a_history_of_git_the_quarter_depends_on_the_changelog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURN", raising=False)
    monkeypatch.setattr(turns, "_git", lambda *words: None)
    assert turns.landed_files() is None
    text = (ROOT / "CHANGELOG.md").read_bytes()
    assert turns.quarter() == zlib.crc32(text) % turns.QUARTERS


@pytest.mark.parametrize("part", turns.PARTS)
def test_the_paths_of_a_part_exist(part: str) -> None:
    of = turns.PARTS[part]
    gone = [p for p in (*of.tests, *of.sources) if not [*ROOT.glob(f"{p}*")]]
    assert gone == []


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("launcher/plan/schedule/simulate.py", "tests/plan/schedule/test_simulate.py"),
        ("launcher/extras/mindspore/gone.py", "tests/extras/mindspore"),
        ("tests/checkpoint/test_store.py", "tests/checkpoint/test_store.py"),
        ("recipes/lm_single.yaml", "tests/test_golden_plans.py"),
        ("docs/runs.md", "tests/test_readme.py"),
    ],
)
def test_a_file_that_has_changed_has_its_tests_tried(path: str, wanted: str) -> None:
    assert wanted in paths_of([path])


def test_a_helper_of_tests_asks_for_no_more_than_what_reads_all_sources() -> None:
    assert paths_of(["tests/ranks.py"]) == sorted(ALWAYS)

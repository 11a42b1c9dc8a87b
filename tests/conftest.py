"""The setup that every test needs before torch is imported."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import settings

from tests import turns
from tests.long import left_to_ci
from tests.tiers import ALL, LONG, QUICK, TURN, exhaustive

# Laws try the same cases on every machine, however slow. ``--hypothesis-profile=search`` tries others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile("same")

# Forked ranks share the cores of one machine; torch reads this variable once, when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Runs in a test are forked from its process, because tests patch imported code.
importlib.import_module("launcher.runtime.processes.fork_server").fork_from_here()

# Output is compared as text, also if a CI service asks for colors.
os.environ.pop("FORCE_COLOR", None)

# A background job ignores Ctrl-C, and one under nohup ignores hangups; launchers that tests signal must not.
for signum, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, handler)

# The tests sync thousands of files, which takes milliseconds each on a disk and no time in memory.
SHM, ROOM = Path("/dev/shm"), 8 << 30
if SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free > ROOM:
    os.environ.setdefault("TMPDIR", str(SHM))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore doctests in helpers: doctests are for the package, and some helpers are scripts."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


# These files take longest, so they begin first. Two workers, each with a file at a time, then end together.
FIRST = (
    "test_readme", "test_compatibility", "test_parity", "test_resume", "test_killed", "test_outer_ranks",
    "test_traffic", "test_ignored_targets", "test_parity_tp", "test_gather_order", "test_theirs", "test_zoo",
    "test_split", "test_recipes", "test_split_backward", "test_memory_meter", "test_certify", "test_precision",
    "test_fill", "test_tie", "test_certify_says_no", "test_preempted", "test_absent", "test_short", "test_run_sweep",
    "test_real_sweep", "test_golden_plans", "test_mistakes", "test_disk_full",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Give files to workers in the order below, and not those with the most tests first."""
    config.option.loadscopereorder = False


def pytest_report_header() -> str | None:
    return turns.header() if TURN else None


def _later(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return those of ``items`` that a later run tries."""
    quarter, whole = turns.quarter(), turns.whole(turns.landed_files())
    root = Path(__file__).parents[1]
    return {i for i in items if turns.waits(i.path.relative_to(root).as_posix(), quarter, whole)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set() if ALL else {item for item in items if item.get_closest_marker(exhaustive.name)}
    long = left_to_ci(item for item in items if item not in left_out)
    left_out |= long if QUICK else {*items} - long if LONG or TURN else set()
    left_out |= _later(long) if TURN else set()
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    place = {name: n for n, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))

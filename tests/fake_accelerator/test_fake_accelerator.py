"""Tests for accelerators on every machine that has a C++ compiler: ``tests/fake_accelerator/on_devices``.

Each file of that folder runs in its own pytest, in which torch has four fake devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fake_accelerator import build
from tests.pages import ROOT

FILES = sorted(Path(__file__).with_name("on_devices").glob("test_*.py"), key=lambda f: (f.stem != "test_device", f))
"""The fastest file comes first: ``make test`` tries only one."""
NEEDED = {"test_hugging_face": "transformers"}
"""The extra that a file needs besides the dev extra."""
MISSING = build.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def environment(devices: int) -> dict[str, str]:
    """The environment of a process with ``devices`` devices, in which pytest runs all tests of ``make test``."""
    tier = os.environ.get("TESTS", "quick")
    inner = {"TESTS": "quick" if tier in ("long", "turn") else tier}
    return os.environ | inner | {"PYTHONPATH": str(build.site()), "FAKE_DEVICES": str(devices)}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem.removeprefix("test_"))
def test_on_four_devices(file: Path) -> None:
    needed = NEEDED.get(file.stem)
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"not installed: {needed}; make test-real installs it")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", str(file)]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(4), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout


def test_two_builders_at_once_make_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second builder waits for the first and uses what it has built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built: list[Path] = []

    def slowly(folder: Path) -> None:
        built.append(folder)
        (folder / build.MODULE).write_text("")

    monkeypatch.setattr(build, "_build", slowly)
    with ThreadPoolExecutor(4) as pool:
        found = {*pool.map(lambda _: build.site(), range(4))}
    assert len(found) == len(built) == 1
    assert [p.name for p in found.pop().iterdir()] == [build.MODULE]
    assert sorted(p.suffix for p in (tmp_path / "launcher-tests").iterdir() if p.suffix == ".lock") == [".lock"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "SOURCES", ("nowhere.cpp",))
    monkeypatch.setattr(build, "HERE", tmp_path)
    for name in (build.HEADER, build.MODULE, "build.py", "nowhere.cpp"):
        (tmp_path / name).write_text("#error it cannot be")
    with pytest.raises(RuntimeError, match="it cannot be"):
        build.site()
    assert [p.suffix for p in (tmp_path / "launcher-tests").iterdir()] == [".lock"]


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert (
        build.missing()
        == "the fake accelerator is built with a C++ compiler, and this machine has none (CXX, g++, c++)"
    )

"""A Python that lacks a package, or that may not load it: one line with the cure, no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from launcher import requirements

ROOT = Path(__file__).parents[1]
BLOCKED = """
import os, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["BLOCKED"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def command(tmp_path: Path, blocked: str, *words: str, limit: str = "") -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "BLOCKED": blocked}
    line = ["bash", "-c", f'{limit} exec "$@"', "bash", sys.executable, "-m", "launcher", *words]
    return subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)


def test_the_packages_are_those_of_the_project():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(requirements.PACKAGES.values()) == sorted(re.match(r"[\w-]+", one)[0] for one in listed)
    assert requirements.missing() == ""


@pytest.mark.parametrize("name", requirements.PACKAGES)
def test_a_package_that_is_missing_is_named_before_anything_starts(tmp_path, name):
    done = command(tmp_path, name, "recipe=lm_single", "train.steps=1")
    install = f"activate the launcher's environment, or create it: make -C {ROOT} .venv/installed"
    text = f"error: {sys.executable} has no {requirements.PACKAGES[name]}; {install}; nothing was started\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", text)
    assert not (tmp_path / "runs").exists()


def test_version_needs_no_package_and_a_plan_names_the_missing_one(tmp_path):
    done = command(tmp_path, " ".join(requirements.PACKAGES), "--version")
    assert done.returncode == 0
    done = command(tmp_path, "antlr4", "recipe=lm_single", "show=plan")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"error: {sys.executable} has no antlr4; activate")


def test_a_limit_of_memory_that_torch_does_not_fit_into_is_named(tmp_path):
    done = command(tmp_path, "", "recipe=lm_single", "show=plan", limit="ulimit -v 400000;")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .*; this process may use 390 MB of memory \(ulimit -v\), .* needs more\n", done.stderr)


def test_too_few_open_files_are_refused(tmp_path):
    done = command(tmp_path, "", "recipe=tied_pp2_to_single", "train.steps=1", limit="ulimit -n 20;")
    text = "this process may open 20 files, and a run of 2 ranks needs 44: ulimit -n 1024 allows more"
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_error_of_our_own_keeps_its_traceback():
    assert requirements.unloadable(ImportError("cannot import name", name="launcher.plan")) == ""
    assert requirements.unloadable(OSError(2, "No such file")) == ""

"""The shipped files are found in a checkout and in an installed package, from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.job.config_folders import CONF, short

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("layout", ["checkout", "wheel"])
def test_the_shipped_files_are_found_from_any_folder(layout, tmp_path):
    if layout == "checkout":
        site = ROOT
    else:
        site = tmp_path / "site"
        shutil.copytree(ROOT / "launcher", site / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("conf", "recipes"):
            shutil.copytree(ROOT / name, site / "launcher" / name)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "recipe=lm_single", "model.dmi=64"],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(
        "  model.dmi: unknown key, did you mean 'model.dim'?\n"
        "    set by: model.dmi=64 (command line)\n"
        "    try:    model.dim=64\n"
    )
    assert list(elsewhere.iterdir()) == []


def test_a_path_is_shown_as_a_person_would_write_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short(tmp_path / "a/b.yaml") == "a/b.yaml"
    assert short(CONF / "model/lm.yaml") == "conf/model/lm.yaml"
    assert short(Path("/etc/x.yaml")) == "/etc/x.yaml"

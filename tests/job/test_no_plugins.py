"""Nothing that Hydra would find in the current folder is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_plugins_of_the_current_folder_are_not_imported(tmp_path):
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins/evil.py").write_text("open('ran', 'w')\n")
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "show=config"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "ran").exists()

"""A device that has no memory left, and one that is profiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.fake_accelerator.on_devices.processes import launched
from tests.pages import ROOT
from tests.run.launching import TINY, events, shape

SIZE = r"[0-9.]+ [KMG]?B"
LM = (
    "recipe=lm_single", "data=random_tokens", "steps=[train]", "train.steps=2", "launch.device=fake", "launch.nproc=2",
)  # fmt: skip


def fresh(*words: str, folder: Path) -> tuple[int, list[str]]:
    """A command in a process that reads the size of its devices anew: its exit code, and what it says at the end."""
    command = [sys.executable, "-m", "launcher", *words, f"run_dir={folder}"]
    env = os.environ | {"FAKE_MEMORY_MB": "60"}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
    return done.returncode, [line for line in done.stderr.splitlines() if "schedules.py" not in line]


def test_what_is_proposed_when_memory_is_out_passes_when_pasted(tmp_path: Path) -> None:
    code, told = fresh(*LM, "launch.check_memory=false", folder=tmp_path / "run")
    assert code == 1
    at = next(n for n, line in enumerate(told) if line.startswith("error: "))
    assert "out of memory" in told[at], "\n".join(told)
    assert re.fullmatch(
        rf"error: rank ([01]): out of memory on fake:\1, {SIZE} more were asked for: "
        rf"of 60\.0 MB its tensors held {SIZE}, its allocator kept {SIZE}, others held {SIZE}; {SIZE} were free",
        told[at],
    )
    assert re.fullmatch(rf"  planned: {SIZE} \(activations {SIZE}, optimizer {SIZE}, params {SIZE}\)", told[at + 1])
    cure = re.fullmatch(rf"  try: (.*) \(planned: {SIZE}\)", told[at + 2])
    assert cure is not None

    # pasted, it is let through
    assert fresh(*LM, *cure[1].split(" "), "show=plan", folder=tmp_path / "again")[0] == 0


def test_a_window_is_profiled_on_a_device_that_the_profiler_does_not_see(tmp_path: Path) -> None:
    words = (*TINY, *shape(), "launch.device=fake", "steps=[train]", "train.steps=3")
    done = launched(*words, "debug.profiler={steps: [2, 2], memory: true}", folder=tmp_path / "run")
    assert "debug.profiler.memory: torch takes no snapshot of the memory of fake\n" in done.out
    assert any(e.get("name") == "aten::mm" for e in events(done.folder, 0))
    assert (done.folder / "profile" / "rank0.txt").read_text().splitlines()[1].split()[-1] == "operator"

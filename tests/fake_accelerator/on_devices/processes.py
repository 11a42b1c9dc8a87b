"""Processes for tests on fake devices. All are forked from pytest's own, which therefore never uses a device itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from launcher.runtime.cluster.world import World
from tests.forked import python
from tests.pages import ROOT
from tests.ranks import here

T = TypeVar("T")
KIND = "fake"


def apart(work: Callable[..., T], *args: Any) -> T:
    """``work(*args)`` in a child, which may use devices and run a backward."""
    return here(lambda _: work(*args), 1, alone=True)[0]


def on_devices(size: int, work: Callable[..., T], *args: Any, kind: str = KIND) -> list[T]:
    """Run ``work(world, *args)`` on ``size`` ranks, each with a device; returns the results in rank order."""

    def call(world: World) -> T:
        return work(world, *args)

    return here(call, size, device=kind, timeout_s=120)


@dataclass(frozen=True)
class Done:
    """What a command printed, and the folder of its run."""

    out: str
    err: str
    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Its steps, from ``metrics.jsonl``."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "loss" in row]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def figures(self) -> Mapping[str, Any]:
        figures: Mapping[str, Any] = json.loads((self.folder / "status.json").read_text())["metrics"]
        return figures


def launched(*words: str, folder: Path, code: int = 0) -> Done:
    """Run ``python -m launcher WORDS`` in ``folder``, and assert that it ends with ``code``."""
    where = () if any(word.startswith("runs=") for word in words) else (f"run_dir={folder}",)
    process = python("launcher", *words, *where, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert process.returncode == code, f"{' '.join(words)}\n{out}\n{err}"
    assert not torch.get_device_module(KIND).is_initialized()
    return Done(out, err, folder)


def fresh(*words: str, folder: Path, memory_mb: int) -> tuple[int, list[str]]:
    """Run a command whose devices have ``memory_mb`` of memory: its exit code, and its lines of stderr.

    The process is not forked, because the size of a device is read once.
    """
    command = [sys.executable, "-m", "launcher", *words, f"run_dir={folder}"]
    env = os.environ | {"FAKE_MEMORY_MB": str(memory_mb)}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
    return done.returncode, [line for line in done.stderr.splitlines() if "schedules.py" not in line]

"""Runs one cell of a sweep in a process group of its own, and says what came of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import REFUSED
from launcher.job.overrides.grammar import quoted
from launcher.job.sweep_grid import Cell
from launcher.runtime.faults import Interrupted, signal_name
from launcher.runtime.folder import status_of
from launcher.runtime.lock import at_work
from launcher.runtime.preemption import StopFlag
from launcher.sweep.folder import without_run_dir

LOOK_S = 0.1
SAVE_S = 30.0  # for the cell of a sweep that was killed, which saves and stops
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class CellResult:
    """What came of ``cell``: ``status`` is done, failed, refused or interrupted."""

    cell: Cell
    status: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def run(folder: Path, cell: Cell, command: Sequence[str], told: StopFlag) -> CellResult:
    """One cell, by ``command``. It is told to stop when this process is, or dies."""
    if busy := at_work(folder / cell.name, SAVE_S):  # of a sweep that was killed
        return CellResult(cell, "failed", seconds=SAVE_S, error=busy)
    (folder / cell.name / "status.json").unlink(missing_ok=True)

    # its words go to its own log
    path = folder / f"{cell.name}.log"
    run_dir = f"run_dir={quoted(str(folder / cell.name))}"
    began = time.monotonic()
    with path.open("w", encoding="utf-8") as log:
        child = subprocess.Popen(
            [*command, *cell.overrides, run_dir],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(_dies_with, os.getpid()),
        )
        code = _wait(child, told)
    seconds = time.monotonic() - began

    # what it says of itself counts, unless it died of something else
    if told.signum:
        stopped = f"stopped by {signal_name(told.signum)}"
        return CellResult(cell, "interrupted", seconds=seconds, error=stopped)
    own = known_result(folder, cell)
    if own is not None and (own.status == "done") == (code == 0):
        return own
    return CellResult(cell, "failed", seconds=seconds, error=_why(code, path))


def _dies_with(parent: int) -> None:
    """In the child: when this process dies, however that comes, the cell is told to save and stop."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _wait(child: subprocess.Popen[bytes], told: StopFlag) -> int:
    """The exit code. The first signal that asks to stop is sent on, a second one ends the cell at once."""
    sent = False
    try:
        while (code := _polled(child)) is None:
            if told.signum and not sent:
                child.terminate()
                sent = True
        return code
    except Interrupted:
        os.killpg(child.pid, signal.SIGKILL)
        return child.wait()


def _polled(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return None


def _why(code: int, log: Path) -> str:
    """Of a request that is refused the first problem, else the last line."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    heads = [i for i, line in enumerate(lines) if line.startswith("error: ") and "in this request" in line]
    if code == REFUSED and heads and heads[0] + 1 < len(lines):
        return lines[heads[0] + 1]
    return f"exit code {code}: {lines[-1][:200] if lines else 'no output'}"


def known_result(folder: Path, cell: Cell) -> CellResult | None:
    """What the cell's own ``status.json`` says; ``None`` when it says nothing about these overrides."""
    try:
        status = status_of(folder / cell.name / "status.json")
    except (OSError, ValueError):
        return None
    if status.get("status") not in ("done", "failed"):
        return None
    if without_run_dir(status.get("overrides", ())) != without_run_dir(cell.overrides):
        return None

    return CellResult(
        cell,
        status["status"],
        metrics=dict(_scalars(status.get("metrics") or {})),
        seconds=status.get("seconds") or 0.0,
        error=str(status.get("error") or ""),
    )


def _scalars(metrics: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """What fits a column of the table; nested figures by dotted name."""
    for name, value in metrics.items():
        key = f"{above}.{name}" if above else name
        if isinstance(value, dict):
            yield from _scalars(value, key)
        elif isinstance(value, int | float | str):
            yield key, value

"""Runs one cell of a sweep in its own process group, and reads its result."""

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

from launcher.errors import REFUSED, RequestError
from launcher.extras.sweep.folder import identity, without_run_dir
from launcher.job.overrides import quoted
from launcher.job.sweep_grid import Cell
from launcher.run import frozen_request
from launcher.runtime.run_folder import running_launcher, status_of
from launcher.untrusted.files import LINK, RefusedFile, open_below

SAVE_S = 30.0  # seconds to wait for a cell of a killed sweep, which saves and stops
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class CellResult:
    """The result of ``cell``: ``status`` is done, failed, refused, pruned or interrupted.

    ``same_as``: the name of an identical cell that ran in its place.
    """

    cell: Cell
    status: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    same_as: str = ""


class CellProcess:
    """A process that runs ``command`` for ``cell`` and writes its output to a log.

    The cell receives SIGTERM when this process dies. Raises ``RefusedFile`` if the log, or the folder of the
    cell, is a link.
    """

    def __init__(
        self, folder: Path, cell: Cell, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self.cell, self._folder = cell, folder
        self._log = f"{cell.name}.log"
        self._reported = False
        self._began = time.monotonic()
        if (folder / cell.name).is_symlink():
            raise RefusedFile(folder / cell.name, LINK)
        (folder / cell.name / "status.json").unlink(missing_ok=True)
        run_dir = f"run_dir={quoted(str(folder / cell.name))}"
        with open(open_below(folder, self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as log:
            self._child = subprocess.Popen(
                [*command, *cell.overrides, run_dir],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(env or {})},
                preexec_fn=partial(_dies_with, os.getpid()),
            )

    def result(self, ended: str = "", why: str = "") -> CellResult | None:
        """Returns the result; ``None`` while it runs.

        ``ended``, ``why``: status and reason of a stopped cell.
        """
        code = self._child.poll()
        if code is None:
            return None
        seconds = time.monotonic() - self._began

        # the cell's own status counts, unless its exit code contradicts it
        own = known_result(self._folder, self.cell)
        if own is not None and (own.status == "done") == (code == 0) and not (ended and own.status != "done"):
            return own
        if ended:
            return CellResult(self.cell, ended, seconds=seconds, error=why)
        return CellResult(self.cell, "failed", seconds=seconds, error=_why(code, self._output()))

    def _output(self) -> str:
        try:
            with open(open_below(self._folder, self._log, os.O_RDONLY), "rb") as log:
                return log.read().decode(errors="replace")
        except RefusedFile as error:
            return str(error)

    def stop(self) -> None:
        """Tells the cell to save and stop; further calls do nothing."""
        if not self._reported:
            self._child.terminate()
            self._reported = True

    def end(self) -> None:
        """Kills the cell with all its ranks at once."""
        os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


def still_running(folder: Path, cell: Cell) -> CellResult | None:
    """Waits until a process of a killed sweep has saved; returns a failed result if it does not end."""
    try:
        busy = running_launcher(folder / cell.name, SAVE_S)
    except RequestError as error:  # its lock is a link
        return CellResult(cell, "failed", error=error.problems[0].text)
    return CellResult(cell, "failed", seconds=SAVE_S, error=busy) if busy else None


def _dies_with(parent: int) -> None:
    """Runs in the child, which receives SIGTERM from then on when the process ``parent`` dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _why(code: int, output: str) -> str:
    """Returns the first problem of a refused request, otherwise the exit code and the last line of output."""
    lines = [stripped for line in output.splitlines() if (stripped := line.strip())]
    heads = [i for i, line in enumerate(lines) if line.startswith("error: ") and "in this request" in line]
    if code == REFUSED and heads and heads[0] + 1 < len(lines):
        return lines[heads[0] + 1]
    return f"exit code {code}: {lines[-1][:200] if lines else 'no output'}"


def known_result(folder: Path, cell: Cell) -> CellResult | None:
    """Returns the result in the cell's ``status.json``; ``None`` if there is none for the cell's overrides.

    A ``status.json`` that is a link is not read: the cell has failed.
    """
    try:
        status = status_of(folder / cell.name)
    except RefusedFile as error:
        return CellResult(cell, "failed", error=str(error))
    except (OSError, ValueError):
        return None
    if status.get("status") not in ("done", "failed"):
        return None
    overrides = without_run_dir(status.get("overrides", ()))
    frozen, _ = frozen_request.words((folder / cell.name).absolute())
    if overrides not in (identity(cell.overrides), (frozen,)):
        return None

    return CellResult(
        cell,
        status["status"],
        metrics=dict(_scalars(status.get("metrics") or {})),
        seconds=status.get("seconds") or 0.0,
        error=str(status.get("error") or ""),
    )


def _scalars(metrics: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values that fit a column of a table; nested ones have dotted names."""
    for name, value in metrics.items():
        key = f"{above}.{name}" if above else name
        if isinstance(value, dict):
            yield from _scalars(value, key)
        elif isinstance(value, int | float | str):
            yield key, value

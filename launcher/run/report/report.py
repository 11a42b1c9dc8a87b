"""Writes ``report.html`` in a run folder, and updates it while the run is running."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.errors import said
from launcher.run.report.curve import Curve, sparkline
from launcher.run.report.page import Told, page
from launcher.runtime.folder import identity

_log = logging.getLogger(__name__)

NAME = "report.html"
EVERY_S = 10.0
SHARE = 50
"""The least time between two updates, as a multiple of the time to write one."""
PICTURES = {"One step, as planned": "timeline.svg", "Memory over a step, as planned": "memory.svg"}
LINKS = (
    "command.txt", "config.yaml", "plan.txt", "plan.json", "metrics.jsonl", "metrics.csv", "status.json",
    "certificate.json", "timeline.svg", "memory.svg", "checkpoints", "exports", "graphs", "logs", "profile",
    "strategy",
)  # fmt: skip


KERNELS = "profile/rank*.txt"
"""Tables of profiled kernels, one per rank."""


class Report:
    """Takes every row of the metrics; ``before``: those that exist already.

    If it cannot be written, it warns once, and the run goes on.
    """

    def __init__(
        self,
        run: Path,
        name: str,
        changes: Sequence[str] = (),
        before: Sequence[Mapping[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.curves: dict[str, Curve] = {}
        self._run, self._name, self._changes, self._clock = run, name, tuple(changes), clock
        self._began = identity(run)
        self._steps = 0
        self._due = clock()
        self._failed = False
        for row in before:
            self._add(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.curves:
            self._write(_ended(error))

    def feed(self, row: Mapping[str, Any]) -> None:
        self._add(row)
        if self._clock() >= self._due:
            begun = self._clock()
            self._write("running")
            now = self._clock()
            self._due = now + max(EVERY_S, SHARE * (now - begun))

    def loss(self, width: int = 40) -> str:
        """The loss curve as a line of text; "" with fewer than two values."""
        curve = self.curves.get("loss", Curve())
        if len(curve) < 2:
            return ""
        values = [p.mean for p in curve]
        return f"loss {values[0]:.4f} {sparkline(values, width)} {values[-1]:.4f}"

    def _add(self, row: Mapping[str, Any]) -> None:
        step = row.get("step")
        if not isinstance(step, int):
            return
        self._steps = int(row.get("steps", self._steps))
        for key, value in row.items():
            if key not in ("step", "steps") and isinstance(value, int | float):
                self.curves.setdefault(key, Curve()).add(step, float(value))

    def _write(self, status: str) -> None:
        moved = self._began is not None and identity(self._run) not in (self._began, None)
        if moved:  # another folder has taken its place; the run will say so
            return
        try:
            write_text(self._run / NAME, page(self._told(status)))
        except Exception as error:  # no error of the report may end a run
            if not self._failed:
                _log.warning("%s: %s; the run goes on without it", self._run / NAME, said(error))
            self._failed = True

    def _told(self, status: str) -> Told:
        return Told(
            name=f"{self._name} {self._run.name}",
            status=status,
            curves=self.curves,
            steps=self._steps,
            changes=self._changes,
            plan=self._text("plan.txt"),
            pictures={t: text for t, name in PICTURES.items() if (text := self._text(name))},
            kernels=[path.read_text(encoding="utf-8") for path in sorted(self._run.glob(KERNELS))],
            files=[name for name in LINKS if (self._run / name).exists()],
        )

    def _text(self, name: str) -> str:
        path = self._run / name
        return path.read_text(encoding="utf-8") if path.is_file() else ""


def _ended(error: BaseException | None) -> str:
    if error is None:
        return "done"
    if isinstance(error, Exception):
        return f"failed: {said(error)}".splitlines()[0]
    return type(error).__name__.lower()  # interrupted, preempted

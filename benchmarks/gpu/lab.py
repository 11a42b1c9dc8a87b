"""Runs the parts of the lab: side by side what is not timed, one at a time what is, each within its limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_S = 0.05
PREPARE_S = 180.0
"""The longest that a timed part may import and plan, before it waits for its turn."""


@dataclass(frozen=True)
class Part:
    """``limit_s`` counts from its turn. ``processes``: how many of it compute. ``timed``: it runs alone."""

    name: str
    limit_s: float
    processes: int = 1
    timed: bool = False

    def chosen(self, words: Sequence[str]) -> bool:
        """Whether one of ``words`` names it, or its first names: ``train`` is all of ``train.eager``, ..."""
        return not words or any(self.name == w or self.name.startswith(f"{w}.") for w in words)


@dataclass(frozen=True)
class Row:
    """What a part came to; ``why`` it failed, or was not tried."""

    part: str
    ok: bool
    seconds: float
    values: dict[str, Any]
    why: str = ""

    def line(self) -> str:
        said = {"part": self.part, "ok": self.ok, "seconds": round(self.seconds, 1), "values": self.values}
        return json.dumps(said | ({"why": self.why} if self.why else {}))


@dataclass
class Child:
    """The process of one part. Its values come through a file, a JSON object a line; ``began``: its turn."""

    part: Part
    folder: Path
    process: subprocess.Popen[bytes]
    started: float
    began: float | None = None

    @property
    def ready(self) -> bool:
        """It has prepared and waits for its turn."""
        return (self.folder / "ready").exists()

    def go(self) -> None:
        self.began = time.monotonic()
        (self.folder / "go").touch()

    def overdue(self) -> str:
        """Why it is to be ended now; empty while it is not."""
        now = time.monotonic()
        if self.began is not None and now - self.began > self.part.limit_s:
            return f"cut off at its limit of {self.part.limit_s:g} s"
        if self.began is None and not self.ready and now - self.started > PREPARE_S:
            return f"not prepared within {PREPARE_S:g} s"
        return ""

    def end(self) -> None:
        """Kill it with every process that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def row(self, why: str = "") -> Row:
        """Everything it has told, and how it ended."""
        values: dict[str, Any] = {}
        told = self.folder / "told"
        for line in told.read_text().splitlines() if told.exists() else []:
            values |= json.loads(line)
        why = why or values.pop("why", "") or ("" if self.process.poll() == 0 else self._last_words())
        seconds = time.monotonic() - (self.started if self.began is None else self.began)
        return Row(self.part.name, not why, seconds, values, why)

    def _last_words(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
        return f"exit code {self.process.poll()}: {last.strip()[:300]}"


@dataclass
class Lab:
    """``command``: what starts a part, without its name and folder. ``seconds``: of all parts together."""

    parts: Sequence[Part]
    command: Sequence[str]
    folder: Path
    seconds: float
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)

    def run(self) -> Iterator[Row]:
        """Rows as parts end; those that the time was too short for come last."""
        until = time.monotonic() + self.seconds
        waiting = list(self.parts)
        live: list[Child] = []
        try:
            while waiting or live:
                for child in list(live):
                    why = child.overdue()
                    if why:
                        child.end()
                    if child.process.poll() is not None:
                        child.end()
                        live.remove(child)
                        yield child.row(why)
                if time.monotonic() > until:
                    break
                self._start(waiting, live)
                self._give_turns(live, waiting)
                time.sleep(POLL_S)
        finally:
            for child in live:
                child.end()
        late = f"the {self.seconds:g} s of the lab were over"
        yield from (child.row(late) for child in live)
        yield from (Row(part.name, False, 0.0, {}, late) for part in waiting)

    def _start(self, waiting: list[Part], live: list[Child]) -> None:
        """As many as there are cores for; of timed ones the next few, which prepare and then wait."""
        for part in list(waiting):
            busy = [c for c in live if not c.part.timed]
            if part.timed:
                room = sum(c.part.timed for c in live) < max(1, self.cores - 1)
            else:
                taken = sum(c.part.processes for c in busy)
                timing = any(c.part.timed and c.began is not None for c in live)
                room = not timing and (not busy or taken + part.processes <= max(4, 2 * self.cores))
            if room:
                waiting.remove(part)
                live.append(self._child(part))

    def _give_turns(self, live: list[Child], waiting: list[Part]) -> None:
        """A timed part begins when nothing else runs: no part that is not timed, no other timed one."""
        if any(not part.timed for part in waiting):
            return
        running = [c for c in live if not c.part.timed or c.began is not None]
        first = next((c for c in live if c.part.timed and c.began is None), None)
        if first is not None and first.ready and not running:
            first.go()

    def _child(self, part: Part) -> Child:
        folder = self.folder / part.name
        folder.mkdir(parents=True)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*self.command, "--run", part.name, "--folder", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = Child(part, folder, process, time.monotonic())
        if not part.timed:
            child.began = child.started
        return child


@dataclass(frozen=True)
class Bench:
    """Where a part works: in a process of its own. ``device``: ``cpu`` or an accelerator's kind.

    ``cluster``: the option of ``cluster`` that describes the device; ``cores``: what the machine has.
    """

    name: str
    folder: Path
    device: str
    dry: bool
    cluster: str
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)

    def tell(self, **values: Any) -> None:
        """Values that are known from now on, also if this part is cut off."""
        with (self.folder / "told").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def turn(self) -> None:
        """Wait until nothing else runs."""
        (self.folder / "ready").touch()
        go, parent = self.folder / "go", os.getppid()
        while not go.exists():
            if os.getppid() != parent:
                sys.exit("the lab has ended")
            time.sleep(POLL_S)

    @property
    def root(self) -> Path:
        """The folder of all parts."""
        return self.folder.parent

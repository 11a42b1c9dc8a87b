"""Runs the parts of the lab, each within its time limit: timed parts alone, the others side by side."""

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
"""The most seconds that a timed part may take to import and plan, before it waits for its turn."""


@dataclass(frozen=True)
class Part:
    """One part of the lab.

    ``limit_s``: the time limit in seconds, counted from its turn. ``processes``: the number of its processes
    that compute. ``timed``: it runs alone.
    """

    name: str
    limit_s: float
    processes: int = 1
    timed: bool = False

    def chosen(self, words: Sequence[str]) -> bool:
        """Return true if one of ``words`` is its name or a prefix: ``train`` chooses ``train.eager`` too."""
        return not words or any(self.name == w or self.name.startswith(f"{w}.") for w in words)


@dataclass(frozen=True)
class Row:
    """The result of a part. ``why``: the reason if it failed or was not started."""

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
    """The process of one part, which writes its values to a file, one JSON object per line.

    ``began``: the time at which its turn began.
    """

    part: Part
    folder: Path
    process: subprocess.Popen[bytes]
    started: float
    began: float | None = None

    @property
    def ready(self) -> bool:
        """True if the part has prepared and waits for its turn."""
        return (self.folder / "ready").exists()

    def go(self) -> None:
        self.began = time.monotonic()
        (self.folder / "go").touch()

    def overdue(self) -> str:
        """Return why the process must be ended now; "" if it may continue."""
        now = time.monotonic()
        if self.began is not None and now - self.began > self.part.limit_s:
            return f"cut off at its limit of {self.part.limit_s:g} s"
        if self.began is None and not self.ready and now - self.started > PREPARE_S:
            return f"not prepared within {PREPARE_S:g} s"
        return ""

    def end(self) -> None:
        """Kill the process, and every process that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def row(self, why: str = "") -> Row:
        """Return all values that the part has reported, and how it ended."""
        values: dict[str, Any] = {}
        reported = self.folder / "values.jsonl"
        for line in reported.read_text().splitlines() if reported.exists() else []:
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
    """All parts, and how they are run.

    ``command``: the command that starts a part, without the part's name and folder. ``seconds``: the time
    limit of all parts together.
    """

    parts: Sequence[Part]
    command: Sequence[str]
    folder: Path
    seconds: float
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)

    def run(self) -> Iterator[Row]:
        """Yield a row when a part ends; parts that did not end in time come last."""
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
        """Start the next parts.

        Parts that are not timed use up to two processes per core, and start only while no timed part runs.
        The next few timed parts start early, because they first prepare and then wait for their turn.
        """
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
        """Let the next timed part begin, once all untimed parts and the timed part before it have ended."""
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
class PartContext:
    """What a part knows while it runs in its own process.

    ``device``: ``cpu`` or the type of the accelerator. ``dry``: the part only tries everything, with tiny
    sizes. ``cluster``: the option of ``cluster`` that describes the device. ``cores``: the machine's cores.
    """

    name: str
    folder: Path
    device: str
    dry: bool
    cluster: str
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)

    def report(self, **values: Any) -> None:
        """Report values; they are kept even if this part is cut off later."""
        with (self.folder / "values.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    def wait_for_turn(self) -> None:
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

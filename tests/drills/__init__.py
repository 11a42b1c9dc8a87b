"""Drills: what operators do to a run, many times at random moments, counted. ``python -m tests.drills [NAME ...]``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Tally(Counter[str]):
    """What came of each try; what is not ``right`` is printed when it comes."""

    def note(self, outcome: str, told: str = "") -> None:
        self[outcome] += 1
        if told:
            print(f"  {outcome}: {told}", flush=True)


@contextmanager
def launched(log: Path, *words: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """``python -m WORDS``, leading a process group of its own, which is gone behind the block."""
    command = [sys.executable, "-m", *words]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | (env or {}), stdout=out, stderr=out, text=True, start_new_session=True
        )
        try:
            yield process
        finally:
            for pid in [process.pid, *below(process.pid)]:
                end(pid)
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def below(pid: int) -> list[int]:
    """Children, and theirs."""
    return [p for child in children(pid) for p in (child, *below(child))]


def wait(process: subprocess.Popen[str], seconds: float) -> int | None:
    """The exit code; ``None`` when it is still running then."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def pause_until(done: Iterator[bool] | Sequence[bool], seconds: float) -> bool:
    """Whether one of ``done`` was true in time; it is asked again and again."""
    end_at = time.monotonic() + seconds
    for now in done:
        if now:
            return True
        if time.monotonic() > end_at:
            return False
        time.sleep(0.02)
    return False

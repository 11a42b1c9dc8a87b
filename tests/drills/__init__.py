"""Drills: what operators do to a run, many times at random moments, counted. ``python -m tests.drills [NAME ...]``."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Tally(Counter[str]):
    """Counts the outcomes of tries, and prints the details of an outcome at once."""

    def note(self, outcome: str, told: str = "") -> None:
        self[outcome] += 1
        if told:
            print(f"  {outcome}: {told}", flush=True)


@contextmanager
def launched(log: Path, *words: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start ``python -m WORDS`` in its own process group, and end the group after the block."""
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


def ranks(pid: int) -> list[int]:
    """Return the ranks of the launcher ``pid``: the children of the processes that its server has forked."""
    return [rank for server in children(pid) for parent in children(server) for rank in children(parent)]


def below(pid: int) -> list[int]:
    """Return all descendants of a process."""
    return [p for child in children(pid) for p in (child, *below(child))]


def wait(process: subprocess.Popen[str], seconds: float) -> int | None:
    """Return the exit code, or ``None`` if the process still runs after ``seconds``."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def pause_until(done: Iterator[bool] | Sequence[bool], seconds: float) -> bool:
    """Whether one of ``done`` was true in time; the next one is read every 20 ms."""
    end_at = time.monotonic() + seconds
    for now in done:
        if now:
            return True
        if time.monotonic() > end_at:
            return False
        time.sleep(0.02)
    return False


def imported() -> None:
    """Import all that a run needs once, so that ``forked`` processes have it."""
    import launcher.__main__
    import launcher.run.external_ranks.leader
    import launcher.runtime.processes.start_and_restart
    import launcher.steps.certify
    import launcher.steps.model.weights_in_one_process
    import launcher.steps.on_ranks
    import launcher.steps.sample  # noqa: F401


@contextmanager
def forking(words: Sequence[str], log: Path, env: Mapping[str, str | None] | None = None) -> Iterator[int]:
    """Fork ``launcher WORDS`` into its own process group, and end the group after the block.

    ``env``: changes of the environment, where ``None`` removes a variable. Yields the process id, for ``waited``.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _live(words, log, env or {})
    try:
        yield pid
    finally:
        for each in [pid, *below(pid)]:
            end(each)


def waited(pid: int, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> int | None:
    """Return the exit code of a child, or ``None`` if it had to be ended; ``meanwhile`` is called repeatedly."""
    end_at = time.monotonic() + seconds
    while time.monotonic() < end_at:
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            return os.waitstatus_to_exitcode(status)
        meanwhile()
        time.sleep(0.02)
    for each in [pid, *below(pid)]:
        end(each)
    os.waitpid(pid, 0)
    return None


def forked(words: Sequence[str], log: Path, meanwhile: Callable[[], object] = lambda: None) -> int | None:
    """Run ``launcher WORDS`` in a forked process, and return its exit code as ``waited`` does."""
    with forking(words, log) as pid:
        return waited(pid, 90, meanwhile)


def _live(words: Sequence[str], log: Path, env: Mapping[str, str | None]) -> None:
    code = 99
    try:
        os.setsid()
        for name, value in env.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not the streams that a test captures
        logging.getLogger().handlers.clear()
        from launcher.__main__ import main

        code = main(list(words))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)

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
    """Ranks of the launcher ``pid``: the children of those that its server has forked."""
    return [rank for server in children(pid) for parent in children(server) for rank in children(parent)]


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


def imported() -> None:
    """Import all that a run needs, once: what is ``forked`` has it."""
    import launcher.__main__
    import launcher.run.external_ranks.leader
    import launcher.runtime.processes.start_and_restart
    import launcher.steps.certify
    import launcher.steps.model.weights_in_one_process
    import launcher.steps.on_ranks
    import launcher.steps.sample  # noqa: F401


@contextmanager
def forking(words: Sequence[str], log: Path, env: Mapping[str, str | None] | None = None) -> Iterator[int]:
    """``launcher WORDS``, forked from here into a process group of its own, which is gone behind the block.

    ``env``: changes of the environment, ``None`` takes a variable away. Its id goes to ``waited``.
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
    """The exit code of a child, ``None`` when it had to be ended; ``meanwhile`` is done again and again."""
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
    """The exit code of ``launcher WORDS``, as ``waited`` has it."""
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
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not what a test captures with
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

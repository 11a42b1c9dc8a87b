"""A logger in a separate process, as seen by the run, which never waits for it.

It is a process and not a thread: ranks are forked from this process, and a thread would not survive that; a
package that hangs can be ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.plan.values.text import many

_log = logging.getLogger(__name__)

CODE = "from launcher.run.report.loggers.worker import main; main()"
MOST = 10_000
"""The most rows that wait for a logger; further rows are dropped."""
LOOK_S = 0.02


class LoggerProcess:
    """``begin``: the first message to ``worker``, with the logger's ``name``.

    ``taken``: the number of rows that the logger has reported as taken.
    """

    def __init__(self, run: Path, begin: dict[str, Any]) -> None:
        self.name = str(begin["name"])
        self._log_file = run / "loggers" / f"{self.name}.log"
        self._waiting: deque[bytes] = deque()
        self._sent = self._dropped = 0
        self.taken = 0
        self._heard = b""
        self._warned: set[str] = set()
        self._open, self._ending = True, False

        read, write = os.pipe()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        try:
            with self._log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", CODE, str(write)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    pass_fds=(write,),
                    process_group=0,  # not a new session, where niceness would have no effect
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self.pid = self._process.pid
        self._news = read
        assert self._process.stdin is not None
        self._rows = self._process.stdin
        for fd in (self._rows.fileno(), read):
            os.set_blocking(fd, False)
        self._send(json.dumps(begin).encode())

    def feed(self, row: bytes, step: int) -> None:
        """Sends a row, as JSON."""
        self._hear()
        if len(self._waiting) >= MOST:
            self._dropped += 1
            self._warn("full", f"takes no rows: {MOST} wait for it, those from step {step} on are lost")
        else:
            self._sent += 1
            self._send(row)

    def ended(self, how: str) -> None:
        """Announces that no more rows follow, and how the run ended."""
        self._ending = True
        self._send(json.dumps({"ended": how}).encode())

    def busy(self) -> bool:
        """Whether the process is still running; continues sending what waits."""
        self._push()
        self._hear()
        return self._process.poll() is None

    def end(self, waited_s: float) -> None:
        """Ends the process at once if it is running; warns about rows that it has not taken."""
        late = self.busy()
        if late:
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._hear()
        self._rows.close()
        os.close(self._news)

        # a failure has been reported already
        if "failed" not in self._warned and (said := self._unsent(late, waited_s, code)):
            self._warn("end", said)

    def _unsent(self, late: bool, waited_s: float, code: int) -> str:
        rows = self._sent + self._dropped
        lost = f"{rows - self.taken} of {many(rows, 'row')}"
        if late and rows == self.taken:
            return f"did not end within {waited_s:g} s (logger.wait_s), and was stopped"
        if late:
            return f"{lost} not sent within {waited_s:g} s (logger.wait_s); metrics.jsonl has all"
        if code:
            return f"its process ended with {code}, {lost} not sent; {self._log_file} may say why"
        return f"{lost} not taken; metrics.jsonl has all" if rows > self.taken else ""

    def _send(self, line: bytes) -> None:
        if self._open:
            self._waiting.append(line + b"\n")
            self._push()

    def _push(self) -> None:
        """Writes as much as the pipe takes; closes it after the last row."""
        try:
            while self._waiting:
                line = self._waiting.popleft()
                written = os.write(self._rows.fileno(), line)
                if written < len(line):
                    self._waiting.appendleft(line[written:])
            if self._ending:
                self._rows.close()
        except BlockingIOError:
            self._waiting.appendleft(line)
        except OSError:  # it has ended; its news or its exit code say why
            self._waiting.clear()
            self._open = False

    def _hear(self) -> None:
        try:
            while more := os.read(self._news, 1 << 16):
                self._heard += more
        except BlockingIOError:
            pass  # nothing more by now
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            news = json.loads(line)
            self.taken = news.get("taken", self.taken)
            if "lost" in news:
                self._warn("lost", f"{news['lost']}; the run goes on")
            if "failed" in news:
                self._warn("failed", f"{news['failed']}; the run goes on without it")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            _log.warning("logger.%s: %s", self.name, text)
        self._warned.add(kind)


def end(processes: Sequence[LoggerProcess], how: str, wait_s: float) -> None:
    """Ends all loggers within a common time limit."""
    try:
        for one in processes:
            one.ended(how)
        deadline = time.monotonic() + wait_s
        at_work = [one for one in processes if one.busy()]
        while at_work and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            at_work = [one for one in processes if one.busy()]
    finally:
        for one in processes:
            one.end(wait_s)

"""Runs each logger in a child process: the launcher's side, and the code of the child.

A thread would not do: ranks are forked from the launcher, which threads do not survive, and a thread whose
package hangs cannot be ended. ``launcher.extras.loggers`` says why each logger has its own process.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import yaml

from launcher.checkpoint.tensorfile.disk import write_text
from launcher.checkpoint.tensorfile.watched_folder import make_folder, open_file, watched
from launcher.errors import Problem
from launcher.extras.loggers.sinks import (
    FOLDER,
    MLflowLogger,
    OwnLogger,
    TensorBoard,
    TrackioLogger,
    WandbLogger,
)
from launcher.job.schema.job import Job
from launcher.job.schema.logger import MLflow, Trackio, Wandb
from launcher.optional import install_command
from launcher.plan.values.text import many
from launcher.runtime.signals import STOPS
from launcher.user_errors import user_error

_log = logging.getLogger(__name__)

CODE = "from launcher.extras.loggers.process import main; main()"
__all__ = ["FOLDER", "LoggerProcess", "TensorBoard", "begun", "board", "end", "main", "problems"]

MOST_WAITING = 10_000
"""The most rows that wait for a logger; while there are as many, new rows are dropped."""

LOOK_S = 0.02


class LoggerProcess:
    """A process that runs one logger.

    ``begin``: the first message to the child, with the logger's ``name``.

    ``taken``: the number of rows that the child has reported as logged.
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
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with open(open_file(self._log_file, flags), "ab") as log:
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
        if len(self._waiting) >= MOST_WAITING:
            self._dropped += 1
            text = f"too slow: {MOST_WAITING} rows wait, and further rows are dropped, from step {step} on"
            self._warn("full", text)
        else:
            self._sent += 1
            self._send(row)

    def ended(self, how: str) -> None:
        """Announces that no more rows follow, and how the run ended."""
        self._ending = True
        self._send(json.dumps({"ended": how}).encode())

    def busy(self) -> bool:
        """Returns true if the process still runs. Also sends waiting rows, as many as the pipe takes."""
        self._push()
        self._hear()
        return self._process.poll() is None

    def end(self, waited_s: float) -> None:
        """Kills the process if it still runs; warns of rows that it has not logged."""
        late = self.busy()
        if late:
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._hear()
        self._rows.close()
        os.close(self._news)

        # a failure has been reported already
        if "failed" not in self._warned and (message := self._unsent(late, waited_s, code)):
            self._warn("end", message)

    def _unsent(self, late: bool, waited_s: float, code: int) -> str:
        rows = self._sent + self._dropped
        lost = f"{rows - self.taken} of {many(rows, 'row')}"
        if late and rows == self.taken:
            return f"did not end within {waited_s:g} s (logger.wait_s), and was stopped"
        if late:
            return f"{lost} not sent within {waited_s:g} s (logger.wait_s); metrics.jsonl has all rows"
        if code:
            return f"its process ended with exit code {code}, {lost} not sent; see {self._log_file}"
        return f"{lost} not logged; metrics.jsonl has all rows" if rows > self.taken else ""

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
        except OSError:  # the child has ended; its last message or its exit code says why
            self._waiting.clear()
            self._open = False

    def _hear(self) -> None:
        try:
            while more := os.read(self._news, 1 << 16):
                self._heard += more
        except BlockingIOError:
            pass  # no more messages yet
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            news = json.loads(line)
            self.taken = news.get("taken", self.taken)
            if "lost" in news:
                self._warn("lost", f"{news['lost']}; the run continues")
            if "failed" in news:
                self._warn("failed", f"{news['failed']}; the run continues without it")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            _log.warning("logger.%s: %s", self.name, text)
        self._warned.add(kind)


def end(processes: Sequence[LoggerProcess], how: str, wait_s: float) -> None:
    """Ends all loggers; together they have ``wait_s`` seconds to send their rows."""
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


SPARE = 19
"""The niceness of the child: training has priority."""
WORKER_LOOK_S = 1.0
EVERY_S = 1.0
STDIN, CHUNK = 0, 1 << 16


class RunLogger(Protocol):
    """The interface of a logger; ``how`` is how the run ended: done, failed, stopped or killed."""

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None: ...

    def log(self, row: dict[str, Any]) -> None: ...

    def close(self, how: str) -> None: ...


class News:
    """Sends messages to the launcher; drops them once the launcher has ended."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def tell(self, **news: Any) -> None:
        try:
            os.write(self._fd, json.dumps(news).encode() + b"\n")
        except OSError:
            self._fd = -1


def main() -> None:
    """Runs the logger. It ignores signals that stop the run, so that it can take all rows."""
    for signum in STOPS:
        signal.signal(signum, signal.SIG_IGN)
    os.nice(SPARE)
    news = News(int(sys.argv[1]))
    lines = _lines()
    begun = json.loads(next(lines))
    threading.Thread(target=_follow, args=(begun["parent"], begun["wait_s"]), daemon=True).start()

    failed = True
    try:
        _serve(begun, lines, news)
        failed = False
    except (Exception, SystemExit) as error:  # a foreign package may raise anything
        news.tell(failed=user_error(error))
    sys.stdout.flush()
    os._exit(failed)  # threads and exit hooks of the package could hang


def _serve(begun: dict[str, Any], lines: Iterator[bytes], news: News) -> None:
    folder = Path(begun["run"])
    with watched(folder):
        make_folder(folder / "loggers")  # a package writes there by path: refused if it has become a link
        _serve_in(folder, begun, lines, news)


def _serve_in(folder: Path, begun: dict[str, Any], lines: Iterator[bytes], news: News) -> None:
    file = folder / "loggers" / f"{begun['name']}.json"
    state = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    before = int(begun["before"])
    if state.get("logged") and not before:
        state = {}  # trained again from the first step: a new run
    known = bool(state)

    # a logger that is new to this run first gets the rows of earlier starts
    logger = _built(begun, state)
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    logger.on_start(config, (folder / "plan.txt").read_text(encoding="utf-8"), folder)
    state["begun"] = True
    write_text(file, json.dumps(state) + "\n")
    if before and not known:
        for row in _metric_rows(folder / "metrics.jsonl", before):
            logger.log(row)

    how = _log_rows(
        logger, lines, news, lambda: write_text(file, json.dumps({**state, "logged": True}) + "\n")
    )
    logger.close(how)


def _lines() -> Iterator[bytes]:
    """Yields all lines, waking up rarely: each wake-up may take time from training."""
    rest = b""
    pause = select.poll()
    pause.register(STDIN, 0)  # wakes up early only at the end of input
    while more := os.read(STDIN, CHUNK):
        *lines, rest = (rest + more).split(b"\n")
        yield from lines
        if len(more) < CHUNK:
            pause.poll(EVERY_S * 1000)


def _built(begun: dict[str, Any], state: dict[str, Any]) -> RunLogger:
    settings, title = begun["settings"], str(begun["title"])
    match begun["name"]:
        case "wandb":
            return WandbLogger(Wandb(**settings), title, state)
        case "mlflow":
            return MLflowLogger(MLflow(**settings), title, state)
        case "trackio":
            return TrackioLogger(Trackio(**settings), title, state)
    return OwnLogger(settings, tuple(begun["allow"]), begun["key"])


def _metric_rows(path: Path, count: int) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, islice(lines, count))


def _log_rows(logger: RunLogger, lines: Iterator[bytes], news: News, first: Callable[[], None]) -> str:
    """Logs all rows; returns how the run ended. Reports and skips rows that fail."""
    taken = lost = 0
    for line in lines:
        row = json.loads(line)
        if "ended" in row:
            return str(row["ended"])
        try:
            logger.log(row)
            taken += 1
        except (Exception, SystemExit) as error:  # a foreign package may raise anything
            lost += 1
            if lost == 1:
                news.tell(lost=f"step {row['step']}: {user_error(error)}")
        news.tell(taken=taken)
        if taken + lost == 1:
            first()
    return "killed"


def _follow(parent: int, seconds: float) -> None:
    """Ends this process ``seconds`` after its parent has died and can no longer end it."""
    while os.getppid() == parent:
        time.sleep(WORKER_LOOK_S)
    time.sleep(seconds)
    os._exit(1)


PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),  # its SQLite files need the last two
    "trackio": ("trackio",),
}
NAMED_AFTER_THE_RUN = {"wandb": "project", "mlflow": "experiment", "trackio": "project"}


def problems(job: Job) -> Iterator[Problem]:
    """Yields a problem for each logger whose package is not installed."""
    for name, packages in PACKAGES.items():
        settings = getattr(job.logger, name)
        remote = name == "mlflow" and settings is not None and settings.tracking_uri is not None
        needed = packages[:1] if remote else packages
        lacks = [package for package in needed if find_spec(package) is None]
        if settings and lacks:
            shown = "true: " if settings is True else ""
            text = f"{shown}{lacks[0]} is not installed: {install_command(name)}"
            yield Problem(f"logger.{name}", text)


def begun(job: Job, run: Path, before: int) -> Iterator[LoggerProcess]:
    """Starts all loggers but TensorBoard; ``before``: rows in ``metrics.jsonl`` of earlier starts."""
    common = {
        "parent": os.getpid(),
        "title": f"{job.name}-{run.name}",
        "run": str(run.resolve()),
        "before": before,
        "wait_s": job.logger.wait_s,
    }
    for name, key in NAMED_AFTER_THE_RUN.items():
        logger = getattr(job.logger, name)
        if logger is not None:
            settings: dict[str, Any] = logger.model_dump(mode="json")
            settings[key] = settings[key] or job.name
            yield _started(run, {**common, "name": name, "settings": settings})
    for i, target in enumerate(job.logger.others):
        own = {"name": f"others.{i}", "key": f"logger.others.{i}", "allow": job.security.allow}
        yield _started(run, {**common, **own, "settings": target.model_dump(mode="json", by_alias=True)})


def _started(run: Path, begin: dict[str, Any]) -> LoggerProcess:
    make_folder(run / "loggers")
    return LoggerProcess(run, begin)


def board(run: Path, before: Iterable[Mapping[str, Any]]) -> TensorBoard:
    """Returns the event files of TensorBoard in the run folder; ``before``: rows of earlier starts."""
    texts = {name: (run / name).read_text(encoding="utf-8") for name in ("config.yaml", "plan.txt")}
    return TensorBoard(run, before, texts)

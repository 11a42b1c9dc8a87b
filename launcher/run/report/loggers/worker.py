"""The process of one logger: reads rows from standard input, sends news through another pipe."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import yaml

from launcher.checkpoint.tensorfile.durable import write_text
from launcher.errors import of_users
from launcher.job.schema.loggers import MLflow, Trackio, Wandb
from launcher.run.report.loggers.mlflow import MLflowLogger
from launcher.run.report.loggers.own_logger import OwnLogger
from launcher.run.report.loggers.trackio import TrackioLogger
from launcher.run.report.loggers.wandb import WandbLogger
from launcher.runtime.preemption import STOPS

SPARE = 19
"""The niceness, as training comes first."""
LOOK_S = 1.0
EVERY_S = 1.0
STDIN, CHUNK = 0, 1 << 16


class RunLogger(Protocol):
    """The interface of a logger; ``close`` gets how the run ended: done, failed, stopped or killed."""

    def on_start(self, config: dict[str, Any], plan: str, folder: Path) -> None: ...

    def log(self, row: dict[str, Any]) -> None: ...

    def close(self, how: str) -> None: ...


class News:
    """Sends news to the launcher; drops them once the launcher has ended."""

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
        news.tell(failed=of_users(error))
    sys.stdout.flush()
    os._exit(failed)  # its threads and hooks have had their time


def _serve(begun: dict[str, Any], lines: Iterator[bytes], news: News) -> None:
    folder = Path(begun["run"])
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
        for row in _rows(folder / "metrics.jsonl", before):
            logger.log(row)

    how = _log(logger, lines, news, lambda: write_text(file, json.dumps({**state, "logged": True}) + "\n"))
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


def _rows(path: Path, count: int) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, islice(lines, count))


def _log(logger: RunLogger, lines: Iterator[bytes], news: News, first: Callable[[], None]) -> str:
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
                news.tell(lost=f"step {row['step']}: {of_users(error)}")
        news.tell(taken=taken)
        if taken + lost == 1:
            first()
    return "killed"


def _follow(parent: int, seconds: float) -> None:
    """Ends this process ``seconds`` after its parent, which would have ended it."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    time.sleep(seconds)
    os._exit(1)

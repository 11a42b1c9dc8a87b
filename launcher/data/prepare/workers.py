"""A pool of worker processes, each served by a thread; answers come in the order of the tasks."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from launcher.data.prepare.encode import Recipe
from launcher.data.prepare.worker import Encode, Encoded, EncodeLines, Own, Task, Train, TrainText
from launcher.errors import RunError

K = TypeVar("K")
AHEAD = 2  # tasks per process that are submitted before their answers are needed
CODE = "from launcher.data.prepare.worker import main; main()"


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Workers:
    """A pool of ``count`` processes. If one ends before it answers, ``RunError`` is raised."""

    def __init__(self, count: int) -> None:
        self._all = [_started() for _ in range(count)]
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self._all:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(count)

    def train(self, task: Train | TrainText) -> str:
        """Trains a tokenizer; returns its tokenizer.json."""
        return str(self._ask(task))

    def encode(
        self, recipe: Recipe, tasks: Iterable[tuple[K, Encode | EncodeLines]]
    ) -> Iterator[tuple[K, Encoded]]:
        """Yields the key of each task and its answer, in order; reads only a few tasks ahead."""
        for process in self._all:
            _exchange(process, recipe)
        yield from self._answers(tasks)

    def answers(self, tasks: Iterable[Own]) -> Iterator[Any]:
        """Yields the answers of tasks that need no recipe, in order."""
        for _, answer in self._answers((None, task) for task in tasks):
            yield answer

    def _answers(self, tasks: Iterable[tuple[K, Task]]) -> Iterator[tuple[K, Any]]:
        waiting: deque[tuple[K, Future[Any]]] = deque()
        for key, task in tasks:
            waiting.append((key, self._threads.submit(self._ask, task)))
            if len(waiting) > AHEAD * len(self._all):
                yield _answered(*waiting.popleft())
        while waiting:
            yield _answered(*waiting.popleft())

    def close(self) -> None:
        """Ends all processes and threads."""
        for process in self._all:
            process.kill()  # its answer is no longer needed
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            with process:
                pass

    def _ask(self, task: Task) -> Any:
        process = self._idle.get()
        try:
            return _exchange(process, task)
        finally:
            self._idle.put(process)


def _answered(key: K, answer: Future[Any]) -> tuple[K, Any]:
    return key, answer.result()


@contextmanager
def workers(count: int) -> Iterator[Workers]:
    here = Workers(count)
    try:
        yield here
    finally:
        here.close()


def _started() -> subprocess.Popen[bytes]:
    """Starts a worker with this process's import path. It encodes in one thread: there is one per core."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    env = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)


def _exchange(process: subprocess.Popen[bytes], task: Task) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump(task, process.stdin, protocol=5)
        process.stdin.flush()
        return pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        raise RunError(f"a process that encodes {_ended(process)}") from error


def _ended(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    if code == -signal.SIGKILL:
        return "was killed; the system does so where memory runs out"
    return f"has ended with {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

"""Child processes that encode."""

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
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher.data import text_files
from launcher.data.prepare.corpus import Bad, Kind, documents
from launcher.data.prepare.encode import Encoder, Recipe
from launcher.errors import RunError
from launcher.job.schema.components import Text


@dataclass(frozen=True)
class Encode:
    """Encodes a block; ``first`` and ``ends``: it is the first or last of its file. Answer: ``Encoded``."""

    kind: Kind
    data: bytes | list[Any]
    field: str
    first: bool
    ends: bool


@dataclass(frozen=True)
class EncodeLines:
    """Encodes text line by line, as ``data=text`` does. Answer: ``Encoded``."""

    data: bytes


@dataclass(frozen=True)
class Train:
    """Trains BPE on the documents of ``blocks``. Answer: the content of tokenizer.json."""

    blocks: list[Encode]
    vocab_size: int
    end_of_document: str


@dataclass(frozen=True)
class TrainText:
    """Trains BPE on the training part of ``data=text``. Answer: the content of tokenizer.json."""

    settings: Text


@dataclass(frozen=True)
class Encoded:
    """The ``tokens``, the number of documents that ended, and the rows that were left out."""

    tokens: NDArray[np.uint32]
    documents: int
    bad: list[Bad]


class Own(Protocol):
    """A task of another folder, with its own answer. Lets folders that import this one add tasks."""

    def answer(self) -> Any: ...


Task = Recipe | Encode | EncodeLines | Train | TrainText | Own


class Worker:
    """Answers tasks. A ``Recipe`` must come before the first ``Encode`` or ``EncodeLines``."""

    def __init__(self) -> None:
        self._encoder: Encoder | None = None

    def answer(self, task: Task) -> Any:
        match task:
            case Recipe():
                self._encoder = Encoder(task)
                return None
            case Encode():
                return self._encode(task)
            case EncodeLines():
                assert self._encoder is not None
                return Encoded(self._encoder.lines(task.data.decode()), 0, [])
            case Train():
                return _trained(task)
            case TrainText(settings):
                train, _ = text_files.split(settings)
                return str(text_files.train(train.tobytes().decode(), settings.vocab_size).to_str())
            case _:
                return task.answer()

    def _encode(self, task: Encode) -> Encoded:
        assert self._encoder is not None
        found = documents(task.kind, task.data, task.field, task.first)
        whole = task.kind != "text"
        tokens = self._encoder(found.texts, end=whole or task.ends)
        return Encoded(tokens, len(found.texts) if whole else int(task.ends), found.bad)


def _trained(task: Train) -> str:
    texts = [t for b in task.blocks for t in documents(b.kind, b.data, b.field, b.first).texts]
    return str(text_files.train_on(texts, task.vocab_size, [task.end_of_document]).to_str())


def serve(tasks: BinaryIO, answers: BinaryIO) -> None:
    """Answers tasks until ``tasks`` ends, which it does whenever the parent process ends."""
    worker = Worker()
    while True:
        try:
            task = pickle.load(tasks)
        except EOFError:
            return
        pickle.dump(worker.answer(task), answers, protocol=5)
        answers.flush()


def main() -> None:
    """The entry point of the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent closes our input
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end silently if the parent is gone
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # keeps prints of libraries out of the answers
        serve(sys.stdin.buffer, answers)


K = TypeVar("K")
AHEAD = 2  # tasks per process that are submitted before their answers are needed
CODE = "from launcher.data.prepare.tasks import main; main()"


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

"""A worker process that encodes: reads tasks from stdin and writes answers, until stdin ends."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher.data.files import bpe, corpus
from launcher.data.prepare.documents import Bad, Kind, documents
from launcher.data.prepare.encode import Encoder, Recipe
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
                train, _ = corpus.split(settings)
                return str(bpe.train(train.tobytes().decode(), settings.vocab_size).to_str())
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
    return str(bpe.train_on(texts, task.vocab_size, [task.end_of_document]).to_str())


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

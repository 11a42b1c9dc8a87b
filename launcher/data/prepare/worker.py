"""A process that encodes: reads tasks from its input, writes what comes of them, and ends with its input."""

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
    """A block; ``first`` and ``ends``: of its file. Answered with ``Encoded``."""

    kind: Kind
    data: bytes | list[Any]
    field: str
    first: bool
    ends: bool


@dataclass(frozen=True)
class EncodeLines:
    """Text whose lines are encoded one by one, as ``data=text`` has it. Answered with ``Encoded``."""

    data: bytes


@dataclass(frozen=True)
class Train:
    """Byte pairs are trained on the documents of ``blocks``. Answered with what tokenizer.json says."""

    blocks: list[Encode]
    vocab_size: int
    end_of_document: str


@dataclass(frozen=True)
class TrainText:
    """Byte pairs are trained on what ``data=text`` trains on. Answered as ``Train``."""

    settings: Text


@dataclass(frozen=True)
class Encoded:
    """``tokens``, how many documents ended, and what was left out."""

    tokens: NDArray[np.uint32]
    documents: int
    bad: list[Bad]


class Own(Protocol):
    """A task that knows by itself how it is answered, of a folder that is built on this one."""

    def answer(self) -> Any: ...


Task = Recipe | Encode | EncodeLines | Train | TrainText | Own


class Worker:
    """Answers tasks; the first is the recipe, unless it is to train."""

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
    """Until ``tasks`` ends: the process that sends them has then ended too, however that came."""
    worker = Worker()
    while True:
        try:
            task = pickle.load(tasks)
        except EOFError:
            return
        pickle.dump(worker.answer(task), answers, protocol=5)
        answers.flush()


def main() -> None:
    """What the process does from its start to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; ours closes our input
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who asked is gone: nobody wants to know
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a library prints is no answer
        serve(sys.stdin.buffer, answers)

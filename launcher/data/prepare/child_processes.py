"""Child processes that encode text or train a tokenizer, and their tasks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from itertools import tee
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from launcher.data import text_files, train_byte_pairs
from launcher.data.prepare.documents import Bad, Kind, documents
from launcher.data.prepare.encode import Encoder, Recipe
from launcher.job.schema.data import Text
from launcher.process_pool import Interpreter, Workers, workers
from launcher.untrusted.bounded import limit_memory, silence_native_code


@dataclass(frozen=True)
class Encode:
    """Encodes a block, which may be the ``first`` of its file or the last (``ends``). Answer: ``Encoded``."""

    kind: Kind
    data: bytes | list[Any]
    field: str
    first: bool
    ends: bool


@dataclass(frozen=True)
class TrainTokenizer:
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
    """The ``tokens`` of a task, the number of ``documents`` that end in it, and the ``bad`` rows left out."""

    tokens: NDArray[np.uint32]
    documents: int
    bad: list[Bad]


K = TypeVar("K")
ENCODER = "a process that encodes"
ROOM = 1 << 30
"""Bytes of memory that a child may take to encode. A task has a few MB of text."""
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""The environment of a child, which has one core."""


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def encoders(count: int, tokenizer_file: str | None = None) -> AbstractContextManager[Workers]:
    """Starts ``count`` child processes, which end with the block.

    Raises ``RunError`` with ``tokenizer_file`` if one ends earlier.
    """
    description = ENCODER if tokenizer_file is None else f"{ENCODER} with {tokenizer_file}"
    return workers(count, partial(Interpreter, module=__name__, environ=ONE_THREAD), description)


def confine() -> None:
    """Limits the memory of this child, and drops what a tokenizer's native code prints.

    A tokenizer may turn a short text into gigabytes. The trial of its file does not show each such text.
    """
    silence_native_code()
    limit_memory(ROOM)


def train(crew: Workers, task: TrainTokenizer | TrainText) -> str:
    """Trains a tokenizer in a child; returns its tokenizer.json."""
    (tokenizer,) = crew.map(_trained, [task])
    return tokenizer


def encode(crew: Workers, recipe: Recipe, tasks: Iterable[tuple[K, Encode]]) -> Iterator[tuple[K, Encoded]]:
    """Yields the key of each task and its answer, in order. It reads only a few tasks ahead."""
    keyed, again = tee(tasks)
    answers = crew.map(partial(_encoded, recipe), (task for _, task in again))
    return zip((key for key, _ in keyed), answers, strict=True)


@cache
def _encoder(recipe: Recipe) -> Encoder:
    """Returns the encoder of this child, which all its tasks of one ``recipe`` share."""
    encoder = Encoder(recipe)
    confine()
    return encoder


def _encoded(recipe: Recipe, task: Encode) -> Encoded:
    encoder = _encoder(recipe)
    block = documents(task.kind, task.data, task.field, task.first)
    whole_documents = task.kind != "text"
    tokens = encoder(block.texts, end=whole_documents or task.ends)
    return Encoded(tokens, len(block.texts) if whole_documents else int(task.ends), block.bad)


def _trained(task: TrainTokenizer | TrainText) -> str:
    if isinstance(task, TrainText):
        part, _ = text_files.split(task.settings)
        return str(train_byte_pairs.train(part.tobytes().decode(), task.settings.vocab_size).to_str())
    texts = [t for b in task.blocks for t in documents(b.kind, b.data, b.field, b.first).texts]
    return str(train_byte_pairs.train_on(texts, task.vocab_size, [task.end_of_document]).to_str())

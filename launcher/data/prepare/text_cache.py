"""Caches the tokens of ``data=text``; one process makes them before the ranks start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray
from tokenizers import Tokenizer

from launcher.data import text_files, text_tokenizer
from launcher.data.prepare import lock, shard_record
from launcher.data.prepare.child_processes import Encode, TrainText, cores, encode, encoders, train
from launcher.data.prepare.corpus_digest import content_digest
from launcher.data.prepare.corpus_formats import CorpusFile
from launcher.data.prepare.documents import Position, text_pieces
from launcher.data.prepare.encode import Recipe
from launcher.data.prepare.prepare import writing
from launcher.data.prepare.progress import Progress, ProgressReporter
from launcher.data.tokens.formats import TokenWriter, mapped, token_file
from launcher.job.schema.data import Chat, Text
from launcher.job.schema.job import Job

VERSION = 4  # the version of the cached tokens' format
TRAIN, VAL = "train.tokens", "val.tokens"
FOLDER = "tokens"  # a hidden folder next to the runs, or a folder in the run's folder


@dataclass(frozen=True)
class TextTokens:
    """Tokens for training and for validation, and their tokenizer."""

    tokenizer: Tokenizer
    train: NDArray[Any]
    val: NDArray[Any]


def makes_tokens(data: object) -> TypeGuard[Text | Chat]:
    """Returns true for a data set whose tokens a run caches."""
    return isinstance(data, Chat) or (isinstance(data, Text) and data.tokenizer != "bytes")


def with_cache(job: Job) -> Job:
    """Returns ``job`` with ``data.cache`` set, if the run caches tokens and ``data.cache`` is null.

    The cache is next to the runs, or in the run's folder if the folder that contains it is not writable.
    """
    data = job.data
    if not makes_tokens(data) or data.cache is not None:
        return job
    beside = Path(job.runs) if job.run_dir is None else Path(job.run_dir).absolute().parent
    cache = beside / f".{FOLDER}"
    if job.run_dir is not None and not os.access(cache if cache.exists() else beside, os.W_OK | os.X_OK):
        cache = Path(job.run_dir) / FOLDER
    return job.model_copy(update={"data": data.model_copy(update={"cache": str(cache)})})


def make(settings: Text, say: Callable[[str], None], speed: ProgressReporter) -> None:
    """Makes the tokens, unless they are cached. Raises ``RunError`` if they cannot be written."""
    if settings.cache is None or settings.tokenizer == "bytes":
        return
    final = _folder(settings)
    if _complete(final):
        return
    folder = shard_record.working_folder(final)
    with writing(folder), lock.locked(folder, say, "data.cache"):
        if not _complete(final):
            _make(settings, folder, final, say, speed)
        else:
            shard_record.remove_unused(folder)


def cached_tokens(settings: Text) -> TextTokens | None:
    """Returns the tokens that ``make`` has cached; ``None`` if they are not cached."""
    if settings.cache is None:
        return None
    folder = _folder(settings)
    if not _complete(folder):
        return None
    train, val = (mapped(token_file(folder / name, dtype="uint16")) for name in (TRAIN, VAL))
    return TextTokens(text_tokenizer.load(folder / shard_record.TOKENIZER, tried=True), train, val)


def _folder(settings: Text) -> Path:
    """Returns the cache folder, whose name is a digest of everything that the tokens depend on.

    It reads the text and the tokenizer's file.
    """
    options = settings.model_dump(include={"tokenizer", "val_fraction"})
    if settings.tokenizer_file is None:
        options["vocab_size"] = settings.vocab_size
    else:
        options["tokenizer_file"] = content_digest(Path(settings.tokenizer_file))
    made = [VERSION, tokenizers.__version__, options, content_digest(text_files.where(settings))]
    assert settings.cache is not None
    return Path(settings.cache) / xxhash.xxh3_128_hexdigest(json.dumps(made).encode())


def _complete(folder: Path) -> bool:
    return shard_record.published(folder) is not None


def _make(
    settings: Text, folder: Path, final: Path, say: Callable[[str], None], speed: ProgressReporter
) -> None:
    path = text_files.where(settings)
    say(f"data: tokenizing {path} once, into {final}")
    shard_record.empty(folder)
    with encoders(cores(), settings.tokenizer_file) as crew:
        if settings.tokenizer_file is None:
            tokenizer = train(crew, TrainText(settings))
        else:
            tokenizer = str(text_tokenizer.load(Path(settings.tokenizer_file)).to_str())
        shard_record.write_text(folder / shard_record.TOKENIZER, tokenizer)
        size = text_tokenizer.vocab_size(Tokenizer.from_str(tokenizer))

        recipe = Recipe(tokenizer, end=0, file=settings.tokenizer_file or shard_record.TOKENIZER)
        speed.begin([CorpusFile(path, "text", "", path.stat().st_size)], Progress())
        done = 0
        for name, part in zip((TRAIN, VAL), text_files.split(settings), strict=True):
            with TokenWriter(folder / name, size) as file:
                for block, got in encode(crew, recipe, _tasks(part)):
                    file.append(got.tokens)
                    done += block
                    speed(Progress(Position(0, done), nbytes=done, tokens=file.tokens))
    shard_record.publish(folder, final, {"version": VERSION, "text": str(path)})


def _tasks(part: NDArray[np.uint8]) -> Iterator[tuple[int, Encode]]:
    """Yields a task for each piece of the text, with its number of bytes."""
    for piece in text_pieces(part):
        yield len(piece), Encode("text", piece, field="", first=False, ends=False)

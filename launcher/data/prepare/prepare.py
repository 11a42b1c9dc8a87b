"""Runs the step ``prepare``: converts text files to token files."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from launcher.data.file_kinds import BadFile
from launcher.data.prepare import lock, shard_record
from launcher.data.prepare.child_processes import Encoded, cores, encode, encoders
from launcher.data.prepare.corpus_digest import VERSION, TextCorpus, settings_digest
from launcher.data.prepare.corpus_formats import (
    TEXT_HEAD,
    CorpusFile,
    corpus_file,
    named,
    not_text,
    packing_errors,
    unpacked,
)
from launcher.data.prepare.documents import Bad, TextBlock, documents, keys_of_text
from launcher.data.prepare.encode import Recipe
from launcher.data.prepare.progress import Progress, ProgressReporter
from launcher.data.prepare.tables import check_column, columns_of_text
from launcher.data.prepare.train_tokenizer import corpus_vocabulary
from launcher.data.prepare.vocabulary import NoEnd, Vocabulary, vocabulary
from launcher.data.text_tokenizer import TOKENIZER
from launcher.data.tokens.formats import TokenWriter
from launcher.errors import Problem, RunError, error_text
from launcher.job.schema.steps import Prepare

Say = Callable[[str], None]
OTHER_CORPUS = "it was made from another corpus, or with other settings"
READ_BY_PLAN = 1 << 30
"""The most bytes of a corpus that a plan reads to find out whether ``dst`` was made from it."""


@dataclass(frozen=True)
class PreparedTokens:
    """A summary of ``dst``. If ``anew``, this start made it, from ``nbytes`` of text in ``seconds``."""

    tokens: int
    documents: int
    skipped: int
    vocab_size: int
    end: str
    anew: bool
    nbytes: int = 0
    seconds: float = 0.0

    def text(self, dst: str) -> str:
        """Returns the summary as one line."""
        summary = f"{self.tokens} tokens (ids below {self.vocab_size})"
        summary += f" of {self.documents} documents, each ended by {self.end}"
        skipped = f", {self.skipped} bad lines left out" if self.skipped else ""
        if not self.anew:
            return f"{dst}: it exists already: {summary}{skipped}"
        rate = f"{self.nbytes / 1e6 / max(self.seconds, 1e-9):.1f} MB of text a second"
        return f"{dst}: {summary}{skipped}; {rate}"


def prepare(settings: Prepare, key: str, say: Say, speed: ProgressReporter) -> PreparedTokens:
    """Prepares the corpus, unless ``dst`` already has its tokens. The next start keeps complete files.

    ``key`` is the key of ``settings``. Raises ``RunError``, with the file if the corpus cannot be read.
    """
    try:
        return _prepare(settings, key, say, speed)
    except BadFile as error:
        raise RunError(str(error)) from error


def _prepare(settings: Prepare, key: str, say: Say, speed: ProgressReporter) -> PreparedTokens:
    files = [_file(path, settings) for path in named(settings.src, settings.format)]
    corpus = TextCorpus.from_files(settings, files)
    dst, folder = Path(settings.dst), shard_record.working_folder(Path(settings.dst))
    with writing(folder), lock.locked(folder, say, f"{key}.dst"):
        manifest = _manifest(dst)
        if manifest is not None and corpus.is_in(manifest):
            shard_record.remove_unused(folder)
            return _from_manifest(manifest)
        reason = occupied(dst)
        if manifest is not None and not settings.overwrite:
            reason = f"{dst}: {OTHER_CORPUS}; {_replaces(key)}"
        if reason:
            shard_record.remove_unused(folder)
            raise RunError(reason)
        return _make(corpus, key, folder, say, speed)


def _file(path: Path, settings: Prepare) -> CorpusFile:
    try:
        return corpus_file(path, settings.format)
    except BadFile as error:
        raise BadFile(f"{path}: {error}") from error


def occupied(dst: Path) -> str | None:
    """Returns why ``dst`` must not be replaced; ``None`` if ``prepare`` made it, or it is empty."""
    if dst.exists() and not dst.is_dir():
        return f"{dst}: it is a file, not a folder"
    if not dst.is_dir() or not any(dst.iterdir()):
        return None
    if _manifest(dst) is None:
        return f"{dst}: it is not empty, but prepare did not make it"
    return None


def _manifest(dst: Path) -> dict[str, Any] | None:
    """Returns the manifest that ``prepare`` left in ``dst``; ``None`` if it is missing or incomplete."""
    manifest = shard_record.published(dst)
    if manifest is None or "end_of_document" not in manifest:
        return None
    return manifest if all(type(manifest.get(count)) is int for count in COUNTS) else None


def _replaces(key: str) -> str:
    return f"name another folder, or set {key}.overwrite=true to replace it"


def _make(corpus: TextCorpus, key: str, folder: Path, say: Say, speed: ProgressReporter) -> PreparedTokens:
    settings = corpus.settings
    start = time.monotonic()
    begun = done = shard_record.kept(folder, corpus.digest, corpus.skips)
    if done.shards:
        say(f"{settings.dst}: continues after {done.shards} complete files of tokens")

    with encoders(settings.workers or cores(), settings.tokenizer_file) as crew:
        made = corpus_vocabulary(corpus, folder, crew)
        speed.begin(corpus.files, done)
        tasks = ((block, corpus.task(block)) for block in corpus.blocks(done.position))
        encoded = encode(
            crew, Recipe(made.tokenizer, made.end, file=settings.tokenizer_file or TOKENIZER), tasks
        )
        while (more := _shard(corpus, key, folder, made, encoded, done, speed)) is not None:
            done = more

    # the corpus is complete
    corpus.check_unchanged()
    if not done.tokens:
        raise RunError(f"{_listed(corpus)}: no document has any text ({done.skipped} left out)")
    manifest = {
        "version": VERSION, "digest": corpus.digest, "tokens": done.tokens, "documents": done.documents,
        "skipped": done.skipped, "vocab_size": made.size, "end_of_document": made.end_text,
        "shards": done.shards, "files": [str(file.path) for file in corpus.files],
        "settings": corpus.settings_digest, "sizes": [file.size for file in corpus.files],
    }  # fmt: skip
    shard_record.publish(folder, Path(settings.dst), manifest)
    seconds = time.monotonic() - start
    return replace(_from_manifest(manifest), anew=True, nbytes=done.nbytes - begun.nbytes, seconds=seconds)


def _shard(
    corpus: TextCorpus, key: str, folder: Path, made: Vocabulary,
    encoded: Iterator[tuple[TextBlock, Encoded]], done: Progress, speed: ProgressReporter,
) -> Progress | None:  # fmt: skip
    """Writes one more file of tokens; returns ``None`` if no block is left."""
    first = next(encoded, None)
    if first is None:
        return None
    with TokenWriter(folder / shard_record.shard_name(done.shards), made.size, made.end) as file:
        for block, got in chain([first], encoded):
            bad = [*([Bad(0, block.bad)] if block.bad else []), *got.bad]
            if bad and not corpus.skips:
                where = corpus.place(block, bad[0].row)
                raise RunError(
                    f"{where}: {bad[0].why}; {key}.on_bad=skip leaves out bad rows and counts them"
                )
            file.append(got.tokens)
            done = replace(
                done,
                position=block.after,
                documents=done.documents + got.documents,
                tokens=done.tokens + len(got.tokens),
                skipped=done.skipped + len(bad),
                nbytes=done.nbytes + block.nbytes,
            )
            speed(done)
            if file.tokens >= corpus.settings.shard_tokens:
                break
    done = replace(done, shards=done.shards + 1)
    shard_record.record(folder, done)
    return done


def _from_manifest(manifest: dict[str, Any]) -> PreparedTokens:
    """Returns the summary that a folder's manifest contains."""
    counts = {key: manifest[key] for key in COUNTS}
    return PreparedTokens(**counts, end=str(manifest["end_of_document"]), anew=False)


def _listed(corpus: TextCorpus) -> str:
    paths = [str(file.path) for file in corpus.files]
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns ``OSError`` into ``RunError`` that says that a file cannot be written.

    Errors of files that are read are ``BadFile``.
    """
    try:
        yield
    except OSError as error:
        text = f"{error.filename or folder}: cannot be written: {error.strerror or error}"
        raise RunError(f"{text}; the same command continues after the complete files") from error


COUNTS = ("tokens", "documents", "skipped", "vocab_size")
"""The numbers that a manifest contains."""


HEAD = 64 << 10  # bytes of a JSON lines file that a plan checks for bad lines


def problems(settings: Prepare, key: str) -> list[Problem]:
    """Returns the problems of ``settings``; ``key`` is their key.

    It reads the tokenizer and the start of each file. If ``dst`` exists, the corpus is read too, if it has at
    most ``READ_BY_PLAN`` bytes.
    """
    of_request = [*_of_files(settings, key), *_of_tokenizer(settings, key), *_of_place(settings, key)]
    return of_request or [*_of_other_tokens(settings, key)]


def _of_files(settings: Prepare, key: str) -> Iterator[Problem]:
    try:
        paths = named(settings.src, settings.format)
    except BadFile as error:
        yield Problem(f"{key}.src", str(error))
        return
    except OSError as error:
        yield Problem(f"{key}.src", error_text(error))
        return

    # check each file
    files: list[CorpusFile] = []
    for path in paths:
        try:
            files.append(corpus_file(path, settings.format))
        except BadFile as error:
            yield Problem(f"{key}.src", f"{path}: {error}")
        except OSError as error:
            yield Problem(f"{key}.src", error_text(error))
    if files and not any(file.size for file in files):
        yield Problem(f"{key}.src", f"{_named_files(files)}: empty, so there is nothing to tokenize")
    for file in files:
        if file.size:
            yield from _of_fields(settings, file, key)


def _of_fields(settings: Prepare, file: CorpusFile, key: str) -> Iterator[Problem]:
    try:
        if file.form in ("parquet", "arrow"):
            yield from _of_columns(file, settings.field, key)
        elif file.form == "jsonl" and settings.on_bad == "error":
            yield from _of_first_lines(file, settings.field, key)
        elif file.form == "text":
            yield from _of_text(file, key)
    except BadFile as error:
        yield Problem(f"{key}.src", f"{file.path}: {error}")
    except packing_errors() as error:
        yield Problem(f"{key}.src", f"{file.path}: cannot be unpacked: {error}")


def _of_columns(file: CorpusFile, field: str, key: str) -> Iterator[Problem]:
    others = columns_of_text(file)
    try:
        check_column(file, field)
    except BadFile as error:
        yield Problem(f"{key}.src", f"{file.path}: {error}", _only_field(others, key))


def _only_field(fields: Sequence[str], key: str) -> str:
    """Returns the override that selects the only one of ``fields``.

    It returns "" if there is not exactly one, or its name cannot be pasted.
    """
    good = len(fields) == 1 and re.fullmatch(r"[A-Za-z_]\w*", fields[0], re.ASCII)
    return f"{key}.field={fields[0]}" if good else ""


def _of_first_lines(file: CorpusFile, field: str, key: str) -> Iterator[Problem]:
    """Yields a problem for the first bad line that ends within ``HEAD`` bytes."""
    with unpacked(file) as stream:
        head = stream.read(HEAD)
    end = len(head) if len(head) < HEAD else head.rfind(b"\n") + 1
    read = documents("jsonl", head[:end], field, first=True)
    if read.bad:
        bad = read.bad[0]
        cure = f"{key}.on_bad=skip" if read.texts else _only_field(keys_of_text(head[:end]), key)
        yield Problem(f"{key}.src", f"{file.path}:{bad.row + 1}: {bad.why}", cure)


def _of_text(file: CorpusFile, key: str) -> Iterator[Problem]:
    with unpacked(file) as stream:
        head = stream.read(TEXT_HEAD)
    if reason := not_text(head):
        yield Problem(f"{key}.src", f"{file.path}: {reason}")


def _of_tokenizer(settings: Prepare, key: str) -> Iterator[Problem]:
    if settings.tokenizer != "file":
        return
    try:
        vocabulary(settings)
    except NoEnd as error:
        yield Problem(f"{key}.end_of_document", str(error))
    except (ValueError, OSError) as error:
        yield Problem(f"{key}.tokenizer_file", error_text(error))


def _of_place(settings: Prepare, key: str) -> Iterator[Problem]:
    """Yields a problem if ``prepare`` did not make ``dst``, so that it must not be replaced."""
    dst = Path(settings.dst)
    if reason := occupied(dst):
        yield Problem(f"{key}.dst", f"{reason}; give another folder")


def _of_other_tokens(settings: Prepare, key: str) -> Iterator[Problem]:
    """Yields a problem if ``dst`` has another corpus or other settings and must not be replaced.

    A corpus of more than ``READ_BY_PLAN`` bytes is compared by its settings and the sizes of its files; the
    step itself compares its content.
    """
    dst = Path(settings.dst)
    manifest = _manifest(dst)
    if manifest is None or settings.overwrite:
        return
    files = [corpus_file(path, settings.format) for path in named(settings.src, settings.format)]
    sizes = [file.size for file in files]
    try:
        if sum(sizes) <= READ_BY_PLAN:
            same = TextCorpus.from_files(settings, files).is_in(manifest)
        else:
            now = {"settings": settings_digest(settings), "sizes": sizes}
            same = all(manifest.get(name, value) == value for name, value in now.items())
    except OSError as error:
        yield Problem(f"{key}.src", error_text(error))
        return
    if not same:
        yield Problem(f"{key}.dst", f"{dst}: {OTHER_CORPUS}; {_replaces(key)}")


def _named_files(files: Sequence[CorpusFile]) -> str:
    return str(files[0].path) if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"


UNKNOWN = 257
"""The vocabulary size if the tokenizer cannot be read; its own check reports why."""


def bound(settings: Prepare) -> int:
    """Returns a bound that every token is below. For BPE that is not trained yet, it is ``vocab_size``."""
    return _bound_and_end(settings)[0]


def write_placeholder(path: Path, settings: Prepare, count: int) -> None:
    """Writes ``count`` tokens, each of which ends a document."""
    size, end = _bound_and_end(settings)
    with TokenWriter(path, size, end) as file:
        file.append(np.full(count, end))


def _bound_and_end(settings: Prepare) -> tuple[int, int]:
    if settings.vocab_size is not None:
        return settings.vocab_size, settings.vocab_size - 1
    try:
        made = vocabulary(settings)
    except (ValueError, OSError):
        return UNKNOWN, UNKNOWN - 1
    return made.size, made.end

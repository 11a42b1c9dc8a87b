"""Checks a corpus before it is prepared, by its file names, first bytes and headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.data.files.bad_file import BadFile
from launcher.data.prepare.corpus_files import CorpusFile, corpus_file, named, packing_errors, unpacked
from launcher.data.prepare.documents import documents
from launcher.data.prepare.prepare import occupied
from launcher.data.prepare.tables import check_column
from launcher.data.prepare.tokenizer_file import NoEnd, vocabulary
from launcher.errors import Problem, said
from launcher.job.schema.steps import Prepare

HEAD = 64 << 10  # bytes of a JSON lines file that are checked for bad lines


def problems(settings: Prepare, key: str) -> list[Problem]:
    """Problems with ``settings``, section ``key``. Reads the tokenizer and the start of each file."""
    return [*_of_files(settings, key), *_of_tokenizer(settings, key), *_of_place(settings, key)]


def _of_files(settings: Prepare, key: str) -> Iterator[Problem]:
    try:
        paths = named(settings.src, settings.format)
    except BadFile as error:
        yield Problem(f"{key}.src", str(error))
        return
    except OSError as error:
        yield Problem(f"{key}.src", said(error))
        return

    # check each file
    files: list[CorpusFile] = []
    for path in paths:
        try:
            files.append(corpus_file(path, settings.format))
        except BadFile as error:
            yield Problem(f"{key}.src", f"{path}: {error}")
        except OSError as error:
            yield Problem(f"{key}.src", said(error))
    if files and not any(file.size for file in files):
        yield Problem(f"{key}.src", f"{_listed(files)}: empty, so there is nothing to make tokens of")
    for file in files:
        if file.size:
            yield from _of_fields(settings, file, key)


def _of_fields(settings: Prepare, file: CorpusFile, key: str) -> Iterator[Problem]:
    try:
        if file.form in ("parquet", "arrow"):
            check_column(file, settings.field)
        elif file.form == "jsonl" and settings.on_bad == "error":
            yield from _of_first_lines(file, settings.field, key)
    except BadFile as error:
        yield Problem(f"{key}.src", f"{file.path}: {error}")
    except packing_errors() as error:
        yield Problem(f"{key}.src", f"{file.path}: cannot be unpacked: {error}")


def _of_first_lines(file: CorpusFile, field: str, key: str) -> Iterator[Problem]:
    """Reports the first bad line that ends within ``HEAD`` bytes."""
    with unpacked(file) as stream:
        head = stream.read(HEAD)
    end = len(head) if len(head) < HEAD else head.rfind(b"\n") + 1
    bad = documents("jsonl", head[:end], field, first=True).bad
    if bad:
        yield Problem(f"{key}.src", f"{file.path}:{bad[0].row + 1}: {bad[0].why}", f"{key}.on_bad=skip")


def _of_tokenizer(settings: Prepare, key: str) -> Iterator[Problem]:
    if settings.tokenizer != "file":
        return
    try:
        vocabulary(settings)
    except NoEnd as error:
        yield Problem(f"{key}.end_of_document", str(error))
    except (ValueError, OSError) as error:
        yield Problem(f"{key}.tokenizer_file", said(error))


def _of_place(settings: Prepare, key: str) -> Iterator[Problem]:
    """Reports a ``dst`` that may not be replaced. Only reading the corpus shows if it was made of that."""
    dst = Path(settings.dst)
    if reason := occupied(dst, overwrite=True):
        yield Problem(f"{key}.dst", f"{reason}; give another folder")


def _listed(files: Sequence[CorpusFile]) -> str:
    return str(files[0].path) if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"

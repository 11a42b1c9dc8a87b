"""Checks the first conversations of ``data=chat`` with its template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

from launcher.data import text_tokenizer
from launcher.data.bounded_tokenizer import TokenizerError
from launcher.data.chat.chat_tokenizer import (
    CONFIG,
    SPECIAL_TOKENS,
    TEMPLATE,
    ChatTokenizer,
    Labeled,
    chat_tokenizer,
)
from launcher.data.chat.conversation_files import (
    BadRow,
    DataRow,
    OtherForm,
    conversation_of,
    files,
    read_rows,
)
from launcher.data.chat.template import TOTAL, TemplateLimit
from launcher.data.chat.tokens import FIT, SKIP, fitted, sample_takes
from launcher.data.file_kinds import BadFile
from launcher.data.limited_child import ChildFailed, LimitExceeded, in_child
from launcher.errors import Problem, error_text
from launcher.job.schema.data import Chat, Paths
from launcher.plan.values.module_names import listed

ROWS_CHECKED = 50
"""The number of rows that are checked at the start of each path; they suffice to recognize a wrong format."""


SECONDS, MEMORY = 60, 1 << 30
"""The processor time in seconds and the memory in bytes that a check with a tokenizer of a file may take."""


def check_first_rows(settings: Chat) -> list[Problem]:
    """Checks the first rows. A tokenizer of a file, which may be a stranger's, is used in a limited child."""
    return _examined(settings)[0]


def trained_text(settings: Chat) -> str:
    """Describes what the first row with assistant tokens trains the model on; empty if there is none."""
    return _examined(settings)[1]


Examined = tuple[list[Problem], str]
"""The problems of the first rows, and the text that the first usable one trains the model on."""


def _examined(settings: Chat) -> Examined:
    if settings.tokenizer_file is None:
        return examine(settings)
    try:
        text_tokenizer.load(Path(settings.tokenizer_file))
    except (ValueError, OSError) as error:
        return [Problem("data.tokenizer_file", error_text(error)), *_rows_alone(settings)], ""
    return _in_child(settings, _states(settings))


def _rows_alone(settings: Chat) -> Iterator[Problem]:
    for key, paths in _paths(settings):
        yield from _of_path(settings, None, key, paths)


def _states(settings: Chat) -> tuple[tuple[str, int, int, int], ...]:
    """Returns the name, inode, size and modification time of each file that the check reads."""
    beside = [Path(str(settings.tokenizer_file)).with_name(n) for n in (CONFIG, TEMPLATE, SPECIAL_TOKENS)]
    read = [Path(str(settings.tokenizer_file)), *beside]
    read += [Path(settings.template)] if settings.template is not None else []
    for _, paths in _paths(settings):
        with suppress(BadFile, OSError):  # the check reports it
            read += [file.path for file in files(paths)]
    out = []
    for path in read:
        with suppress(OSError):
            status = path.stat()
            out.append((str(path), status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(out)


@lru_cache(maxsize=4)  # a request is checked again for each cure that is tried
def _in_child(settings: Chat, _: object) -> Examined:
    try:
        return in_child(examine, settings, module=__name__, seconds=SECONDS, nbytes=MEMORY)
    except (LimitExceeded, ChildFailed) as error:
        return [Problem("data.tokenizer_file", f"{settings.tokenizer_file}: on the first rows {error}")], ""


def examine(settings: Chat) -> Examined:
    """Checks the first rows in this process, with a tokenizer that was tried before."""
    by = None
    problems = []
    try:
        by = chat_tokenizer(settings, tried=True)
        if by.template is not None:
            by.template.limit_total(TOTAL)
    except (ValueError, OSError) as error:
        key = "data.tokenizer_file"
        if settings.template is not None and settings.template in str(error):
            key = "data.template"
        problems.append(Problem(key, error_text(error)))
    try:
        problems += _of_rows(settings, by)
        return problems, "" if by is None else _trained_text(settings, by)
    except TokenizerError as error:
        return [*problems, Problem("data.tokenizer_file", str(error))], ""


def _paths(settings: Chat) -> Iterator[tuple[str, Paths | None]]:
    yield "data.path", settings.path
    if settings.val is not None:
        yield "data.val", settings.val


def _of_rows(settings: Chat, by: ChatTokenizer | None) -> Iterator[Problem]:
    if by is not None and settings.vocab_size is not None and by.size > settings.vocab_size:
        text = f"{settings.vocab_size}: the tokenizer has {by.size} tokens"
        yield Problem("data.vocab_size", text, f"data.vocab_size={by.size}")
    for key, paths in _paths(settings):
        yield from _of_path(settings, by, key, paths)


def _trained_text(settings: Chat, by: ChatTokenizer) -> str:
    try:
        for row in islice(read_rows(settings, settings.path), ROWS_CHECKED):
            try:
                made = fitted(settings, _labeled(by, row))
            except BadRow:
                continue
            if made is not None:
                text = f"in {Path(row.place).name} the model is trained on {by.trained_text(*made)}"
                rest = by.template is not None and by.template.unwritten_reasoning(conversation_of(row))
                return (
                    f"{text}; the template leaves out {listed(rest)}, so it is not learned" if rest else text
                )
    except (BadFile, OSError):
        return ""  # the checks of the data report these errors
    return ""


def _labeled(by: ChatTokenizer, row: DataRow) -> Labeled:
    """Returns the tokens of a row, and which of them are trained on. Raises ``BadRow`` if none is."""
    ids, counted = by.labeled(conversation_of(row))
    if not counted[1:].any():
        raise BadRow("it has no assistant tokens to train on")
    return ids, counted


def _usable(by: ChatTokenizer, row: DataRow) -> bool:
    try:
        _labeled(by, row)
    except BadRow:
        return False
    return True


def _of_path(settings: Chat, by: ChatTokenizer | None, key: str, paths: Paths | None) -> Iterator[Problem]:
    try:
        corpus_files = files(paths)
        first = list(islice(read_rows(settings, paths), ROWS_CHECKED + 1))
    except BadFile as error:
        yield Problem(key, str(error))
        return
    except OSError as error:
        yield Problem(key, error_text(error))
        return
    if not first:
        yield Problem(key, f"{corpus_files[0].path}: it has no rows")
        return
    if by is None:
        return
    bad = []
    long = []
    endless: list[tuple[DataRow, str]] = []
    ends = False
    for row in first[:ROWS_CHECKED]:
        try:
            ids, counted = _labeled(by, row)
            ends = ends or by.ends_a_turn(ids, counted)
            endless.append((row, by.trained_text(ids, counted)))
        except TemplateLimit as error:
            template = settings.template or settings.tokenizer_file
            yield Problem("data.template", f"{template}: {error}: in {row.place}")
            return
        except BadRow as error:
            other = isinstance(error, OtherForm)
            why = error.advice(corpus_files[row.file].path) if isinstance(error, OtherForm) else str(error)
            why = f"{row.place}: {why}"
            if settings.on_bad == "error":
                leaves_some = not other and any(_usable(by, one) for one in first)
                yield Problem(key, f"{why}; {SKIP}", "data.on_bad=skip") if leaves_some else Problem(key, why)
                return
            bad.append(why)
            continue
        if len(ids) > settings.seq_len + 1:
            too_long = f"{row.place}: {len(ids)} tokens; {sample_takes(settings.seq_len)}"
            if settings.too_long == "error":
                yield Problem("data.seq_len", f"{too_long}; {FIT}", _way_to_fit(settings, by, first))
                return
            if fitted(settings, (ids, counted)) is None:
                long.append(too_long)
    if endless and not ends:
        row, text = endless[0]
        why = "no trained turn ends with a special token, so the model would never learn to stop"
        way = "the template must write one where the assistant's turn ends (within {% generation %})"
        yield Problem("data.template", f"{why}: in {row.place} it is trained on {text}; {way}")
    if len(bad) == len(first):
        yield Problem(key, f"none of its rows can be trained on: {bad[0]}")
    elif len(bad) + len(long) == len(first):
        why = f"data.too_long={settings.too_long} leaves no token to train on: {long[0]}"
        yield Problem("data.seq_len", f"{settings.seq_len}: {why}")


def _way_to_fit(settings: Chat, by: ChatTokenizer, rows: Sequence[DataRow]) -> str:
    """Returns an override of ``data.too_long`` with which a row of ``rows`` remains; empty if none does."""
    made = [_labeled(by, row) for row in rows if _usable(by, row)]
    ways: tuple[Literal["cut", "skip"], ...] = ("cut", "skip")
    for way in ways:
        fit = settings.model_copy(update={"too_long": way})
        if any(fitted(fit, one) is not None for one in made):
            return f"data.too_long={way}"
    return ""

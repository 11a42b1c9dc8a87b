"""Checks the first conversations of ``data=chat`` with its template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from launcher.data.chat.conversation_files import BadRow, DataRow, OtherForm, conversation, files, read_rows
from launcher.data.chat.template import ChatTokenizer, Labeled, chat_tokenizer
from launcher.data.chat.tokens import FIT, SKIP
from launcher.data.file_kinds import BadFile
from launcher.errors import Problem, error_text
from launcher.job.schema.data import Chat, Paths

ROWS_CHECKED = 50
"""The number of rows that are checked at the start of each path; they suffice to recognize a wrong format."""


def check_chat(settings: Chat) -> Iterator[Problem]:
    by = None
    try:
        by = chat_tokenizer(settings)
    except (ValueError, OSError) as error:
        key = "data.tokenizer_file"
        if settings.template is not None and settings.template in str(error):
            key = "data.template"
        yield Problem(key, error_text(error))
    if by is not None and settings.vocab_size is not None and by.size > settings.vocab_size:
        text = f"{settings.vocab_size}: the tokenizer has {by.size} tokens"
        yield Problem("data.vocab_size", text, f"data.vocab_size={by.size}")
    for key, paths in (("data.path", settings.path), ("data.val", settings.val)):
        if key == "data.path" or paths is not None:
            yield from _of_path(settings, by, key, paths)


def trained_text(settings: Chat) -> str:
    """Describes what the first row with assistant tokens trains the model on; empty if there is none."""
    try:
        by = chat_tokenizer(settings)
        for row in islice(read_rows(settings, settings.path), ROWS_CHECKED):
            try:
                text = by.trained_text(*_labeled(by, row))
                return f"in {Path(row.place).name} the model is trained on {text}"
            except BadRow:
                continue
    except (BadFile, ValueError, OSError):
        return ""  # the checks of the data report these errors
    return ""


def _labeled(by: ChatTokenizer, row: DataRow) -> Labeled:
    """Returns the tokens of a row, and which of them are trained on. Raises ``BadRow`` if none is."""
    ids, counted = by.labeled(conversation(row.data))
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
    endless: list[tuple[DataRow, str]] = []
    ends = False
    for row in first[:ROWS_CHECKED]:
        try:
            ids, counted = _labeled(by, row)
            ends = ends or by.ends_a_turn(ids, counted)
            endless.append((row, by.trained_text(ids, counted)))
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
        if settings.too_long == "error" and len(ids) > settings.seq_len + 1:
            room = f"data.seq_len={settings.seq_len} has room for {settings.seq_len + 1}"
            yield Problem(
                "data.seq_len", f"{row.place}: {len(ids)} tokens, but {room}; {FIT}", "data.too_long=cut"
            )
            return
    if endless and not ends:
        row, text = endless[0]
        why = "no trained turn ends with a special token, so the model would never learn to stop"
        way = "the template must write one where the assistant's turn ends (within {% generation %})"
        yield Problem("data.template", f"{why}: in {row.place} it is trained on {text}; {way}")
    if len(bad) == len(first):
        yield Problem(key, f"none of its rows can be trained on: {bad[0]}")

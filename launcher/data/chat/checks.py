"""Checks conversations by the names of their files, the tokenizer and the first rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from launcher.data.chat.conversations import BadRow, OtherForm, Row, conversation, files, rows
from launcher.data.chat.tokenizer import ChatTokenizer, chat_tokenizer
from launcher.data.chat.tokens import FIT, SKIP
from launcher.data.files.bad_file import BadFile
from launcher.errors import Problem, said
from launcher.job.schema.components import Chat, Paths

LOOKED = 50
"""The number of rows that are checked at the start of each path: a corpus of another form shows it there."""


def check_chat(settings: Chat) -> Iterator[Problem]:
    by = None
    try:
        by = chat_tokenizer(settings)
    except (ValueError, OSError) as error:
        key = "data.tokenizer_file"
        if settings.template is not None and settings.template in str(error):
            key = "data.template"
        yield Problem(key, said(error))
    if by is not None and settings.vocab_size is not None and by.size > settings.vocab_size:
        text = f"{settings.vocab_size}: the tokenizer has {by.size} tokens"
        yield Problem("data.vocab_size", text, f"data.vocab_size={by.size}")
    for key, paths in (("data.path", settings.path), ("data.val", settings.val)):
        if key == "data.path" or paths is not None:
            yield from _of_path(settings, by, key, paths)


def learnt(settings: Chat) -> str:
    """Describes which text of the first usable row is trained on; empty if no row is usable."""
    try:
        by = chat_tokenizer(settings)
        for row in islice(rows(settings, settings.path), LOOKED):
            try:
                return (
                    f"of {Path(row.place).name} is learnt {by.learnt(*by.labelled(conversation(row.data)))}"
                )
            except BadRow:
                continue
    except (BadFile, ValueError, OSError):
        return ""  # the checks of the data report these errors
    return ""


def vocabulary(settings: Chat) -> int | None:
    """The tokenizer's number of tokens; ``None`` if the tokenizer cannot be read."""
    try:
        return chat_tokenizer(settings).size
    except (ValueError, OSError):
        return None


def _of_path(settings: Chat, by: ChatTokenizer | None, key: str, paths: Paths | None) -> Iterator[Problem]:
    try:
        found = files(paths)
        first = list(islice(rows(settings, paths), LOOKED + 1))
    except BadFile as error:
        yield Problem(key, str(error))
        return
    except OSError as error:
        yield Problem(key, said(error))
        return
    if not first:
        yield Problem(key, f"{found[0].path}: there is no row in it")
        return
    if by is None:
        return
    bad = []
    endless: list[tuple[Row, str]] = []
    ends = False
    for row in first[:LOOKED]:
        try:
            ids, counted = by.labelled(conversation(row.data))
            if not counted[1:].any():
                raise BadRow("the assistant says nothing in it")
            ends = ends or by.ends_a_turn(ids, counted)
            endless.append((row, by.learnt(ids, counted)))
        except BadRow as error:
            other = isinstance(error, OtherForm)
            why = error.advice(found[row.file].path) if isinstance(error, OtherForm) else str(error)
            why = f"{row.place}: {why}"
            if settings.on_bad == "error":
                yield Problem(key, why) if other else Problem(key, f"{why}; {SKIP}", "data.on_bad=skip")
                return
            bad.append(why)
            continue
        if settings.too_long == "error" and len(ids) > settings.seq_len + 1:
            room = f"data.seq_len={settings.seq_len} has room for {settings.seq_len + 1}"
            yield Problem(
                "data.seq_len", f"{row.place}: {len(ids)} tokens, and {room}; {FIT}", "data.too_long=cut"
            )
            return
    if endless and not ends:
        row, text = endless[0]
        why = "no turn that is learnt ends with a special token, so the model would never learn to stop"
        way = "the template has to write one where the assistant's turn ends (within {% generation %})"
        yield Problem("data.template", f"{why}: of {row.place} is learnt {text}; {way}")
    if len(bad) == len(first):
        yield Problem(key, f"none of its rows can be trained on: {bad[0]}")

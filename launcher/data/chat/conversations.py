"""Conversations as rows of JSON lines: messages, or a prompt and its completion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.data.files.bad_file import BadFile
from launcher.data.prepare.corpus_files import CorpusFile, corpus_file, named, packing_errors, unpacked
from launcher.job.schema.components import Chat, Paths

SHIPPED = Path(__file__).parents[1] / "text" / "conversations.jsonl"
LONGEST = 8 << 20
"""Bytes of a row."""
MESSAGES, PROMPT, COMPLETION, TOOLS = "messages", "prompt", "completion", "tools"
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
"""Another one may be one of these misspelt, and nothing of it would be learnt."""
FORMS = f"a row has {MESSAGES!r}, or {PROMPT!r} and {COMPLETION!r}"

Message = Mapping[str, Any]


class BadRow(ValueError):
    """A row that cannot be trained on; the text says why."""


@dataclass(frozen=True)
class Conversation:
    """``messages``, those before ``first`` not to be learnt; or a ``prompt`` and its ``completion``.

    ``tools``: what the assistant may call, as templates take it.
    """

    messages: tuple[Message, ...] = ()
    first: int = 0
    prompt: str = ""
    completion: str = ""
    tools: Sequence[Any] | None = None


@dataclass(frozen=True)
class Row:
    """``place``: FILE:LINE."""

    place: str
    line: bytes


def files(paths: Paths | None) -> list[CorpusFile]:
    """Raises ``BadFile`` with the path for what is not JSON lines, and ``OSError``."""
    out = []
    for path in [SHIPPED] if paths is None else named(paths, "auto"):
        try:
            file = corpus_file(path, "auto")
        except BadFile as error:
            raise BadFile(f"{path}: {error}") from error
        if file.form != "jsonl":
            raise BadFile(f"{path}: {file.form} by its name; conversations are read of JSON lines (.jsonl)")
        out.append(file)
    return out


def rows(settings: Chat, paths: Paths | None) -> Iterator[Row]:
    """Lines that are not empty. Raises ``BadFile``."""
    for file in files(paths):
        try:
            with unpacked(file) as stream:
                for number, line in enumerate(iter(lambda: stream.readline(LONGEST + 1), b""), 1):
                    if line.strip():
                        yield Row(f"{file.path}:{number}", line)
        except packing_errors() as error:
            raise BadFile(f"{file.path}: cannot be unpacked: {error}") from error


def conversation(line: bytes) -> Conversation:
    """Raises ``BadRow``."""
    if len(line) > LONGEST:
        raise BadRow(f"a row of more than {LONGEST >> 20} MB")
    try:
        said = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRow(f"byte {error.start} of the line is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"no JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:
        raise BadRow("no JSON that is read: too deep, or a number too long") from error
    if not isinstance(said, dict):
        raise BadRow(f"no object; {FORMS}")

    tools = said.get(TOOLS) or None
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"{TOOLS!r} is no list")
    if MESSAGES in said:
        return Conversation(messages=_messages(said[MESSAGES], MESSAGES), tools=tools)
    if PROMPT not in said or COMPLETION not in said:
        keys = ", ".join(map(str, list(said)[:8])) or "none"
        raise BadRow(f"{FORMS} (keys: {keys})")
    prompt, completion = said[PROMPT], said[COMPLETION]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(prompt=prompt, completion=completion)
    before = _messages(prompt, PROMPT)
    after = _messages(completion, COMPLETION)
    return Conversation(messages=(*before, *after), first=len(before), tools=tools)


def _messages(found: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise BadRow(f"{key!r} is no list of messages")
    for i, message in enumerate(found):
        if not isinstance(message, dict):
            raise BadRow(f"{key}[{i}] is no object with a role and its content")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                there = ", ".join(map(str, message)) or "none"
                raise BadRow(f"{key}[{i}] has no text {name!r} (keys: {there})")
        if message["role"] not in ROLES:
            raise BadRow(f"{key}[{i}] has the role {message['role']!r}; there are {', '.join(ROLES)}")
    return tuple(found)

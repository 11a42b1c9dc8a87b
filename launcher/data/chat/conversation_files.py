"""Reads conversations, or prompts and completions, from JSON lines, Parquet and Arrow files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from launcher.data.file_kinds import BadFile
from launcher.data.prepare.corpus_formats import CorpusFile, corpus_file, named, packing_errors, unpacked
from launcher.data.prepare.tables import columns, records
from launcher.job.schema.data import Chat, Paths

SHIPPED = Path(__file__).parents[1] / "text" / "conversations.jsonl"
LONGEST = 8 << 20
"""The maximum length of a row, in bytes."""
MESSAGES, PROMPT, COMPLETION, TOOLS, CALLS = "messages", "prompt", "completion", "tools", "tool_calls"
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
"""The allowed roles. Another role may be a misspelled one, whose message would not be trained on."""
READ = "JSON lines (.jsonl, also .gz and .zst), .parquet and .arrow"
FORMS = f"a row must have {MESSAGES!r}, or {PROMPT!r} and {COMPLETION!r}"

Message = Mapping[str, Any]


class BadRow(ValueError):
    """Raised for a row that cannot be trained on; the text says why."""


class OtherForm(BadRow):
    """Raised for a row of ShareGPT or Alpaca form. One line of Python converts all rows of its file."""

    def __init__(self, form: str, messages: str) -> None:
        self.form, self.messages = form, messages
        super().__init__(f"a row in {form} form; {FORMS}")

    def advice(self, path: Path) -> str:
        """Says how to convert ``path``, with a command to paste if it is a ``.jsonl`` file."""
        rows, opened = "map(json.loads, sys.stdin)", f" < {quote(str(path))}"
        if path.suffix != ".jsonl":
            return f"{self}: rewrite each row r as {{'messages': {self.messages}}}"
        new = f"{path.stem}-messages.jsonl"
        code = f"[print(json.dumps({{'messages': {self.messages}}})) for r in {rows}]"
        command = f'python -c "import json, sys; {code}"{opened} > {quote(new)}'
        return f"{self}; this command converts the file to {new}: {command}"


_ROLES = "{'human': 'user', 'gpt': 'assistant'}"
_SHAREGPT = (
    f"[{{'role': {_ROLES}.get(m['from'], m['from']), 'content': m['value']}} for m in r['conversations']]"
)
_QUESTION = "(r['instruction'] + chr(10) + r.get('input', '')).strip()"
_ALPACA = f"[{{'role': 'user', 'content': {_QUESTION}}}, {{'role': 'assistant', 'content': r['output']}}]"


def _other_form(keys: Collection[str]) -> OtherForm | None:
    if "conversations" in keys:
        return OtherForm("ShareGPT", _SHAREGPT)
    if {"instruction", "output"} <= {*keys}:
        return OtherForm("Alpaca", _ALPACA)
    return None


@dataclass(frozen=True)
class Conversation:
    """The ``messages`` of a conversation, or a ``prompt`` and its ``completion``.

    Messages before index ``first`` are not trained on. ``tools`` are the functions that the assistant may
    call, in the form that templates expect.
    """

    messages: tuple[Message, ...] = ()
    first: int = 0
    prompt: str = ""
    completion: str = ""
    tools: Sequence[Any] | None = None


@dataclass(frozen=True)
class DataRow:
    """A line of a file, or a row of a table as a mapping of its columns.

    ``place`` is FILE:LINE, or FILE: row NUMBER for a table. ``file`` is the index of its file. ``offset`` is
    the number of unpacked bytes up to the end of this line; it is 0 for a table. ``nbytes`` is the size
    of the row: that of the line, or about that of the texts of the table's row. A table's row of more than
    ``LONGEST`` has no data.
    """

    place: str
    data: bytes | Mapping[str, Any]
    file: int = 0
    offset: int = 0
    nbytes: int = 0


def files(paths: Paths | None) -> list[CorpusFile]:
    """Returns the files of conversations at ``paths``; ``None`` means the file that ships with launcher.

    Raises ``BadFile``, naming the path, for a file without conversations, and ``OSError``.
    """
    out = []
    for path in [SHIPPED] if paths is None else named(paths, "auto"):
        try:
            file = corpus_file(path, "auto")
            if file.form == "text":
                raise BadFile(f"its name is that of a text file; conversations are read from {READ}")
            if file.form != "jsonl":
                _columns(file)
        except BadFile as error:
            raise BadFile(f"{path}: {error}") from error
        out.append(file)
    return out


def _columns(file: CorpusFile) -> list[str]:
    """Returns the columns of a table to read. Raises ``BadFile`` if a required column is missing."""
    present = columns(file)
    if MESSAGES not in present and not {PROMPT, COMPLETION} <= {*present}:
        other = _other_form(present)
        text = "" if other is None else f"; {other.advice(file.path)}"
        raise BadFile(f"{FORMS} (columns: {', '.join(present)}){text}")
    return [name for name in (MESSAGES, PROMPT, COMPLETION, TOOLS) if name in present]


def read_rows(settings: Chat, paths: Paths | None) -> Iterator[DataRow]:
    """Yields the rows of all files at ``paths``, without empty lines. Raises ``BadFile``."""
    for which, file in enumerate(files(paths)):
        yield from _lines(file, which) if file.form == "jsonl" else _table_rows(file, which)


def _table_rows(file: CorpusFile, which: int) -> Iterator[DataRow]:
    for number, record in enumerate(records(file, _columns(file)), 1):
        record_values = {name: value for name, value in record.items() if value is not None}
        size = _size(record_values)
        if size > LONGEST:
            record_values = {}
        yield DataRow(f"{file.path}: row {number}", record_values, which, nbytes=size)


def _lines(file: CorpusFile, which: int) -> Iterator[DataRow]:
    try:
        with unpacked(file) as stream:
            offset = 0
            for number, line in enumerate(iter(lambda: stream.readline(LONGEST + 1), b""), 1):
                offset += len(line)
                if line.strip():
                    yield DataRow(f"{file.path}:{number}", line, which, offset, len(line))
    except packing_errors() as error:
        raise BadFile(f"{file.path}: cannot be unpacked: {error}") from error


def _size(value: Any) -> int:
    """Returns about the number of bytes of a table's value, as the number of its characters and entries."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(name) + _size(entry) for name, entry in value.items())
    return 1 + sum(map(_size, value)) if isinstance(value, list) else 1


def conversation_of(row: DataRow) -> Conversation:
    """Parses the data of a row. Raises ``BadRow``."""
    if row.nbytes > LONGEST:
        raise BadRow(f"the row has more than {LONGEST >> 20} MB")
    return conversation(row.data)


def conversation(data: bytes | Mapping[str, Any]) -> Conversation:
    """Parses a line of JSON, or a row as a mapping. Raises ``BadRow``."""
    row = _object(data) if isinstance(data, bytes) else data
    tools = row.get(TOOLS) or None
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"{TOOLS!r} is not a list")
    if MESSAGES in row:
        return Conversation(messages=_messages(row[MESSAGES], MESSAGES), tools=tools)
    if PROMPT not in row or COMPLETION not in row:
        if (other := _other_form(row)) is not None:
            raise other
        keys = ", ".join(map(str, list(row)[:8])) or "none"
        raise BadRow(f"{FORMS} (keys: {keys})")
    prompt, completion = row[PROMPT], row[COMPLETION]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(prompt=prompt, completion=completion)
    before = _messages(prompt, PROMPT)
    after = _messages(completion, COMPLETION)
    return Conversation(messages=(*before, *after), first=len(before), tools=tools)


def _object(line: bytes) -> Mapping[str, Any]:
    """Parses a line of JSON. Raises ``BadRow`` if it is not an object."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRow(f"byte {error.start} of the line is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON within limits: too deep, or a number too long") from error
    if not isinstance(row, dict):
        raise BadRow(f"not a JSON object; {FORMS}")
    return row


def _messages(messages: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadRow(f"{key!r} is not a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRow(f"{key}[{i}] is not an object with a role and its content")
        for name in ("role", "content"):
            called = name == "content" and message.get(CALLS) and message.get(name) is None
            if not called and not isinstance(message.get(name), str):
                keys = ", ".join(map(str, message)) or "none"
                raise BadRow(f"{key}[{i}] has no text {name!r} (keys: {keys})")
        if message["role"] not in ROLES:
            raise BadRow(f"{key}[{i}] has the role {message['role']!r}; roles are {', '.join(ROLES)}")
    return tuple(messages)

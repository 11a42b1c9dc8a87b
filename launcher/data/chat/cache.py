"""The tokens of conversations, made by one process before the ranks start, and kept for later starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import jinja2
import numpy as np
import tokenizers
import xxhash

from launcher.data.chat.conversations import Row, files, rows
from launcher.data.chat.encode import LabelledRows, tasks
from launcher.data.chat.tokenizer import CONFIG, TEMPLATE
from launcher.data.chat.tokens import ChatTokens, Counts
from launcher.data.files.bad_file import BadFile
from launcher.data.prepare import shards
from launcher.data.prepare.blocks import Position
from launcher.data.prepare.prepare import content_digest, writing
from launcher.data.prepare.shards import Progress
from launcher.data.prepare.speed import Speed
from launcher.data.prepare.workers import cores, workers
from launcher.errors import RunError
from launcher.job.schema.components import Chat

VERSION = 3
"""The version of the cached tokens' format."""
PARTS = {"train": "path", "val": "val"}
ARRAYS: dict[str, type[np.generic]] = {"tokens": np.uint32, "counted": np.uint8, "ends": np.int64}
"""The files of a part, and the types of their numbers."""


def make(settings: Chat, say: Callable[[str], None], speed: Speed) -> None:
    """Tokenizes the conversations, unless they are cached.

    Raises ``RunError`` for a file that cannot be read or written.
    """
    if settings.cache is None:
        return
    final = _folder(settings)
    if shards.published(final) is not None:
        return
    folder = shards.working_folder(final)
    with writing(folder), shards.locked(folder, say):
        if shards.published(final) is not None:
            shards.leave(folder)
            return
        shards.empty(folder)
        try:
            said = _make(settings, folder, speed)
        except BadFile as error:
            raise RunError(f"data.path: {error}") from error
        say(f"data: {said}, as tokens, once: {final}")
        shards.publish(folder, final, {"version": VERSION, "conversations": said})


def opened(settings: Chat) -> dict[str, ChatTokens] | None:
    """Returns the cached tokens of each part, mapped into memory; ``None`` if they are not cached."""
    if settings.cache is None or shards.published(folder := _folder(settings)) is None:
        return None
    return {
        part: ChatTokens(*(np.memmap(_file(folder, part, name), kind, "r") for name, kind in ARRAYS.items()))
        for part in PARTS
        if _file(folder, part, "ends").exists()
    }


def _make(settings: Chat, folder: Path, speed: Speed) -> str:
    """Tokenizes every part into ``folder``; returns a summary for people."""
    said = []
    with workers(cores()) as crew:
        for part, field in PARTS.items():
            paths = getattr(settings, field)
            if part == "train" or paths is not None:
                speed.begin(files(paths), Progress())
                counts = _write(folder, part, crew.answers(tasks(settings, rows(settings, paths))), speed)
                said.append(counts.text() + (" held out" if part == "val" else ""))
    return "; ".join(said)


def _write(folder: Path, part: str, answers: Iterable[LabelledRows], speed: Speed) -> Counts:
    """Writes the answers in the order of the rows, whichever process encoded them. Raises ``BadFile``."""
    counts, size, before, last = Counts(), 0, 0, Row("", b"")
    with ExitStack() as stack:
        out = {name: stack.enter_context(_file(folder, part, name).open("wb")) for name in ARRAYS}
        for found in answers:
            if found.made is None:
                raise BadFile(found.refused)
            counts.add(found.counts)
            out["tokens"].write(found.made.tokens.tobytes())
            out["counted"].write(found.made.counted.tobytes())
            out["ends"].write((found.made.ends + size).tobytes())
            size += len(found.made.tokens)
            before += last.offset if found.last.file != last.file else 0
            last = found.last
            at = Position(last.file, last.offset)
            speed(Progress(at, documents=counts.conversations, tokens=size, nbytes=before + last.offset))
    counts.check()
    return counts


def _file(folder: Path, part: str, name: str) -> Path:
    return folder / f"{part}-{name}.bin"


def _folder(settings: Chat) -> Path:
    """The cache folder, named by a digest of everything that the tokens depend on.

    Reads the conversations and the tokenizer's files.
    """
    asked = settings.model_dump(include={"seq_len", "too_long", "on_bad", "tokenizer"})
    held = [] if settings.val is None else files(settings.val)
    read = [content_digest(file.path) for file in (*files(settings.path), *held)]
    beside: list[Path] = [Path(settings.template)] if settings.template is not None else []
    if settings.tokenizer_file is not None:
        path = Path(settings.tokenizer_file)
        beside += [path, *(p for p in (path.with_name(CONFIG), path.with_name(TEMPLATE)) if p.is_file())]
    read += [content_digest(path) for path in beside]
    made = [VERSION, tokenizers.__version__, jinja2.__version__, asked, len(held), read]
    assert settings.cache is not None
    return Path(settings.cache) / xxhash.xxh3_128_hexdigest(json.dumps(made).encode())

"""The tokens of conversations, made by one process before the ranks start, and kept for later starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jinja2
import numpy as np
import tokenizers
import xxhash

from launcher.data.chat.conversations import files
from launcher.data.chat.tokenizer import CONFIG, TEMPLATE, chat_tokenizer
from launcher.data.chat.tokens import ChatTokens, Counts, in_memory
from launcher.data.files.bad_file import BadFile
from launcher.data.prepare import shards
from launcher.data.prepare.prepare import content_digest, writing
from launcher.errors import RunError
from launcher.job.schema.components import Chat

VERSION = 2
"""Of what is made of conversations."""
PARTS = {"train": "path", "val": "val"}
ARRAYS = ("tokens", "counted", "ends")


def make(settings: Chat, say: Callable[[str], None]) -> None:
    """Unless they are there. Raises ``RunError`` for what cannot be read or written."""
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
            said = _make(settings, folder)
        except BadFile as error:
            raise RunError(f"data.path: {error}") from error
        say(f"data: {said}, as tokens, once: {final}")
        shards.publish(folder, final, {"version": VERSION, "conversations": said})


def opened(settings: Chat) -> dict[str, ChatTokens] | None:
    """What ``make`` has left, mapped into memory; ``None`` where it has not."""
    if settings.cache is None or shards.published(folder := _folder(settings)) is None:
        return None
    return {
        part: ChatTokens(*(np.load(folder / f"{part}-{name}.npy", mmap_mode="r") for name in ARRAYS))
        for part in PARTS
        if (folder / f"{part}-ends.npy").exists()
    }


def _make(settings: Chat, folder: Path) -> str:
    """In words, what it has become."""
    by = chat_tokenizer(settings)
    said = []
    for part, field in PARTS.items():
        paths = getattr(settings, field)
        if part == "val" and paths is None:
            continue
        counts = Counts()
        made = in_memory(settings, by, paths, counts)
        for name in ARRAYS:
            np.save(folder / f"{part}-{name}.npy", getattr(made, name))
        said.append(counts.text() + (" held out" if part == "val" else ""))
    return "; ".join(said)


def _folder(settings: Chat) -> Path:
    """By a digest of all that the tokens hang on. Reads the conversations, and the tokenizer's files."""
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

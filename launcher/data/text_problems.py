"""What can be wrong with a text file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.data import corpus
from launcher.errors import Problem
from launcher.job.models import Text

SHIPPED = "data.path=null"


def check_text(settings: Text) -> Iterator[Problem]:
    file = corpus.where(settings)
    try:
        with file.open("rb") as stream:
            empty = not stream.read(1)
    except OSError as error:
        yield Problem("data.path", f"{file}: {error.strerror}", SHIPPED)
        return
    if empty:
        yield Problem("data.path", f"{file}: the file is empty", SHIPPED)
        return
    yield from _windows(settings, file)
    if settings.tokenizer == "bpe":
        yield from _utf8(file)


def _windows(settings: Text, file: Path) -> Iterator[Problem]:
    """Counts bytes: with the byte tokenizer they are the tokens, with BPE there are no more tokens than bytes."""
    train, val = map(len, corpus.split(settings))
    window = f"a window takes data.seq_len={settings.seq_len} tokens and the next one"
    if train <= settings.seq_len:
        text = f"{file}: {train} bytes to train on (data.val_fraction={settings.val_fraction}) are too few: {window}"
        yield Problem("data.path", text, SHIPPED)
    elif settings.val_fraction and val <= settings.seq_len:
        text = f"{settings.val_fraction} of {file} is {val} bytes, too few: {window}"
        yield Problem("data.val_fraction", text, "data.val_fraction=0")


def _utf8(file: Path) -> Iterator[Problem]:
    try:
        file.read_bytes().decode()
    except UnicodeDecodeError as error:
        text = f"{file}: byte {error.start} is not UTF-8, which data.tokenizer=bpe needs"
        yield Problem("data.path", text, "data.tokenizer=bytes data.vocab_size=256")

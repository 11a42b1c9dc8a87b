"""What can be wrong with a text file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.data import corpus
from launcher.errors import Problem
from launcher.job.models import Text

SHIPPED = "data.path=null"
LEARNED = "data.tokenizer=bpe data.tokenizer_file=null"


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
    if settings.tokenizer != "bytes":
        yield from _utf8(settings, file)
    if settings.tokenizer_file is not None and (path := Path(settings.tokenizer_file)).is_file():
        yield from _tokenizer(path, settings.vocab_size)


def check_absent(settings: Text) -> Iterator[Problem]:
    """A tokenizer may come after the plan, from another machine: ``data.vocab_size`` says all that a plan needs."""
    if settings.tokenizer_file is not None and not Path(settings.tokenizer_file).is_file():
        yield Problem("data.tokenizer_file", f"{settings.tokenizer_file}: no such file", LEARNED)


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


def _tokenizer(path: Path, vocab_size: int) -> Iterator[Problem]:
    from launcher.data import bpe

    try:
        size = bpe.load(path).get_vocab_size()
    except ValueError as error:
        yield Problem("data.tokenizer_file", str(error), LEARNED)
        return
    if size > vocab_size:
        text = f"{vocab_size}: {path} has {size} tokens"
        yield Problem("data.vocab_size", text, f"data.vocab_size={size}")


def _utf8(settings: Text, file: Path) -> Iterator[Problem]:
    try:
        file.read_bytes().decode()
    except UnicodeDecodeError as error:
        text = f"{file}: byte {error.start} is not UTF-8, which data.tokenizer={settings.tokenizer} needs"
        yield Problem("data.path", text, "data.tokenizer=bytes data.vocab_size=256")

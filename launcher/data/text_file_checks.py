"""Checks that the file of ``data=text`` is plain text with room for a window."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from launcher.data import file_kinds, text_tokenizer
from launcher.data.file_kinds import file as nearby
from launcher.data.prepare.corpus_formats import TEXT_HEAD, not_text
from launcher.data.text_files import split, where
from launcher.errors import Problem
from launcher.job.schema.data import Text
from launcher.untrusted.files import irregular, opened
from launcher.untrusted.hub_name_hint import download_hint

LONGEST = 1 << 30  # the most bytes of a text that is read into memory; its tokens take four times as many
_PIECE = 1 << 16


def check_text(settings: Text) -> Iterator[Problem]:
    file = where(settings)
    try:
        with opened(file) as stream:
            start = stream.read(TEXT_HEAD)
    except OSError as error:
        text = f"{file}: {error.strerror}{download_hint(file, 'dataset')}"
        yield Problem("data.path", text, _meant("data.path", str(file)))
        return
    if not start:
        yield Problem("data.path", f"{file}: the file is empty")
        return
    if problem := _no_text(file, start):
        yield problem
        return

    # its content
    yield from _windows(settings, file)
    if settings.tokenizer != "bytes":
        yield from _utf8(settings, file)
    if settings.tokenizer_file is not None and (path := Path(settings.tokenizer_file)).is_file():
        yield from _tokenizer(path, settings.vocab_size)


def check_absent(settings: Text) -> Iterator[Problem]:
    """Checks that the tokenizer's file exists. Only a run needs it: a plan needs only ``data.vocab_size``."""
    key, path = "data.tokenizer_file", settings.tokenizer_file
    if path is not None and (kind := irregular(path)):
        yield Problem(key, f"{path}: {kind}")
    elif path is not None and (inside := text_tokenizer.inside(Path(path))) is not None:
        yield Problem(key, f"{path}: this is a folder; give a file", f"{key}={quote(str(inside))}")
    elif path is not None and not Path(path).is_file():
        yield Problem(key, f"{path}: no such file{download_hint(path, 'model')}", _meant(key, path))


def _no_text(file: Path, start: bytes) -> Problem | None:
    """Returns a problem if a file is not plain text: the model would be trained on its raw bytes."""
    kinds = (("name", file_kinds.kind_by_suffix(file)), ("first bytes", file_kinds.kind_by_start(start)))
    for how, kind in kinds:
        if kind is not None:
            text = f"{kind.kind} by its {how}, but data=text reads plain text"
            return Problem("data.path", f"{file}: {text}; {kind.way.format(file)}")
    reason = not_text(start)
    if reason is None:
        return None
    return Problem("data.path", f"{file}: {reason}; data=tokens reads prepared tokens")


def _windows(settings: Text, file: Path) -> Iterator[Problem]:
    """Checks that each part has room for a window. It counts bytes: BPE makes at most one token of each."""
    train, val = map(len, split(settings))
    counts = f"(data.seq_len={settings.seq_len}, and one for the last target)"
    window = f"a sample needs {settings.seq_len + 1} tokens {counts}"
    if train <= settings.seq_len:
        text = f"{train} bytes to train on (data.val_fraction={settings.val_fraction}) are too few"
        yield Problem("data.path", f"{file}: {text}: {window}")
    elif settings.val_fraction and val <= settings.seq_len:
        text = f"{settings.val_fraction} of {file} is {val} bytes, too few: {window}"
        yield Problem("data.val_fraction", text, _enough(settings, train + val))


def _enough(settings: Text, size: int) -> str:
    """Returns an override with the smallest share that has room for a window, if the rest has room too."""
    share = next((k / 100 for k in range(1, 100) if int(size * k / 100) > settings.seq_len + 1), 1.0)
    return f"data.val_fraction={share}" if size * (1 - share) > settings.seq_len + 1 else ""


def _meant(key: str, path: str) -> str:
    """Returns an override with an existing file of a similar name; empty if there is none."""
    near = nearby(path)
    return f"{key}={near}" if near and re.fullmatch(r"[\w./-]+", near, re.ASCII) else ""


def _tokenizer(path: Path, vocab_size: int) -> Iterator[Problem]:
    try:
        size = text_tokenizer.vocab_size(text_tokenizer.load(path))
    except ValueError as error:
        yield Problem("data.tokenizer_file", str(error))
        return
    if size > vocab_size:
        text = f"{vocab_size}: {path} has {size} tokens"
        yield Problem("data.vocab_size", text, f"data.vocab_size={size}")


def _utf8(settings: Text, file: Path) -> Iterator[Problem]:
    way = "data.tokenizer=bytes with data.vocab_size=256 reads any bytes"
    if (size := file.stat().st_size) > LONGEST:
        text = f"data.tokenizer={settings.tokenizer} reads at most {LONGEST}, all into memory"
        yield Problem("data.path", f"{file}: {size} bytes; {text}; {way}")
        return
    place = _first_other_byte(file)
    if place is not None:
        text = f"{file}: byte {place} is not UTF-8, which data.tokenizer={settings.tokenizer} needs"
        yield Problem("data.path", f"{text}; {way}")


def _first_other_byte(file: Path) -> int | None:
    """Returns the place of the first byte that is not UTF-8. Every rank looks, so it reads in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begin = 0
    with opened(file, LONGEST) as stream:
        while True:
            piece = stream.read(_PIECE)
            pending, _ = decoder.getstate()  # the first bytes of a character that the last piece cut
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                return begin - len(pending) + error.start
            if not piece:
                return None
            begin += len(piece)

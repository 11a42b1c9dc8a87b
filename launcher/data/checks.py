"""Checks of data that is named but not loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from launcher.data import file_checks, text_files
from launcher.data.file_checks import file as nearby
from launcher.data.mnist5k import check_mnist5k
from launcher.data.tokens.corpus import corpus
from launcher.errors import Problem
from launcher.job.schema.components import Chat, Cifar10, Data, Idx, ImageFolder, Mnist5k, Text, Tokens
from launcher.job.schema.job import Job
from launcher.optional import image_files, lacking
from launcher.untrusted.files import irregular, opened, read_bytes
from launcher.untrusted.hub import download_hint

LOOKED = 64 << 10  # bytes checked at the start of a file; a NUL among them means that it is not text
LONGEST = 1 << 30  # bytes of a text that is read whole; its tokens take four times as much


def check_text(settings: Text) -> Iterator[Problem]:
    file = text_files.where(settings)
    try:
        with opened(file) as stream:
            start = stream.read(LOOKED)
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

    # what is in it
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
    elif path is not None and (inside := text_files.inside(Path(path))) is not None:
        yield Problem(key, f"{path}: is a folder; this setting takes a file", f"{key}={quote(str(inside))}")
    elif path is not None and not Path(path).is_file():
        yield Problem(key, f"{path}: no such file{download_hint(path, 'model')}", _meant(key, path))


def _no_text(file: Path, start: bytes) -> Problem | None:
    """Reports a file that is not plain text: its bytes would be trained on unchanged."""
    for how, kind in (("name", file_checks.by_name(file)), ("first bytes", file_checks.by_start(start))):
        if kind is not None:
            text = f"{kind.kind} by its {how}, but data=text reads plain text"
            return Problem("data.path", f"{file}: {text}; {kind.way.format(file)}")
    at = start.find(0)
    if at < 0:
        return None
    text = f"byte {at} is NUL, so it is not plain text: write the text to a UTF-8 file first"
    return Problem("data.path", f"{file}: {text}; data=tokens reads tokens that were prepared")


def _windows(settings: Text, file: Path) -> Iterator[Problem]:
    """Checks that the data has room for a window, counting bytes: BPE makes no more tokens than that."""
    train, val = map(len, text_files.split(settings))
    window = f"a window takes data.seq_len={settings.seq_len} tokens plus one"
    if train <= settings.seq_len:
        text = f"{train} bytes to train on (data.val_fraction={settings.val_fraction}) are too few"
        yield Problem("data.path", f"{file}: {text}: {window}")
    elif settings.val_fraction and val <= settings.seq_len:
        text = f"{settings.val_fraction} of {file} is {val} bytes, too few: {window}"
        yield Problem("data.val_fraction", text, _enough(settings, train + val))


def _enough(settings: Text, size: int) -> str:
    """The smallest share, in hundredths, that holds a window, if the rest does too."""
    share = next((k / 100 for k in range(1, 100) if int(size * k / 100) > settings.seq_len + 1), 1.0)
    return f"data.val_fraction={share}" if size * (1 - share) > settings.seq_len + 1 else ""


def _meant(key: str, path: str) -> str:
    """An override with an existing file of a similar name."""
    near = nearby(path)
    return f"{key}={near}" if near and re.fullmatch(r"[\w./-]+", near, re.ASCII) else ""


def _tokenizer(path: Path, vocab_size: int) -> Iterator[Problem]:
    try:
        size = text_files.load(path).get_vocab_size()
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
    try:
        read_bytes(file, LONGEST).decode()
    except UnicodeDecodeError as error:
        text = f"{file}: byte {error.start} is not UTF-8, which data.tokenizer={settings.tokenizer} needs"
        yield Problem("data.path", f"{text}; {way}")


def with_data_read(job: Job) -> Job:
    """Returns ``job`` with the data that will actually be read."""
    return job.model_copy(update={"data": resolve(job.data)[0]})


def resolve(settings: Data) -> tuple[Data, str | None]:
    """Returns the data that will be read, and a note if they are not those named.

    Checks only whether ``root`` exists.
    """
    if not isinstance(settings, Cifar10) or settings.fallback == "none" or Path(settings.root).exists():
        return settings, None
    note = (
        f"data cifar10 -> mnist5k: there is no {settings.root} (data.root), and data.fallback=mnist5k; "
        "real digits, padded to 32 x 32 pixels in 3 channels"
    )
    return Mnist5k(name="mnist5k", size=32, channels=3), note


def check(settings: Data) -> list[Problem]:
    """Every problem with the named files. Random tokens and a user's own class have none."""
    settings, _ = resolve(settings)
    if isinstance(settings, Idx | Cifar10 | ImageFolder) and (lacks := lacking("image_files", "data")):
        return lacks
    match settings:
        case Text():
            return list(check_text(settings))
        case Mnist5k():
            return list(check_mnist5k(settings))
        case Idx():
            return list(image_files.check_idx(settings))
        case Cifar10():
            return list(image_files.check_cifar10(settings))
        case ImageFolder():
            return list(image_files.check_images(settings))
        case Tokens():
            return corpus(settings)[1]
        case Chat():
            from launcher.data.chat.tokens import check_chat  # imports jinja2, which takes 80 ms

            return list(check_chat(settings))
        case _:
            return []


def absent(settings: Data) -> list[Problem]:
    """Problems with files that a run reads and a plan does not need."""
    return list(check_absent(settings)) if isinstance(settings, Text) else []

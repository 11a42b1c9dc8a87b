"""Tries an untrusted tokenizer in a child process, and turns errors of the tokenizer library into ours.

A ``tokenizer.json`` has patterns that may backtrack without end, and replacements that may turn a character
into gigabytes. The trial shows most of these before anything starts.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from operator import itemgetter
from pathlib import Path

from tokenizers import Tokenizer

from launcher.data.limited_child import ChildFailed, LimitExceeded, in_child
from launcher.errors import RunError, printable
from launcher.untrusted.files import brief, read_bytes

LONGEST = 64 << 20  # bytes of a tokenizer file; the file of Gemma 3, with 262 000 tokens, has half as many
SECONDS, ROOM = 10, 1 << 30
"""The processor time in seconds and the memory in bytes that a trial may take, including the loading."""
MOST = 64
"""The most characters, or tokens, that a character may become. In Unicode U+FDFA becomes the most, 18."""
IDS = 1 << 31
"""The number of possible ids: tokens are signed 32-bit integers."""
REPEATED = 200
SHOWN = 200
CHARACTERS = (*string.printable, *"éßАα中あ한😀ﷺ\u0301\u200d\xa0\ufffd")
TEXTS = (
    *(f"{c * REPEATED}{end}" for c in "aA0 \n.-_é中" for end in ("", "!")),
    "The quick brown fox, aged 12, can't jump\n\n  over 3.14 lazy dogs: déjà vu!\r\n\tfor i in f(9): x += 1",
)


class TokenizerError(RunError):
    """The tokenizer library failed on a text or on tokens."""


class Unusable(ValueError):
    """The file is a tokenizer that fails the trial. The text has the file and the reason."""


@contextmanager
def native_errors(what: object) -> Iterator[None]:
    """Turns errors of the tokenizer library into ``TokenizerError``, which names ``what``."""
    try:
        yield
    except BaseException as error:
        if not is_native(error):
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        raise TokenizerError(f"{what}: the tokenizer fails: {printable(lines[0][:SHOWN])}") from error


def is_native(error: BaseException) -> bool:
    """Returns true for an error that the tokenizer library may raise.

    A panic of its Rust code is no ``Exception``, and has no public class.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def check(path: Path) -> None:
    """Raises ``Unusable`` if the trial fails, and ``OSError``. A file that has not changed is tried once."""
    status = path.stat()
    if reason := _tried(str(path), status.st_ino, status.st_size, status.st_mtime_ns):
        raise Unusable(f"{path}: it cannot be used as a tokenizer: {reason}")


@lru_cache(maxsize=16)
def _tried(path: str, *_: int) -> str:
    try:
        return in_child(try_out, path, module=__name__, seconds=SECONDS, nbytes=ROOM)
    except (LimitExceeded, ChildFailed) as error:
        return f"on short texts {error}"


def try_out(path: str) -> str:
    """Encodes and decodes short texts; returns why the tokenizer must not be used, or an empty text."""
    try:
        data = read_bytes(path, LONGEST)
        with native_errors("it"):
            tokenizer = Tokenizer.from_buffer(data)
    except OSError:
        return ""  # the code that reads it reports this
    except TokenizerError as error:
        return "" if isinstance(error.__cause__, Exception) else _reason(error)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    token, last = max(vocabulary.items(), key=itemgetter(1), default=("", 0))
    if last >= IDS:
        return f"its token {brief(token)} has the id {last}; ids must be below {IDS}"
    try:
        with native_errors("it"):
            for text in (*CHARACTERS, *TEXTS):
                if reason := _too_much(tokenizer, text):
                    return reason
    except TokenizerError as error:
        return _reason(error)
    return ""


def _too_much(tokenizer: Tokenizer, text: str) -> str:
    """Returns the problem if ``text`` becomes too many tokens or characters; otherwise an empty text."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    normalizer = tokenizer.normalizer
    sizes = {"tokens": len(ids), "decoded characters": len(tokenizer.decode(ids, skip_special_tokens=False))}
    if normalizer is not None:
        sizes["characters"] = len(normalizer.normalize_str(text))
    for what, size in sizes.items():
        if size > MOST * max(len(text), len(ids) if what == "decoded characters" else 0):
            short = f"the character {text!r}" if len(text) == 1 else f"a text of {len(text)} characters"
            return f"{short} becomes {size} {what}"
    return ""


def _reason(error: TokenizerError) -> str:
    return str(error).removeprefix("it: ")

"""Problems as values that name the key, the reason and the way out, and the errors that carry them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

DONE, FAILED, REFUSED, REQUEUE, INTERRUPTED = 0, 1, 2, 75, 130
"""What a command ends with; one that a signal has stopped with the ``code`` of its ``Interrupted``."""

_SHOWN = 80
"""Characters of a line of source."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a request.

    ``key`` is the dotted configuration key to change ("" when no single key is to blame), ``text`` says what
    is wrong, ``cure`` is what to paste instead: of ``words``, where arguments are to blame that set no key,
    else of what set the key.
    """

    key: str
    text: str
    cure: str = ""
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        line = f"{self.key}: {self.text}" if self.key else self.text
        return f"{line} (try: {self.cure})" if self.cure else line


class RequestError(ValueError):
    """The request cannot be carried out: nothing was started, nothing written. Exit code 2.

    ``planned``: a plan was begun when it was found, so torch is imported.
    """

    planned = False

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = tuple(dict.fromkeys(problems))  # two checks may see the same
        super().__init__("\n".join(map(str, self.problems)))


class RequestTypeError(RequestError, TypeError):
    """A value of the request has the wrong type."""


class RequestKeyError(RequestError, KeyError):
    """A file of operator strategies cannot be called so; MindSpore raises a ``KeyError``."""

    def __str__(self) -> str:
        return ValueError.__str__(self)  # a KeyError shows the repr of its text


class RunError(RuntimeError):
    """It failed while running. Exit code 1. The message names the root cause first."""


def printable(text: str, keep: str = "") -> str:
    """What a file says, its control characters as escapes, except those in ``keep``: no terminal obeys them.

    >>> printable("a\\n\\x1b[31mb é")
    'a\\\\n\\\\x1b[31mb é'
    """

    def shown(c: str) -> str:
        return c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()

    return "".join(map(shown, text))


def said(error: Exception) -> str:
    """What an error says; of one of the system's the file and the reason.

    >>> said(PermissionError(13, "Permission denied", "a/b"))
    'a/b: Permission denied'
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@lru_cache(1)
def _others() -> tuple[str, ...]:
    """Where code is that is not the user's: ours, Python's, installed packages."""
    import sysconfig  # reads how Python was built, which nobody needs who is not told of an error

    ours = os.path.dirname(os.path.abspath(__file__)) + os.sep
    return (ours, "<", *(path for name, path in sysconfig.get_paths().items() if name.endswith("lib")))


def of_users(error: BaseException) -> str:
    """What an error of the user's own code says, and the last line of it that ran: file, function, source."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said_so = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith(_others()):
        return f"{type(error).__name__}: {error.msg} ({_line(error.filename, error.lineno, '', error.text)})"
    own = users_frame(error)
    return f"{said_so} ({_line(own.filename, own.lineno, own.name, own.line)})" if own else said_so


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The last line of the user's own code that ran before ``error``, if any did."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f for f in reversed(frames) if not f.filename.startswith(_others())), None)


def _line(path: str, line: int | None, function: str, source: str | None) -> str:
    there = f", in {function}" if function and not function.startswith("<") else ""
    text = (source or "").strip()
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN - 4].rstrip()} ..."
    shown = f": {text}" if text else ""
    return f"{os.path.basename(path)}:{line}{there}{shown}"


@contextmanager
def owned(key: str, what: str) -> Iterator[None]:
    """What the user's code raises inside becomes a ``RequestError`` about ``key``, without our frames."""
    try:
        yield
    except (RequestError, RunError):
        raise
    except (Exception, SystemExit) as error:
        raise RequestError((Problem(key, f"{what}: {of_users(error)}"),)) from None


def refuse(found: Sequence[Problem]) -> None:
    """Raises ``RequestError`` if there is any."""
    if found:
        raise RequestError(tuple(found))


@contextmanager
def problems() -> Iterator[list[Problem]]:
    """Collect every complaint made in the block, then raise them all at once.

    >>> with problems() as found:
    ...     found.append(Problem("train.steps", "0 is not positive"))
    Traceback (most recent call last):
    launcher.errors.RequestError: train.steps: 0 is not positive
    """
    found: list[Problem] = []
    yield found
    if found:
        raise RequestError(tuple(found))

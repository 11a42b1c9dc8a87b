"""Problems, each with a key, a reason and a way out, and the errors that carry them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

DONE, FAILED, REFUSED, REQUEUE, INTERRUPTED = 0, 1, 2, 75, 130
"""Exit codes of commands. A command stopped by a signal ends with the ``code`` of its ``Interrupted``."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a request.

    ``key`` is the dotted configuration key to change ("" when no single key is to blame). ``text`` says what
    is wrong. ``cure`` is the text to paste instead. ``words`` are arguments that set no key: if there are
    any, the cure replaces them, otherwise whatever set ``key``.
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

    ``planned``: the problem was detected after planning began, so torch is imported.
    """

    planned = False

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = tuple(dict.fromkeys(problems))  # two checks may report the same problem
        super().__init__("\n".join(map(str, self.problems)))


class RequestTypeError(RequestError, TypeError):
    """A value of the request has the wrong type."""


class RequestKeyError(RequestError, KeyError):
    """A file of operator strategies has an unsupported name; MindSpore raises a ``KeyError`` for it."""

    def __str__(self) -> str:
        return ValueError.__str__(self)  # a KeyError shows the repr of its text


class RunError(RuntimeError):
    """The run failed after it had started. Exit code 1. The message names the root cause first."""


def printable(text: str, keep: str = "") -> str:
    """Returns ``text`` with control characters escaped, except ``keep``, so that no terminal obeys them.

    >>> printable("a\\n\\x1b[31mb é")
    'a\\\\n\\\\x1b[31mb é'
    """

    def shown(c: str) -> str:
        return c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()

    return "".join(map(shown, text))


def error_text(error: Exception) -> str:
    """Returns the message of an error; for an error of the operating system the file and the reason.

    >>> error_text(PermissionError(13, "Permission denied", "a/b"))
    'a/b: Permission denied'
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def refuse(problems: Sequence[Problem]) -> None:
    """Raises ``RequestError`` if there are any problems."""
    if problems:
        raise RequestError(tuple(problems))


@contextmanager
def collecting_problems() -> Iterator[list[Problem]]:
    """Collects the problems that the block appends, then raises them all at once as a ``RequestError``.

    >>> with collecting_problems() as problems:
    ...     problems.append(Problem("train.steps", "0 is not positive"))
    Traceback (most recent call last):
    launcher.errors.RequestError: train.steps: 0 is not positive
    """
    problems: list[Problem] = []
    yield problems
    if problems:
        raise RequestError(tuple(problems))

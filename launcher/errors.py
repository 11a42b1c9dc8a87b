"""Problems, each with a key, a reason and a way out, and the errors that carry them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

DONE, FAILED, REFUSED, REQUEUE, INTERRUPTED = 0, 1, 2, 75, 130
"""Exit codes of commands. A command stopped by a signal ends with the ``code`` of its ``Interrupted``."""

_SHOWN = 80
"""Most characters of a source line that a message quotes."""

_ADVICE = (
    ("Boolean value of Tensor", "decide by its .any() or .all(), or choose by element with torch.where"),
    ("a leaf Variable that requires grad", "compute a new tensor, or change it in torch.no_grad()"),
    ("index out of range in self", "an embedding takes ids from 0 to its num_embeddings - 1"),
    ("does not require grad", "detach(), .data and torch.no_grad() cut a tensor off from its gradient"),
    ("must have same reduction dim", "the last dim of a layer's input is its in_features"),
    ("shapes cannot be multiplied", "the last dim of a layer's input is its in_features"),
    ("Torch not compiled with", "create tensors on the device of another one, as with device=x.device"),
    ("on the same device", "create tensors on the device of another one, as with device=x.device"),
    ("not on the expected device", "create tensors on the device of another one, as with device=x.device"),
    ("same dtype", "create tensors with the dtype of another one, as in w.to(x.dtype)"),
    ("expected scalar type", "create tensors with the dtype of another one, as in w.to(x.dtype)"),
)
"""What users can do about torch's most frequent errors, each known by a part of its message."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a request.

    ``key`` is the dotted configuration key to change ("" when no single key is to blame). ``text`` says what
    is wrong. ``cure`` is the text to paste instead: it replaces ``words`` if the problem is in arguments that
    set no key, else whatever set the key.
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
    """An unsupported name for a file of operator strategies; MindSpore raises a ``KeyError`` there."""

    def __str__(self) -> str:
        return ValueError.__str__(self)  # a KeyError shows the repr of its text


class RunError(RuntimeError):
    """The run failed after it had started. Exit code 1. The message names the root cause first."""


def printable(text: str, keep: str = "") -> str:
    """``text`` with control characters escaped, except those in ``keep``, so that no terminal obeys them.

    >>> printable("a\\n\\x1b[31mb é")
    'a\\\\n\\\\x1b[31mb é'
    """

    def shown(c: str) -> str:
        return c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()

    return "".join(map(shown, text))


def error_text(error: Exception) -> str:
    """The message of an error; for an error of the operating system the file and the reason.

    >>> error_text(PermissionError(13, "Permission denied", "a/b"))
    'a/b: Permission denied'
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@lru_cache(1)
def _others() -> tuple[str, ...]:
    """Path prefixes of code that is not the user's: the launcher, Python, installed packages."""
    import sysconfig  # reads how Python was built, which only error messages need

    ours = os.path.dirname(os.path.abspath(__file__)) + os.sep
    return (ours, "<", *(path for name, path in sysconfig.get_paths().items() if name.endswith("lib")))


def user_error(error: BaseException, cure: str = "") -> str:
    """The message of an error in user code, the last line of it that ran, and a cure.

    Of the message only the first line: torch may add frames of its own. Of the line of code the file, the
    function and the source. Without a ``cure`` the usual one of an error of torch that many users get.
    """
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said_so = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith(_others()):
        return f"{type(error).__name__}: {error.msg} ({_line(error.filename, error.lineno, '', error.text)})"
    own = users_frame(error)
    where = f" ({_line(own.filename, own.lineno, own.name, own.line)})" if own else ""
    cure = cure or next((usual for part, usual in _ADVICE if part in text), "")
    return f"{said_so}{where}; {cure}" if cure else f"{said_so}{where}"


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The last line of the user's code that ran before ``error``, if any did."""
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
def owned(key: str, action: str) -> Iterator[None]:
    """Turns exceptions of user code in the block into a ``RequestError`` about ``key`` without our frames."""
    try:
        yield
    except (RequestError, RunError):
        raise
    except (Exception, SystemExit) as error:
        raise RequestError((Problem(key, f"{action}: {user_error(error)}"),)) from None


def refuse(problems: Sequence[Problem]) -> None:
    """Raises ``RequestError`` if there are any problems."""
    if problems:
        raise RequestError(tuple(problems))


@contextmanager
def problems() -> Iterator[list[Problem]]:
    """Collects the problems that the block appends, then raises them all at once as a ``RequestError``.

    >>> with problems() as found:
    ...     found.append(Problem("train.steps", "0 is not positive"))
    Traceback (most recent call last):
    launcher.errors.RequestError: train.steps: 0 is not positive
    """
    problems: list[Problem] = []
    yield problems
    if problems:
        raise RequestError(tuple(problems))

"""Errors in the code of users: their message, the line that raised them, and a cure."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from launcher.errors import Problem, RequestError, RunError

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
"""Cures of torch's most frequent errors, each recognized by a part of its message."""


@lru_cache(1)
def _others() -> tuple[str, ...]:
    """Returns path prefixes of code that is not the user's: the launcher, Python, installed packages."""
    import sysconfig  # reads how Python was built, which only error messages need

    ours = os.path.dirname(os.path.abspath(__file__)) + os.sep
    return (ours, "<", *(path for name, path in sysconfig.get_paths().items() if name.endswith("lib")))


def user_error(error: BaseException, cure: str = "") -> str:
    """Returns the message of an error in user code, the last line of that code that ran, and a cure.

    The message is cut to its first line: torch may add frames of its own. The line of code is shown with its
    file, function and source. Without ``cure``, a frequent error of torch has the cure in ``_ADVICE``.
    """
    described = first_line(error)
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith(_others()):
        return f"{type(error).__name__}: {error.msg} ({_line(error.filename, error.lineno, '', error.text)})"
    own = users_frame(error)
    where = f" ({_line(own.filename, own.lineno, own.name, own.line)})" if own else ""
    cure = cure or next((usual for part, usual in _ADVICE if part in described), "")
    return f"{described}{where}; {cure}" if cure else f"{described}{where}"


def first_line(error: BaseException) -> str:
    """Returns the kind of an error, and the first line of its message if it has one."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the last line of the user's code that ran before ``error``, if any did."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((f for f in reversed(frames) if not f.filename.startswith(_others())), None)


def _line(path: str, line: int | None, function: str, source: str | None) -> str:
    there = f", in {function}" if function and not function.startswith("<") else ""
    text = (source or "").strip()
    if text.startswith("raise ") and text.endswith("("):  # its message is on the next lines
        text = ""
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN - 4].rstrip()} ..."
    shown = f": {text}" if text else ""
    return f"{os.path.basename(path)}:{line}{there}{shown}"


@contextmanager
def owned(key: str, action: str, describe: Callable[[BaseException], str] = user_error) -> Iterator[None]:
    """Turns exceptions of user code in the block into a ``RequestError`` about ``key`` without our frames."""
    try:
        yield
    except (RequestError, RunError):
        raise
    except (Exception, SystemExit) as error:
        raise RequestError((Problem(key, f"{action}: {describe(error)}"),)) from None

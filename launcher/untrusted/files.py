"""Reads files that others made, within bounds and without following links."""

from __future__ import annotations

import errno
import gc
import json
import os
import reprlib
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

LONGEST_TEXT = 32 << 20
"""The most bytes of a file that lists tensors or settings: twice what the largest published model needs.

That model is Kimi K2: each of its 140 000 tensors takes 100 to 140 bytes in the index and in the headers.
"""
DIMS = 64  # the most dims that a tensor may have, the limit of torch and numpy
DEPTH = 64
"""The most levels that JSON may nest; no format that is read here has more than ten."""
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2
_BRIEF.maxlong = _BRIEF.maxstring


class RefusedFile(OSError, ValueError):
    """Raised for a file that is not read: ``filename`` is its path, ``strerror`` the reason."""

    def __init__(self, path: object, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"

    def __reduce__(self) -> tuple[type[RefusedFile], tuple[str, str]]:
        return RefusedFile, (str(self.filename), str(self.strerror))


def irregular(path: str | os.PathLike[str]) -> str | None:
    """Describes what is at ``path`` if it is a pipe, a socket or a device; ``None`` for anything else."""
    try:
        return _kind(os.stat(path).st_mode)
    except (OSError, ValueError):
        return None


def stands(path: str | os.PathLike[str]) -> bool:
    """Returns true if ``path`` is a file, or a pipe, socket or device, which ``opened`` refuses."""
    return os.path.isfile(path) or irregular(path) is not None


def check(path: str | os.PathLike[str], most: int | None = None) -> None:
    """Opens the file and closes it again; raises as ``opened`` does."""
    opened(path, most).close()


def opened(path: str | os.PathLike[str], most: int | None = None) -> BinaryIO:
    """Opens a file for reading.

    Raises ``OSError``, also if it is not a regular file or has more than ``most`` bytes.
    """
    _check_kind(path, os.stat(path).st_mode)  # before opening it: opening a device can have side effects
    return _regular(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), most)


def _regular(path: str | os.PathLike[str], fd: int, most: int | None) -> BinaryIO:
    """Returns the file of the descriptor ``fd``; closes it and raises as ``opened`` does."""
    try:
        status = os.fstat(fd)  # again: the file may have been replaced since
        _check_kind(path, status.st_mode)
        if most is not None and status.st_size > most:
            raise RefusedFile(path, f"{status.st_size} bytes; at most {most} are read")
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_bytes(path: str | os.PathLike[str], most: int = LONGEST_TEXT) -> bytes:
    """Returns the content of the file. Raises as ``opened`` does."""
    with opened(path, most) as file:
        return _content(path, file, most)


def read_bytes_below(folder: Path, name: str, most: int = LONGEST_TEXT) -> bytes:
    """Returns the content of the file ``name`` of ``folder``.

    Raises as ``opened`` does, and ``RefusedFile`` if the file is a link.
    """
    path = folder / name
    mode = os.lstat(path).st_mode
    if not stat.S_ISLNK(mode):  # open_below says what a link is
        _check_kind(path, mode)
    with _regular(path, open_below(folder, name, os.O_RDONLY | os.O_NONBLOCK), most) as file:
        return _content(path, file, most)


def _content(path: str | os.PathLike[str], file: BinaryIO, most: int) -> bytes:
    size = os.fstat(file.fileno()).st_size
    data = file.read(size + 1)
    while len(data) > size:  # files below /proc report size 0, others may grow while they are read
        if len(data) > most:
            raise RefusedFile(path, f"more than {most} bytes; at most {most} are read")
        size = 2 * len(data)
        data += file.read(size - len(data) + 1)
    return data


def read_text(path: str | os.PathLike[str], most: int = LONGEST_TEXT) -> str:
    """Returns the file's text. Raises as ``opened`` does, and ``UnicodeDecodeError``."""
    return read_bytes(path, most).decode()


def read_json(path: str | os.PathLike[str], most: int = LONGEST_TEXT, *, unique: bool = False) -> Any:
    """Returns the file's JSON as a value. Raises as ``opened`` and ``parsed`` do."""
    return parsed(read_text(path, most), unique=unique)


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses Python's garbage collector in a block that makes many values without cycles.

    It would search all of them, and every module, again and again: with Python's own thresholds, reading
    200,000 names took three times as long. A command of the launcher collects rarely while it starts.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@without_collection()
def parsed(text: str | bytes, *, unique: bool = False, finite: bool = False) -> Any:
    """Parses JSON.

    Raises ``JSONDecodeError`` or ``UnicodeDecodeError`` if ``text`` is not JSON or is nested too deeply, and
    ``ValueError`` for a repeated key if ``unique``, for NaN or an infinity if ``finite``.
    """
    pairs = _once if unique else None
    constant = _none if finite else None
    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise json.JSONDecodeError("a number with more digits than Python reads", "", 0) from None

    # level by level: the parser may accept a nesting that is too deep for code that walks the value later
    level = [value] if _nests(value) else []
    for _ in range(DEPTH):
        if not level:
            return value
        level = [inner for outer in level for inner in _inside(outer) if _nests(inner)]
    raise _too_deep()


def brief(value: Any) -> str:
    """Returns the ``repr`` of a value from a file, shortened so that it fits in a message."""
    return _BRIEF.repr(value)


def _nests(value: Any) -> bool:
    return isinstance(value, dict | list)


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _too_deep() -> json.JSONDecodeError:
    return json.JSONDecodeError(f"nested deeper than {DEPTH} levels", "", 0)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice} is listed twice")
    return out


def _none(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _kind(mode: int) -> str | None:
    return next((f"{name}, not a regular file" for is_it, name in _KINDS if is_it(mode)), None)


def _check_kind(path: str | os.PathLike[str], mode: int) -> None:
    if kind := _kind(mode):
        raise RefusedFile(path, kind)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise RefusedFile(path, "not a regular file")


LINK = "a link, which is not followed: its target may belong to someone else; remove the link"


def open_below(
    folder: Path, name: str | os.PathLike[str], flags: int, mode: int = 0o666, *, opened: int | None = None
) -> int:
    """Opens the file ``name`` of ``folder`` and returns its descriptor. ``folder`` itself may be a link.

    ``opened``: a descriptor of ``folder``, which may have been moved since.
    Raises ``RefusedFile`` if the file, or a folder between ``folder`` and it, is a link.
    """
    path = Path(name)
    *above, last = path.parts
    fd = open_folder(folder) if opened is None else os.dup(opened)
    at = folder
    try:
        for part in above:
            at /= part
            fd, outer = open_entry(at, part, os.O_RDONLY | os.O_DIRECTORY, fd), fd
            os.close(outer)
        return open_entry(folder / path, last, flags, fd, mode)
    finally:
        os.close(fd)


def open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def open_entry(path: Path, name: str, flags: int, folder: int, mode: int = 0o666) -> int:
    """Opens the entry ``name`` of the open ``folder``, as ``open_below`` does. ``path`` is for its errors."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise RefusedFile(path, LINK) from error
        error.filename = str(path)
        raise


def links(folder: Path) -> Iterator[Path]:
    """Yields the links in ``folder`` and below; only ``folder`` itself if it is a link."""
    if folder.is_symlink():
        yield folder
        return
    try:
        entries = [*os.scandir(folder)]
    except NotADirectoryError:
        return
    for entry in entries:
        if entry.is_symlink():
            yield Path(entry.path)
        elif entry.is_dir(follow_symlinks=False):
            yield from links(Path(entry.path))

"""The folder of one run: creating it, reopening it, writing and reading its status."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.checkpoint.tensorfile.disk_space import FULL, Unwritten, told
from launcher.checkpoint.tensorfile.json_file import parsed, read_bytes
from launcher.errors import Problem, RequestError, RunError
from launcher.untrusted.files import TEXT, RefusedFile
from launcher.untrusted.links import LINK, links, open_below, open_folder

_log = logging.getLogger(__name__)


def check_writable(root: Path, key: str = "runs", what: str = "a run folder") -> Problem | None:
    """Why a folder cannot be created at ``root`` or below, if so; writes nothing."""
    there = root
    while (
        not os.path.lexists(there) and there != there.parent
    ):  # the loop also ends where the working directory is unreadable
        there = there.parent
    if os.path.lexists(there) and not there.is_dir():
        return _problem(key, root, f"{there} is not a folder", what)
    if not os.access(there, os.W_OK | os.X_OK):
        return _problem(key, root, f"{there} is not writable", what)
    return None


_NEW = os.O_WRONLY | os.O_CREAT
STATUS, NEXT_STATUS = "status.json", ".status.json"
STATUS_ROOM = 16 << 10  # bytes; a status with many figures needs a few thousand
FOLDERS = (
    "certify", "checkpoints", "drill", "errors", "exports", "graphs", "local_norm", "loggers", "logs",
    "profile", "strategy", "tensorboard", "tokens", "transformed",
)  # fmt: skip
FILES = (
    ".lock", ".secret", "certificate.json", "checkpoints/latest", "command.txt", "config.yaml", "drill.json",
    "job.sbatch", "job.yaml", "logs/console.log", "memory.svg", "metrics.csv", "metrics.jsonl", "plan.json",
    "plan.txt", "report.html", "request.yaml", "sky.yaml", STATUS, NEXT_STATUS, "timeline.json",
    "timeline.svg", "versions.json",
)  # fmt: skip

OTHERS = ("loggers",)
"""Folders in which other libraries write, and may create links."""


def check_entries(run: Path) -> Problem | None:
    """The problem of links, or of entries of the wrong type, where a run would write in ``run``."""
    folders = [run / name for name in FOLDERS if os.path.lexists(run / name)]
    files = [run / name for name in FILES if os.path.lexists(run / name)]
    found = list(dict.fromkeys(link for path in (*folders, *files) for link in _links(path)))
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        listed = ", ".join(map(str, found[:3]))
        return Problem("run_dir", f"{run} is no folder of a run: {listed}{more}: {LINK}")
    wrong = [f"{path} is not a folder" for path in folders if not path.is_dir()]
    wrong += [f"{path} is not a file" for path in files if not path.is_file()]
    return Problem("run_dir", f"{run} is no folder of a run: {'; '.join(wrong)}") if wrong else None


def _links(path: Path) -> Iterator[Path]:
    if path.name not in OTHERS:
        yield from links(path)
    elif path.is_symlink():
        yield path


def make(root: Path, name: str) -> Path:
    """Creates ``<root>/<name>/<NNNN>`` and points ``latest`` beside it to it.

    Runs that start at the same time get different folders.
    """
    with _refused("runs", root):
        home = root / name
        home.mkdir(parents=True, exist_ok=True)
        number = max((int(p.name) for p in home.iterdir() if p.name.isdecimal()), default=0) + 1
        while not _made(home / f"{number:04d}"):
            number += 1
    run = home / f"{number:04d}"
    _point(home / "latest", run.name)
    return run


def reopen(run_dir: Path) -> Path:
    """The folder that the user named, created if it does not exist."""
    with _refused("run_dir", run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    problem = check_writable(run_dir, "run_dir")
    if problem:
        raise RequestError((problem,))
    return run_dir


def write_command(run: Path, argv: Sequence[str]) -> None:
    """Appends this start's command to ``command.txt``, for a shell; later starts resumed the first."""
    path = run / "command.txt"
    line = shlex.join(argv) + "\n"
    with _refused("run_dir", run), told(path, len(line)):
        fd = open_below(run, path.name, _NEW | os.O_APPEND)
        with open(fd, "a", encoding="utf-8") as file:
            file.write(line)


def write_status(run: Path, opened: int | None = None, /, **fields: Any) -> None:
    """Replaces ``status.json`` atomically: a reader sees the old or the new one.

    Only one process may call it at a time. After ``reserve_status`` there is room for it even on a full disk.
    ``opened``: a descriptor of ``run``. With it the status follows a folder that was moved, and is not
    written into another folder that has taken its place.
    """
    data = (json.dumps(_digested(fields), indent=2) + "\n").encode()
    with told(run / STATUS, len(data)):
        at = open_folder(run) if opened is None else os.dup(opened)
    try:
        with (
            told(run / STATUS, len(data)),
            open(open_below(run, NEXT_STATUS, _NEW, opened=at), "wb") as file,
        ):
            file.write(data)
            file.truncate()
        os.replace(NEXT_STATUS, STATUS, src_dir_fd=at, dst_dir_fd=at)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(NEXT_STATUS, dir_fd=at)
        raise
    finally:
        os.close(at)


def reserve_status(run: Path, opened: int | None = None) -> None:
    """Reserves disk space for the next status, as far as possible: it must be written on a full disk too.

    ``opened``: a descriptor of ``run``, as for ``write_status``.
    """
    flags = _NEW | os.O_TRUNC
    with suppress(OSError), open(open_below(run, NEXT_STATUS, flags, opened=opened), "wb") as file:
        file.write(bytes(STATUS_ROOM))


def read_status(run: Path) -> dict[str, Any] | None:
    """The status of a run; ``None`` if the run ended before it had one.

    Raises ``RequestError`` for a damaged one.
    """
    path = run / STATUS
    try:
        return status_of(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RefusedFile as error:
        raise RequestError((Problem("run_dir", str(error)),)) from error
    except OSError as error:
        raise RequestError((Problem("run_dir", f"{path}: {error.strerror}"),)) from error
    except ValueError as error:
        text = f"{path}: damaged: it does not say which steps are done; without the file all are done again"
        raise RequestError((Problem("run_dir", text),)) from error


def status_of(path: Path) -> dict[str, Any]:
    """The content of a ``status.json``.

    Raises ``ValueError`` for a damaged one; ``OSError`` as ``open`` does.
    """
    status = parsed(path, read_bytes(path, TEXT))
    if not isinstance(status, dict):
        raise ValueError(f"{path}: no mapping")
    said = {name: value for name, value in status.items() if name not in ("version", "digest")}
    if said != status and status != _digested(said):  # older versions wrote neither
        raise ValueError(f"{path}: its digest is not that of what it says")
    return said


def _digested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with version and digest.

    They are at opposite ends of the file: damage to the digest leaves the version, which requires a digest.
    """
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return {"version": 2, **json.loads(json.dumps(fields)), "digest": digest}


def identity(run: Path) -> tuple[int, int] | None:
    """The device and inode of a folder, which identify it while it exists; ``None`` if it does not exist."""
    try:
        about = os.stat(run)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return about.st_dev, about.st_ino


def still_there(run: Path, began: tuple[int, int] | None) -> None:
    """Raises ``RunError`` if the folder of the running run has been deleted or moved.

    ``began``: its ``identity`` when the run began; ranks may have created another folder at its path since.
    """
    if not run.is_dir() or identity(run) != began:
        raise RunError(f"{run}: the run folder was deleted or moved during the run")


def _made(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _point(link: Path, target: str) -> None:
    """Points ``link`` to ``target``; a file system without links only causes a warning."""
    new = link.with_name(f".latest.{target}")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(link)
    except OSError as error:
        new.unlink(missing_ok=True)
        _log.warning("%s does not point to %s: %s", link, target, error.strerror)


@contextmanager
def _refused(key: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, Unwritten) and error.errno in FULL:
            raise
        raise RequestError((_problem(key, path, f"{error.filename}: {error.strerror}"),)) from error


def _problem(key: str, path: Path, why: str, what: str = "a run folder") -> Problem:
    return Problem(key, f"{what} cannot be made at {path}: {why}")

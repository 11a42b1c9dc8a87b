"""Makes, locks and reopens the run folder."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from launcher.checkpoint.tensorfile.disk import FULL, Unwritten, named_errors, parsed
from launcher.errors import Problem, RequestError
from launcher.untrusted.files import (
    LINK,
    RefusedFile,
    brief,
    irregular,
    links,
    open_below,
    open_folder,
    read_bytes_below,
)

_log = logging.getLogger(__name__)


def check_writable(root: Path, key: str = "runs", label: str = "a run folder") -> Problem | None:
    """Returns the problem if no folder can be created at ``root`` or below, else ``None``; writes nothing."""
    nearest = root
    while (
        not os.path.lexists(nearest) and nearest != nearest.parent
    ):  # without the second condition an unreadable working directory would be tried forever
        nearest = nearest.parent
    if os.path.lexists(nearest) and not nearest.is_dir():
        return _problem(key, root, f"{nearest} is not a folder", label)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return _problem(key, root, f"{nearest} is not writable", label)
    return None


def check_file(path: Path, key: str, label: str = "the folder of this file") -> Problem | None:
    """Returns the problem if no file can be written at ``path``, else ``None``; writes nothing.

    A file is replaced by another that is renamed: a pipe or a device at ``path`` would be removed.
    """
    if path.is_dir():
        return Problem(key, f"{path}: is a folder, not a file")
    if kind := irregular(path):
        return Problem(key, f"{path}: is {kind}")
    return check_writable(path.parent, key, label)


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

LIBRARY_FOLDERS = ("loggers",)
"""Folders in which other libraries write, and may create links."""


def check_entries(run: Path, requested: Sequence[str] = ()) -> Problem | None:
    """Returns the problem of links or entries of the wrong type where a run would write in ``run``.

    ``requested``: names of files and folders that settings of the run add (``run:NAME``).
    """
    folders = [run / name for name in FOLDERS if os.path.lexists(run / name)]
    files = [run / name for name in FILES if os.path.lexists(run / name)]
    every = [*folders, *files, *(run / name for name in requested if os.path.lexists(run / name))]
    bad_links = list(dict.fromkeys(link for path in every for link in _links(path)))
    if bad_links:
        return linked("run_dir", run, "a run folder", bad_links)
    wrong = [f"{path} is not a folder" for path in folders if not path.is_dir()]
    wrong += [f"{path} is not a file" for path in files if not path.is_file()]
    return Problem("run_dir", f"{run} is not a run folder: {'; '.join(wrong)}") if wrong else None


def check_own_folder(run: Path) -> Problem | None:
    """Returns the problem of a folder that cannot be that of one run: the root, or the home of the user."""
    absolute = os.path.realpath(run)
    if absolute not in (os.sep, os.path.realpath(os.path.expanduser("~"))):
        return None
    kind = "the root folder" if absolute == os.sep else "your home folder"
    return Problem("run_dir", f"{run}: is {kind}; a run writes its files into a folder of its own")


def linked(key: str, folder: Path, kind: str, bad_links: Sequence[Path]) -> Problem:
    """Returns the problem of a ``folder`` that has ``bad_links`` in it. ``kind``: what it should be."""
    more = f" and {len(bad_links) - 3} more" if len(bad_links) > 3 else ""
    listed = ", ".join(map(str, bad_links[:3]))
    return Problem(key, f"{folder} is not {kind}: {listed}{more}: {LINK}")


def _links(path: Path) -> Iterator[Path]:
    if path.name not in LIBRARY_FOLDERS:
        yield from links(path)
    elif path.is_symlink():
        yield path


def make(root: Path, name: str) -> Path:
    """Creates ``<root>/<name>/<NNNN>`` and makes ``<root>/<name>/latest`` a link to it.

    Runs that start at the same time get different folders.
    """
    with _as_request_error("runs", root):
        home = root / name
        home.mkdir(parents=True, exist_ok=True)
        number = max((int(p.name) for p in home.iterdir() if p.name.isdecimal()), default=0) + 1
        while not _made(home / f"{number:04d}"):
            number += 1
    run = home / f"{number:04d}"
    _point(home / "latest", run.name)
    return run


def reopen(run_dir: Path) -> Path:
    """Returns the folder that the user named, created if it does not exist."""
    with _as_request_error("run_dir", run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    problem = check_writable(run_dir, "run_dir")
    if problem:
        raise RequestError((problem,))
    return run_dir


def write_command(run: Path, argv: Sequence[str]) -> None:
    """Appends this start's command, quoted for a shell, to ``command.txt``: one line for each start."""
    path = run / "command.txt"
    line = shlex.join(argv) + "\n"
    with _as_request_error("run_dir", run), named_errors(path, len(line)):
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
    with named_errors(run / STATUS, len(data)):
        at = open_folder(run) if opened is None else os.dup(opened)
    try:
        with (
            named_errors(run / STATUS, len(data)),
            open(open_below(run, NEXT_STATUS, _NEW, opened=at), "wb") as file,
        ):
            file.write(data)
            file.truncate()
        with named_errors(run / STATUS, len(data)):
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
    """Returns the status of a run; ``None`` if the run ended before it had one.

    Raises ``RequestError`` for a damaged one.
    """
    path = run / STATUS
    try:
        return status_of(run)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RefusedFile as error:
        raise RequestError((Problem("run_dir", str(error)),)) from error
    except OSError as error:
        raise RequestError((Problem("run_dir", f"{path}: {error.strerror}"),)) from error
    except ValueError as error:
        text = (
            f"{path}: damaged: it does not say which steps are done; remove the file to run all of them again"
        )
        raise RequestError((Problem("run_dir", text),)) from error


def status_of(run: Path) -> dict[str, Any]:
    """Returns the content of the ``status.json`` of a run.

    Raises ``ValueError`` for a damaged one; ``RefusedFile`` for a link; ``OSError`` as ``open`` does.
    """
    path = run / STATUS
    status = parsed(path, read_bytes_below(run, STATUS))
    if not isinstance(status, dict):
        raise ValueError(f"{path}: is not a mapping")
    content = {name: value for name, value in status.items() if name not in ("version", "digest")}
    if content != status and status != _digested(content):  # older versions wrote neither
        raise ValueError(f"{path}: its digest does not match its content")
    for name, kind in _KINDS.items():
        if content.get(name) is not None and not isinstance(content[name], kind):
            raise ValueError(f"{path}: {name} is {brief(content[name])}")
    return content


_KINDS: Mapping[str, type] = {"status": str, "error": str, "steps": list, "metrics": dict}
"""The types of what a status may have. A status without digest may have been written by anybody."""


def _digested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with version and digest.

    They are at opposite ends of the file: damage to the digest leaves the version, which requires a digest.
    """
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return {"version": 2, **json.loads(json.dumps(fields)), "digest": digest}


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
def _as_request_error(key: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, Unwritten) and error.errno in FULL:
            raise
        raise RequestError((_problem(key, path, f"{error.filename}: {error.strerror}"),)) from error


def _problem(key: str, path: Path, why: str, label: str = "a run folder") -> Problem:
    return Problem(key, f"{label} cannot be made at {path}: {why}")


LOCK_FILE = ".lock"
PATIENCE_S = 5.0  # for ranks that are ending because their launcher died
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


lock_descriptors: set[int] = set()
"""Descriptors of the locks that this process holds."""


@contextmanager
def holding(fd: int) -> Iterator[None]:
    """Lets children that start in the block inherit ``fd``: the lock lasts until the last one has ended."""
    lock_descriptors.add(fd)
    try:
        yield
    finally:
        lock_descriptors.discard(fd)


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Locks ``run`` for this process and its ranks.

    Raises ``RequestError`` while another launcher holds the lock. The kernel releases it when the last of
    them has ended, in whatever way. A file system without locks causes a warning.
    """
    path = run / LOCK_FILE
    mine = f"{os.getpid()} {socket.gethostname()}\n".encode()
    with named_errors(path, len(mine)):
        fd = _opened(run, os.O_RDWR | os.O_CREAT)
    with open(fd, encoding="utf-8") as file:
        if _taken(file):
            _wait_for_the_dead(file, run)
        with named_errors(path, len(mine)):
            os.pwrite(fd, mine, 0)
            os.ftruncate(fd, len(mine))
        with holding(fd):
            yield


def running_launcher(run: Path, patience_s: float) -> str | None:
    """Describes the launcher that still holds ``run`` after ``patience_s``; ``None`` if none does."""
    if not (run / LOCK_FILE).is_file():
        return None
    end = time.monotonic() + patience_s
    with open(_opened(run, os.O_RDWR), "r+", encoding="utf-8") as file:
        while _taken(file):
            if time.monotonic() > end:
                return _who(file)
            time.sleep(0.05)
    return None


def _opened(run: Path, flags: int) -> int:
    try:
        return open_below(run, LOCK_FILE, flags)
    except RefusedFile as error:
        raise RequestError((Problem("run_dir", str(error)),)) from error


def _who(file: TextIO) -> str:
    file.seek(0)
    pid, _, host = file.read().strip().partition(" ")
    return f"another launcher is using it (process {pid or '?'} on {host or '?'})"


def _taken(file: TextIO) -> bool:
    """Tries to take the lock; returns whether another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning("%s: this file system has no locks; make sure that no other launcher uses it", file.name)
    return False


def _wait_for_the_dead(file: TextIO, run: Path) -> None:
    """Waits for ranks that are ending: those of a dead launcher, or of an earlier run of this process.

    Raises ``RequestError`` if the launcher is at work.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        file.seek(0)
        pid, _, host = file.read().strip().partition(" ")
        if _works(pid, host, file) or time.monotonic() > end:
            raise RequestError((Problem("run_dir", f"{run}: {_who(file)}"),))
        time.sleep(0.02)
        if not _taken(file):
            return


def _works(pid: str, host: str, file: TextIO) -> bool:
    """Returns true if the launcher that locked ``file`` is at work: on another machine, or in a process here.

    An empty file is about to be written, so it does not count.
    """
    if not pid:
        return False
    if host == socket.gethostname() and pid == str(os.getpid()):
        return any(os.path.samestat(os.fstat(fd), os.fstat(file.fileno())) for fd in [*lock_descriptors])
    return host != socket.gethostname() or Path("/proc", pid).exists()


PREFIX = "launcher-"
OWNER = "owner"


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, deleted with the block; also deletes folders whose owners were killed.

    The file ``owner`` in it is locked. The kernel releases the lock with the last process that holds it, and
    other containers see it, where a process id means nothing.
    """
    home = Path(tempfile.gettempdir())
    sweep(home)
    folder, owner = _made_scratch(home)
    try:
        with holding(owner):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owner)


def sweep(home: Path) -> tuple[Path, ...]:
    """Deletes folders below ``home`` that no process owns; keeps those of other users and other programs."""
    gone = []
    for owner in home.glob(f"{PREFIX}*/{OWNER}"):
        try:
            if owner.stat().st_uid != os.geteuid():
                continue
            fd = os.open(owner, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # its owner was first
            continue

        # the lock of a process that has ended can be taken
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)
            gone.append(owner.parent)
        except OSError:  # a process works there, or this file system has no locks
            continue
        finally:
            os.close(fd)
    return tuple(gone)


def _made_scratch(home: Path) -> tuple[Path, int]:
    """Returns a new folder with a lock; repeats if another process swept the folder before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=home))
        owner = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / OWNER).exists():
                return folder, owner
        except BlockingIOError:
            pass
        except OSError:  # no locks here: it cannot be swept either
            return folder, owner
        os.close(owner)

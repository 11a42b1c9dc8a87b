"""The folder of one run: made, reopened, its status written and read."""

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
from launcher.untrusted.links import LINK, links, open_below

_log = logging.getLogger(__name__)


def check_writable(root: Path, key: str = "runs", what: str = "a run folder") -> Problem | None:
    """What would keep a folder from being made at ``root`` or below; writes nothing."""
    there = root
    while (
        not os.path.lexists(there) and there != there.parent
    ):  # a current folder that may not be read has no end
        there = there.parent
    if os.path.lexists(there) and not there.is_dir():
        return _problem(key, root, f"{there} is not a folder", what)
    if not os.access(there, os.W_OK | os.X_OK):
        return _problem(key, root, f"{there} is not writable", what)
    return None


_NEW = os.O_WRONLY | os.O_CREAT
STATUS, NEXT_STATUS = "status.json", ".status.json"
STATUS_ROOM = 16 << 10  # bytes; one with many figures has a few thousand
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
"""Folders in which other libraries write, with links of their own."""


def check_entries(run: Path) -> Problem | None:
    """What stands in ``run`` in the place of something that a run writes there."""
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
    """A new ``<root>/<name>/<NNNN>``, ``latest`` beside it pointing there.

    Runs that start at once get one each.
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
    """The folder the user named, made if it is not there yet."""
    with _refused("run_dir", run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    problem = check_writable(run_dir, "run_dir")
    if problem:
        raise RequestError((problem,))
    return run_dir


def write_command(run: Path, argv: Sequence[str]) -> None:
    """``command.txt``: a line for each start, to paste into a shell; later ones resumed the first."""
    path = run / "command.txt"
    line = shlex.join(argv) + "\n"
    with _refused("run_dir", run), told(path, len(line)):
        fd = open_below(run, path.name, _NEW | os.O_APPEND)
        with open(fd, "a", encoding="utf-8") as file:
            file.write(line)


def write_status(run: Path, **fields: Any) -> None:
    """Replace ``status.json``; a reader sees the old one or the new one, never a part.

    One process at a time. Where ``reserve_status`` was called before, a full disk has room for it.
    """
    new = run / NEXT_STATUS
    data = (json.dumps(_digested(fields), indent=2) + "\n").encode()
    try:
        with told(run / STATUS, len(data)), open(open_below(run, NEXT_STATUS, _NEW), "wb") as file:
            file.write(data)
            file.truncate()
    except OSError:
        new.unlink(missing_ok=True)
        raise
    new.replace(run / STATUS)


def reserve_status(run: Path) -> None:
    """Reserve room for the next status, or what there is: a full disk too must tell how the run ended."""
    with suppress(OSError), open(open_below(run, NEXT_STATUS, _NEW | os.O_TRUNC), "wb") as file:
        file.write(bytes(STATUS_ROOM))


def read_status(run: Path) -> dict[str, Any] | None:
    """``None`` when the run never got so far as to have one.

    Raises ``RequestError`` for one that is damaged.
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
    """What a ``status.json`` says.

    Raises ``ValueError`` for one that is damaged; ``OSError`` as ``open`` does.
    """
    status = parsed(path, read_bytes(path, TEXT))
    if not isinstance(status, dict):
        raise ValueError(f"{path}: no mapping")
    said = {name: value for name, value in status.items() if name not in ("version", "digest")}
    if said != status and status != _digested(said):  # one written before had neither
        raise ValueError(f"{path}: its digest is not that of what it says")
    return said


def _digested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """As the file has it.

    What hits the digest, or its name, leaves the version at the other end: it asks for one.
    """
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return {"version": 2, **json.loads(json.dumps(fields)), "digest": digest}


def identity(run: Path) -> tuple[int, int] | None:
    """What stays the same of a folder for as long as it is this one; ``None`` where there is none."""
    try:
        about = os.stat(run)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return about.st_dev, about.st_ino


def still_there(run: Path, began: tuple[int, int] | None) -> None:
    """Raises ``RunError`` when somebody has deleted or moved the folder of a run that is at work there.

    ``began``: its ``identity`` when the run began; ranks may have made another in its place since.
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
    """A convenience, so a file system without links costs a warning and not the run."""
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

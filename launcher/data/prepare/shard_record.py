"""Records output shards one by one, so that ``prepare`` can continue, and publishes the folder."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.data.file_kinds import BadFile
from launcher.data.prepare.documents import Position
from launcher.data.prepare.lock import LOCK
from launcher.data.prepare.progress import Progress
from launcher.data.tokens.formats import sync, token_file
from launcher.untrusted.files import open_below, read_json

MANIFEST = "prepared.json"
TOKENIZER = "tokenizer.json"
BEGUN = "begun.json"  # has the digest of the corpus; for another corpus the folder is emptied


def working_folder(dst: Path) -> Path:
    """Returns the folder next to ``dst`` that replaces ``dst`` once it is complete."""
    dst = Path(os.path.realpath(dst))
    return dst.with_name(f".{dst.name}.unfinished")


def shard_name(number: int) -> str:
    """Returns the name of a file of tokens. Names sort in the order of the corpus.

    >>> shard_name(7)
    '00007.tokens'
    """
    return f"{number:05d}.tokens"


def kept(folder: Path, digest: str, skips: bool) -> Progress:
    """Returns the progress of an earlier start on the same corpus. For another corpus, it empties the folder.

    Unless this start ``skips`` bad rows, the progress ends before the first file with skipped rows. The files
    of tokens after this point are deleted.
    """
    if _json(folder / BEGUN) != {"digest": digest}:
        empty(folder)
        write_json(folder / BEGUN, {"digest": digest})
        return Progress()

    done = Progress()
    while (more := _recorded(folder, done.shards)) is not None and (skips or not more.skipped):
        done = more

    # delete incomplete files
    complete = {file for k in range(done.shards) for file in (shard_name(k), _record_name(k))}
    for path in folder.iterdir():
        if path.name not in (LOCK, BEGUN, TOKENIZER) and path.name not in complete:
            path.unlink()
    return done


def record(folder: Path, done: Progress) -> None:
    """Records that the last file of ``done`` is complete."""
    write_json(folder / _record_name(done.shards - 1), asdict(done))


def publish(folder: Path, dst: Path, manifest: dict[str, Any]) -> None:
    """Writes ``manifest`` into ``folder``, and replaces ``dst`` with the folder."""
    dst = Path(os.path.realpath(dst))
    for path in folder.iterdir():
        if path.name == BEGUN or path.name.endswith(_RECORD):
            path.unlink()
    write_json(folder / MANIFEST, manifest)
    (folder / LOCK).unlink()
    old = dst.with_name(f".{dst.name}.old")
    if dst.exists():
        shutil.rmtree(old, ignore_errors=True)
        dst.replace(old)
    folder.replace(dst)
    sync(dst.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_unused(folder: Path) -> None:
    """Removes ``folder`` if it contains only the lock."""
    if [path.name for path in folder.iterdir()] == [LOCK]:
        (folder / LOCK).unlink()
        folder.rmdir()


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1))


def write_text(path: Path, text: str) -> None:
    """Writes the file atomically."""
    new = path.with_name(f".{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(open_below(path.parent, new.name, flags), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync(path.parent)


def published(dst: Path) -> dict[str, Any] | None:
    """Returns the manifest of the prepared corpus at ``dst``; ``None`` if it has none."""
    manifest = _json(dst / MANIFEST)
    return manifest if isinstance(manifest, dict) else None


_RECORD = ".done.json"


def _record_name(shard: int) -> str:
    return f"{shard:05d}{_RECORD}"


def _recorded(folder: Path, shard: int) -> Progress | None:
    """Returns the progress at the end of file number ``shard``; ``None`` if the file is not complete."""
    fields = _json(folder / _record_name(shard))
    try:
        token_file(folder / shard_name(shard), dtype="uint16")
        return Progress(**{**fields, "position": Position(**fields["position"])})
    except (BadFile, OSError, TypeError, KeyError):
        return None


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def empty(folder: Path) -> None:
    """Deletes all files of ``folder`` except the lock."""
    for path in folder.iterdir():
        if path.name != LOCK:
            path.unlink()

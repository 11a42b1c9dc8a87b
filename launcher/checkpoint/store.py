"""Checkpoint folders: made complete in one step, found again, thinned out."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.checkpoint.authentic import authentic
from launcher.checkpoint.durable import publish, remove, sync, write_text
from launcher.checkpoint.keys import load_key
from launcher.checkpoint.manifest import Manifest, read_manifest, write_manifest
from launcher.checkpoint.sealed import check_key
from launcher.checkpoint.write import RankRecord, text_record
from launcher.untrusted_file import RefusedFile, read_text

STATE = "state.json"
LATEST = "latest"
LONGEST = 4096  # bytes of it: the name of a folder
_STEP = re.compile(r"step-(\d+)")


def step_folder(checkpoints: Path, step: int) -> Path:
    """``step-000100``, the final name."""
    return checkpoints / f"step-{step:06d}"


def step_of(folder: Path) -> int | None:
    """The step that its name says, if it says one."""
    match = _STEP.fullmatch(os.path.basename(os.path.realpath(folder)))
    return None if match is None else int(match[1])


def partial(final: Path) -> Path:
    """Where the ranks write before ``final`` exists."""
    return final.with_name(f"{final.name}.partial")


def commit(partial_folder: Path, final_folder: Path, records: Sequence[RankRecord], state: Mapping[str, Any]) -> None:
    """Make what the ranks wrote the newest checkpoint: called by one rank, after all have returned.

    ``state`` is anything JSON can say. A checkpoint of the same name is replaced. Until the last line a reader of
    ``latest`` finds the one before.
    """
    seal(partial_folder, records, state)
    publish(partial_folder, final_folder)
    write_text(final_folder.parent / LATEST, final_folder.name + "\n")


def seal(folder: Path, records: Sequence[RankRecord], state: Mapping[str, Any]) -> None:
    """Write what describes the whole, the manifest last; files of an earlier, interrupted attempt go."""
    first = records[0]
    if (
        sorted(r.rank for r in records) != list(range(first.world))
        or len({(r.world, r.strategy, r.key) for r in records}) > 1
    ):
        told = ", ".join(f"rank {r.rank} of {r.world} ({r.strategy[:8]})" for r in records)
        raise ValueError(f"{folder}: not one record of each rank under one strategy: {told}")
    write_text(folder / STATE, json.dumps(dict(state), indent=1, sort_keys=True) + "\n")
    files = {path: record for r in records for path, record in r.files.items()}
    files[STATE] = text_record(folder / STATE)
    _sweep(folder, set(files))
    for path, record in files.items():
        if (size := (folder / path).stat().st_size) != record.size:
            raise ValueError(f"{folder}: {path} has {size} bytes, its rank wrote {record.size}")
    manifest = Manifest(first.world, first.strategy, files, first.key)
    if first.key is not None:
        key = load_key(first.key)
        _check_keys(folder, key, records)
        manifest = authentic(manifest, key)
    sync(folder)
    write_manifest(folder, manifest)


def _check_keys(folder: Path, key: bytes, records: Sequence[RankRecord]) -> None:
    """One place on two machines may hold two keys."""
    for record in records:
        for path in (p for p in record.files if p.startswith("rank_")):
            check_key(folder / path, key)


def latest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint, ``None`` if there is none: the last one committed, else the highest step."""
    last = _pointed(checkpoints)
    steps = [last] if last is not None else []
    steps += [path for path in _steps(checkpoints) if path != last]
    return next((path for path in steps if complete(path)), None)


def complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except (ValueError, OSError):
        return False
    return True


def prune(checkpoints: Path, keep: int) -> tuple[Path, ...]:
    """Delete complete checkpoints beyond the newest ``keep``; returns those deleted. The last committed one stays."""
    if keep < 1:
        raise ValueError(f"keep: {keep} would delete the checkpoint just written; keep at least 1")
    for trash in checkpoints.glob("step-*.trash"):
        shutil.rmtree(trash)
    for torn in checkpoints.glob(f".{LATEST}.*"):  # of a run that was killed while it renamed
        torn.unlink()
    last = latest(checkpoints)
    others = [path for path in _steps(checkpoints) if path != last and complete(path)]
    gone = tuple(others[keep - 1 :])
    for folder in gone:
        remove(folder)
    return gone


def _steps(checkpoints: Path) -> list[Path]:
    """Highest step first."""
    if not checkpoints.is_dir():
        return []
    found = [(int(m[1]), path) for path in checkpoints.iterdir() if (m := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _pointed(checkpoints: Path) -> Path | None:
    try:
        name = read_text(checkpoints / LATEST, LONGEST).strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, RefusedFile, UnicodeDecodeError):
        return None
    return checkpoints / name if _STEP.fullmatch(name) else None


def _sweep(folder: Path, keep: set[str]) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in keep:
            path.unlink()

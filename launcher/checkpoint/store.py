"""Writes, finds and deletes checkpoint folders; each is complete or absent.

The file ``latest`` has one line per checkpoint. Its last line is the SHA-256 of the lines above it or, if the
checkpoints are encrypted, their MAC.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import Any

from launcher.checkpoint.manifest import (
    EXTRA,
    MANIFEST,
    Manifest,
    authentic,
    canonical,
    digested,
    opened,
    places,
    rank_file,
    read_manifest,
    text_record,
    write_manifest,
)
from launcher.checkpoint.tensorfile.disk import (
    clear,
    discard,
    hidden,
    parsed,
    publish,
    read_bytes,
    remove,
    rename,
    sync,
    write_text,
)
from launcher.checkpoint.tensorfile.encryption import ANOTHER, FORMS, check_key, derived, load_key
from launcher.checkpoint.tensorfile.watched_folder import below, make_folder, open_file
from launcher.checkpoint.write import RankRecord
from launcher.plan.resolve.encryption import ANYONE, Trust
from launcher.untrusted.files import LINK, RefusedFile

LATEST = "latest"
STEP = re.compile(r"step-(\d+)")
LONGEST_LATEST = 1 << 20  # bytes; the maximum size of the file
_INFO = b"launcher checkpoint latest"
_OLDER = re.compile(rf"older ({STEP.pattern}) ([0-9a-f]{{64}})")
_LAST = re.compile(r"(sha256|hmac-sha256) ([0-9a-f]{64})")
_CURE = "remove it to use the checkpoint of the highest step"


@dataclass(frozen=True)
class Latest:
    """The content of the file ``latest``.

    ``name`` is the newest checkpoint. ``superseded`` has the checkpoints of a higher step that another
    training left behind: it maps the name of each to its ``identity``. ``digest`` covers ``text``; it is
    ``None`` in a file of an earlier launcher, which contains only the name. If ``mac``, the digest is a MAC.
    """

    name: str
    superseded: Mapping[str, str]
    text: str
    digest: str | None = None
    mac: bool = False


def identity(manifest: Manifest) -> str:
    """Returns a digest that differs for every checkpoint, even for two of the same step."""
    return hashlib.sha256(canonical(manifest)).hexdigest()


def write_latest(checkpoints: Path, name: str, superseded: Mapping[str, str], place: str | None) -> None:
    """Writes the file ``latest`` of the folder ``checkpoints``.

    ``place`` says where the key is that the checkpoints are encrypted with, and is ``None`` for plain ones.
    """
    text = "".join([f"{name}\n", *(f"older {other} {digest}\n" for other, digest in superseded.items())])
    key = None if place is None else load_key(place)
    last = f"sha256 {_sha256(text)}" if key is None else f"hmac-sha256 {_mac(text, key)}"
    write_text(checkpoints / LATEST, f"{text}{last}\n")


def read_latest(checkpoints: Path) -> Latest | None:
    """Reads the file ``latest``; ``None`` if it does not exist. Raises ``ValueError`` if it is malformed."""
    path = checkpoints / LATEST
    try:
        lines = read_bytes(path, LONGEST_LATEST).decode().split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        lines = []

    # the last line ends with a newline too
    if not lines or lines.pop() or not lines or not STEP.fullmatch(lines[0]):
        raise damaged(path)
    if len(lines) == 1:
        return Latest(lines[0], {}, "")

    last = _LAST.fullmatch(lines[-1])
    listed = [_OLDER.fullmatch(line) for line in lines[1:-1]]
    if last is None or None in listed:
        raise damaged(path)
    text = "".join(f"{line}\n" for line in lines[:-1])
    above = {match[1]: match[3] for match in listed if match}
    return Latest(lines[0], above, text, digest=last[2], mac=last[1] != "sha256")


def check_latest(latest: Latest, folder: Path, newest: Manifest, trust: Trust) -> None:
    """Raises ``ValueError`` if the file is damaged or its MAC is not authentic.

    If the checkpoints are encrypted, the file must have a MAC made with a key that ``trust`` accepts.
    ``folder`` is the newest checkpoint, ``newest`` its manifest.
    """
    path = folder.parent / LATEST
    if latest.mac:
        opened(folder, newest, trust)  # raises the clearer error if the key is the wrong one
        macs = [_mac(latest.text, key) for key in _keys(path, newest, trust)]
        if not any(hmac.compare_digest(mac, str(latest.digest)) for mac in macs):
            raise ValueError(f"{path}: damaged or tampered with: its MAC does not match its content; {_CURE}")
    elif newest.key is not None:
        raise ValueError(
            f"{path}: it has no MAC, and the checkpoints are encrypted: it cannot be verified; {_CURE}"
        )
    elif latest.digest is not None and latest.digest != _sha256(latest.text):
        raise damaged(path)


def _keys(path: Path, newest: Manifest, trust: Trust) -> list[bytes]:
    """Returns the keys that can be loaded; raises ``ValueError`` if none can."""
    keys = []
    wrong = []
    for place in places(newest.key, trust):
        try:
            keys.append(load_key(place))
        except ValueError as error:
            wrong.append(str(error))
    if not keys:
        reasons = "; ".join(wrong) or f"set {ANOTHER} to its place: {FORMS}"
        raise ValueError(f"{path}: its MAC needs the key: {reasons}")
    return keys


def damaged(path: Path) -> ValueError:
    return ValueError(f"{path}: damaged: it does not say which checkpoint is the newest; {_CURE}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _mac(text: str, key: bytes) -> str:
    return hmac.new(derived(key, b"", _INFO, 32), text.encode(), hashlib.sha256).hexdigest()


STATE = "state.json"
TRAINING = "training"
"""A key of ``state.json``; its value identifies the training, as several may save in one folder."""


def step_folder(checkpoints: Path, step: int) -> Path:
    """Returns the final folder of a step, such as ``step-000100``."""
    return checkpoints / f"step-{step:06d}"


def step_of(folder: Path) -> int | None:
    """Returns the step in the folder's name, or ``None``. Links are resolved first."""
    match = STEP.fullmatch(os.path.basename(os.path.realpath(folder)))
    return None if match is None else int(match[1])


def partial(final: Path) -> Path:
    """Returns the folder that the ranks write to before ``final`` exists."""
    return final.with_name(f"{final.name}.partial")


def commit(
    partial_folder: Path, final_folder: Path, records: Sequence[RankRecord], state: Mapping[str, Any]
) -> None:
    """Makes the files that the ranks wrote the newest checkpoint.

    One rank calls this after ``write_rank`` has returned on all ranks. A complete checkpoint of the same name
    is replaced if it is of the same training; anything else of that name, also an incomplete checkpoint, is
    renamed (``replaced-step-000100``). The file ``latest`` is written last; until then it names the previous
    checkpoint.

    Args:
        partial_folder: The folder that the ranks wrote to, ``partial(final_folder)``.
        final_folder: The checkpoint's folder, as ``step_folder`` names it.
        records: The record of every rank.
        state: Any value that JSON can represent.
    """
    seal(partial_folder, records, state)
    if os.path.lexists(final_folder) and not _same_training(final_folder, state):
        rename(final_folder, _free_name(final_folder))
    publish(partial_folder, final_folder)
    point(final_folder, records[0].key)


def seal(folder: Path, records: Sequence[RankRecord], state: Mapping[str, Any]) -> None:
    """Writes the state and, last, the manifest; deletes the files of an earlier, interrupted attempt."""
    _check_records(folder, records)
    first = records[0]

    # the state, then the list of files; any other file is deleted
    write_text(folder / STATE, json.dumps(dict(state), indent=1, sort_keys=True) + "\n")
    files = {path: record for r in records for path, record in r.files.items()}
    files[STATE] = text_record(folder / STATE)
    _sweep(folder, set(files))
    for path, record in files.items():
        size = (folder / path).stat().st_size
        if size != record.size:
            raise ValueError(f"{folder}: {path} has {size} bytes, its rank wrote {record.size}")

    # the manifest, with a MAC if the checkpoint is encrypted
    manifest = digested(Manifest(first.world, first.strategy, files, first.key))
    if first.key is not None:
        key = load_key(first.key)
        _check_keys(folder, key, records)
        manifest = authentic(manifest, key)

    # last: the manifest makes the folder complete
    sync(folder)
    write_manifest(folder, manifest)


def _check_records(folder: Path, records: Sequence[RankRecord]) -> None:
    """Raises ``ValueError`` unless each rank has one record and the records agree.

    Records agree if they have the same strategy, world size and key, and if all or none have extra tensors.
    """
    first = records[0]
    ranks = sorted(r.rank for r in records)
    if ranks != list(range(first.world)) or len({(r.world, r.strategy, r.key) for r in records}) > 1:
        listing = ", ".join(f"rank {r.rank} of {r.world} ({r.strategy[:8]})" for r in records)
        raise ValueError(f"{folder}: every rank must have one record, all of one strategy: {listing}")
    odd = [r.rank for r in records if _has_extra(r) != _has_extra(first)]
    if odd:
        ranks_differ = f"rank {first.rank} and rank {odd[0]} differ"
        raise ValueError(f"{folder}: all ranks must have extra tensors, or none: {ranks_differ}")


def _check_keys(folder: Path, key: bytes, records: Sequence[RankRecord]) -> None:
    """Raises ``ValueError`` if a rank used another key: one place may hold different keys on two machines."""
    for record in records:
        for path in (p for p in record.files if p.startswith("rank_")):
            check_key(folder / path, key)


def _has_extra(record: RankRecord) -> bool:
    return rank_file(record.rank, EXTRA) in record.files


def point(folder: Path, key: str | None) -> None:
    """Makes ``latest`` name ``folder`` as the newest checkpoint.

    ``key`` says where the key of encrypted checkpoints is.
    """
    home = folder.parent
    own = step_of(folder)

    # checkpoints of a higher step are superseded: a run that began anew left them behind
    superseded = {}
    for path in _steps(home):
        if own is None or int(path.name.removeprefix("step-")) <= own:
            continue
        manifest = _complete(path)
        if manifest is not None:
            superseded[path.name] = identity(manifest)
    write_latest(home, folder.name, superseded, key)


def latest(checkpoints: Path, trust: Trust = ANYONE) -> Path | None:
    """Returns the newest complete checkpoint, or ``None`` if there is none.

    The newest checkpoint is the one of the highest step that the file ``latest`` does not list as superseded.
    An outdated file does no harm: a checkpoint that it does not list is not superseded. If all are, those of
    the last training have been deleted, and another training's are not used in their place.

    Raises ``ValueError`` if that file is damaged or, for encrypted checkpoints, is not authentic under a key
    that ``trust`` accepts.
    """
    complete_ones = _complete_steps(checkpoints)
    highest = next(complete_ones, None)
    if highest is None:
        return None
    pointer = read_latest(checkpoints)
    if pointer is None:
        return highest[0]

    # a file with a digest also lists superseded checkpoints of a higher step; one without has only a name
    newest: tuple[Path, Manifest] | None = highest
    if pointer.digest is not None:
        candidates = chain((highest,), complete_ones)
        newer = ((path, m) for path, m in candidates if pointer.superseded.get(path.name) != identity(m))
        newest = next(newer, None)
    else:
        manifest = _complete(checkpoints / pointer.name)
        if manifest is not None:
            newest = checkpoints / pointer.name, manifest

    if pointer.digest is not None or newest != highest:
        check_latest(pointer, *(newest or highest), trust)
    return None if newest is None else newest[0]


def newest_in(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint in a run folder, or in its folder of checkpoints.

    ``None`` if ``folder`` has none, or is a checkpoint itself. No MAC is checked.
    """
    if (folder / MANIFEST).exists():
        return None
    for checkpoints in (folder, folder / "checkpoints"):
        with suppress(ValueError, OSError):
            if newest := latest(checkpoints):
                return newest
    return None


def newest_of_runs(folder: Path) -> Path | None:
    """Returns the checkpoint that was completed last in the runs below ``folder``, or ``None``.

    ``folder`` contains run folders, or one folder of runs per name, like the folder ``runs``. No MAC is
    checked.
    """
    completed_ns: dict[Path, int] = {}
    for pattern in ("*/checkpoints", "*/*/checkpoints"):
        for checkpoints in islice(folder.glob(pattern), MOST_RUNS):
            with suppress(ValueError, OSError):
                if not checkpoints.parent.is_symlink() and (newest := latest(checkpoints)):
                    completed_ns[newest] = (newest / MANIFEST).stat().st_mtime_ns
    return max(completed_ns, key=lambda path: completed_ns[path], default=None)


MOST_RUNS = 1000
"""The most runs at each of the two depths that are searched for a checkpoint."""


def older(newest: Path) -> list[Path]:
    """Returns the complete checkpoints next to ``newest`` that have a lower step, the highest step first."""
    step = step_of(newest) or 0
    return [path for path, _ in _complete_steps(newest.parent) if (step_of(path) or 0) < step]


def complete_ones(checkpoints: Path) -> list[Path]:
    """Returns the complete checkpoints in the folder, the highest step first. No MAC is checked."""
    return [path for path, _ in _complete_steps(checkpoints)]


def incomplete(checkpoints: Path, newest: Path | None = None) -> list[str]:
    """Returns why each incomplete checkpoint is incomplete, only those of a higher step than ``newest``.

    A killed run does not leave one, because a folder gets its name only when it is complete: its files have
    been changed or deleted since, or a copy of it was interrupted.
    """
    above = takewhile(lambda path: path != newest, _steps(checkpoints))
    return [why for why in map(_flaw, above) if why]


def passed_over(newest: Path) -> list[str]:
    """Returns why each incomplete checkpoint of a higher step than ``newest`` is incomplete.

    One more text is returned if ``latest`` names a folder that does not exist.
    """
    flaws = incomplete(newest.parent, newest)
    pointer = read_latest(newest.parent)
    if pointer is not None and not (newest.parent / pointer.name).is_dir():
        flaws.append(f"{newest.parent / LATEST} names {pointer.name}, which does not exist")
    return flaws


def _flaw(folder: Path) -> str:
    try:
        read_manifest(folder)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def encrypted(folder: Path) -> str | None:
    """Returns the place of the key in the manifest; ``None`` if incomplete or not encrypted."""
    manifest = _complete(folder)
    return None if manifest is None else manifest.key


def complete(folder: Path) -> bool:
    return _complete(folder) is not None


def _complete(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except (ValueError, OSError):
        return None


def prune(checkpoints: Path, keep: int, best: int | None = None) -> tuple[Path, ...]:
    """Deletes complete checkpoints beyond the newest ``keep``; returns the deleted ones.

    It always keeps the checkpoint that was committed last, the one of step ``best``, and those of another
    training, which ``checkpoint.resume=never`` leaves in the folder. Raises ``ValueError`` if ``keep`` is
    less than 1 or ``checkpoints`` is a link.
    """
    if keep < 1:
        raise ValueError(f"keep: {keep} would delete the checkpoint just written; keep at least 1")

    if checkpoints.is_symlink():
        raise RefusedFile(checkpoints, LINK)

    # delete files and folders that killed runs left behind
    for trash in checkpoints.glob("step-*.trash"):
        clear(trash)
    for torn in checkpoints.glob(f".{LATEST}.*"):  # from a run that was killed before it renamed the file
        clear(torn)

    last = _pointed(checkpoints)
    state = {} if last is None else _read_state(last)
    others = [path for path in _steps(checkpoints) if path != last and _same_training(path, state)]
    gone = tuple(path for path in others[keep - 1 :] if step_of(path) != best)
    for folder in gone:
        remove(folder)
    return gone


def _same_training(folder: Path, state: Mapping[str, Any]) -> bool:
    """Returns true if the checkpoint is complete and readable, and belongs to the training of ``state``."""
    try:
        return complete(folder) and bool(_read_state(folder).get(TRAINING) == state.get(TRAINING))
    except (ValueError, OSError):
        return False


def _read_state(folder: Path) -> dict[str, Any]:
    state = parsed(folder / STATE, read_bytes(folder / STATE))
    if not isinstance(state, dict):
        raise ValueError(f"{folder / STATE}: not a JSON object")
    return state


def _free_name(folder: Path) -> Path:
    """Returns an unused name for a checkpoint whose step another training has saved too."""
    names = (f"replaced-{folder.name}{suffix}" for suffix in chain([""], (f"-{n}" for n in count(2))))
    return next(path for path in map(folder.with_name, names) if not os.path.lexists(path))


def _complete_steps(checkpoints: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yields the complete checkpoints with their manifests, the highest step first."""
    for path in _steps(checkpoints):
        manifest = _complete(path)
        if manifest is not None:
            yield path, manifest


def _steps(checkpoints: Path) -> list[Path]:
    """Returns the folders that are named after a step, the highest step first."""
    if not checkpoints.is_dir():
        return []
    matches = ((STEP.fullmatch(path.name), path) for path in checkpoints.iterdir())
    numbered = [(int(match[1]), path) for match, path in matches if match is not None]
    return [path for _, path in sorted(numbered, reverse=True)]


def _pointed(checkpoints: Path) -> Path | None:
    """Returns the checkpoint that was committed last, without verifying a MAC."""
    pointer = read_latest(checkpoints)
    if pointer is not None and complete(checkpoints / pointer.name):
        return checkpoints / pointer.name
    return next(filter(complete, _steps(checkpoints)), None)


def _sweep(folder: Path, keep: set[str]) -> None:
    """Deletes all files except ``keep`` (paths within ``folder``), and the folders that are then empty."""
    at = open_file(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for root, folders, names, inner in os.fwalk(".", topdown=False, dir_fd=at):
            for name in names:
                if Path(root, name).as_posix() not in keep:
                    os.unlink(name, dir_fd=inner)
            for name in folders:
                with suppress(OSError):  # it is not empty, or a link
                    os.rmdir(name, dir_fd=inner)
    finally:
        os.close(at)


@contextmanager
def fresh(final: Path) -> Iterator[Path]:
    """Yields an empty folder next to ``final``, which replaces ``final`` when the block ends.

    If the block raises, the new folder is deleted. If ``final`` is a link, the folder that it leads to is
    replaced; in a run folder the link itself is.
    """
    if not below(final):
        final = Path(os.path.realpath(final))
    new = hidden(final)
    clear(new)
    make_folder(new)
    try:
        yield new
        publish(new, final, final.with_name(f".{final.name}.trash"))  # hidden, as ``new`` is
    except BaseException:
        discard(new)
        raise


def check_destination(dst: Path, overwrite: bool, own: Callable[[Path], bool], kind: str) -> None:
    """Raises ``FileExistsError`` unless ``dst`` is empty or absent, or may be overwritten.

    With ``overwrite`` a folder is accepted only if ``own`` recognizes it; ``kind`` names its kind in errors.
    """
    if not overwrite or not dst.is_dir():
        check_empty(dst, "; give another, or set overwrite: true")
        return
    check_outside_checkpoints(dst)
    if any(dst.iterdir()) and not own(dst):
        raise FileExistsError(
            f"{dst}: the destination is not empty and not a {kind}, so it is never overwritten"
        )


def check_empty(dst: Path, cure: str = "; give another") -> None:
    """Raises ``FileExistsError`` unless ``dst`` is absent or an empty folder."""
    check_outside_checkpoints(dst)
    if dst.exists() and not dst.is_dir():
        raise FileExistsError(f"{dst}: the destination is a file, not a folder")
    if dst.is_dir() and any(dst.iterdir()):
        raise FileExistsError(f"{dst}: the destination is not empty{cure}")


def check_outside_checkpoints(dst: Path) -> None:
    """Raises ``ValueError`` if ``dst`` is inside a checkpoint, which a foreign file would damage."""
    for folder in Path(os.path.realpath(dst)).parents:
        if (folder / MANIFEST).is_file():
            raise ValueError(f"{dst}: the destination is inside the checkpoint {folder}; give one outside it")


def check_apart(src: Path, dst: Path) -> None:
    """Raises ``ValueError`` if ``src`` and ``dst`` are the same folder, or one is inside the other."""
    here, there = Path(os.path.realpath(src)), Path(os.path.realpath(dst))
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(
            f"{dst}: the destination and the source {src} are the same folder, or one is in the other"
        )

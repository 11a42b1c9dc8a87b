"""torch's flight recorder: a rank's last collectives, which go to the run folder when one of them hangs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ENTRIES = 2000
"""Collectives that a rank remembers: several steps of most layouts."""

SIZE, FILE, ON_TIMEOUT = "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"
OLDER = {SIZE: "TORCH_NCCL_TRACE_BUFFER_SIZE", FILE: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
"""Their names before torch 2.9, which it still reads."""

_log = logging.getLogger(__name__)


def prefix(folder: Path) -> Path:
    """NCCL's watchdog adds the rank. Beside the logs, for torch does not make the folder."""
    return folder / "logs" / "flight-rank"


def nccl_file(folder: Path, rank: int) -> Path:
    """What NCCL's watchdog writes when a collective has timed out, before it ends the process.

    A pickle, for ``python -m torch.distributed.flight_recorder.fr_trace``.
    """
    return Path(f"{prefix(folder)}{rank}")


def gloo_file(folder: Path, rank: int) -> Path:
    """Of another name, for that program reads all files whose names begin alike."""
    return prefix(folder).with_name(f"flight-gloo-rank{rank}.json")


def variables(folder: Path, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What torch reads when a process group is made, and when it writes; nothing that the user has set."""
    wanted = {SIZE: str(ENTRIES), ON_TIMEOUT: "1", FILE: str(prefix(folder))}
    return {key: value for key, value in wanted.items() if key not in env and OLDER.get(key, key) not in env}


@contextmanager
def recording(folder: Path | None) -> Iterator[None]:
    """Groups made in the block remember their collectives; without a run folder nobody would read them."""
    added = {} if folder is None else variables(folder.absolute())
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def write(folder: Path, rank: int) -> Path | None:
    """The last collectives of this rank, the newest last, as JSON; ``None`` where there are none.

    For what no watchdog looks after: gloo's. A dump that fails is no reason to lose the failure.
    """
    import torch

    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not os.environ.get(SIZE, "0").strip("0"):
        return None
    path = gloo_file(folder, rank)
    try:
        path.write_bytes(dump())
    except (OSError, RuntimeError) as error:
        _log.debug("%s: %s", path, error)
        return None
    return path


def written(folder: Path, since_ns: int = 0) -> list[Path]:
    """The dumps in a run folder that are no older."""
    found = prefix(folder).parent.glob("flight-*")
    return sorted(path for path in found if path.stat().st_mtime_ns >= since_ns)

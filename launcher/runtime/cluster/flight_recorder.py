"""torch's flight recorder: a rank's last collectives, saved in the run folder when one of them hangs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launcher.checkpoint.tensorfile.disk import write_bytes

ENTRIES = 2000
"""Collectives that a rank records: several steps of most layouts."""

SIZE, FILE, ON_TIMEOUT = "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"
OLDER = {SIZE: "TORCH_NCCL_TRACE_BUFFER_SIZE", FILE: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
"""Names before torch 2.9, which later versions still read."""

_log = logging.getLogger(__name__)


def prefix(folder: Path) -> Path:
    """Returns the path prefix, to which NCCL's watchdog appends the rank.

    It is in ``logs``, because torch does not create the folder.
    """
    return folder / "logs" / "flight-rank"


def nccl_file(folder: Path, rank: int) -> Path:
    """Returns the file that NCCL's watchdog writes when a collective times out, and then ends the process."""
    return Path(f"{prefix(folder)}{rank}")


def gloo_file(folder: Path, rank: int) -> Path:
    """Returns the file of gloo's collectives.

    Its prefix differs from ``prefix``, since ``fr_trace`` reads all files with the same prefix.
    """
    return prefix(folder).with_name(f"flight-gloo-rank{rank}.json")


def variables(folder: Path, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that torch reads when it makes a process group and when it writes.

    Variables that the user set are left out.
    """
    defaults = {SIZE: str(ENTRIES), ON_TIMEOUT: "1", FILE: str(prefix(folder))}
    return {
        key: value for key, value in defaults.items() if key not in env and OLDER.get(key, key) not in env
    }


@contextmanager
def recording(folder: Path | None) -> Iterator[None]:
    """Records the collectives of process groups created in the block, if there is a run folder."""
    added = {} if folder is None else variables(folder.absolute())
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def write(folder: Path, rank: int) -> Path | None:
    """Writes the last collectives of this rank as JSON, the newest last; ``None`` if there are none.

    This is for gloo, which no watchdog observes. A failed dump must not hide the original failure.
    """
    import torch

    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not os.environ.get(SIZE, "0").strip("0"):
        return None
    path = gloo_file(folder, rank)
    try:
        write_bytes(path, dump())
    except (OSError, RuntimeError) as error:
        _log.debug("%s: %s", path, error)
        return None
    return path


def written(folder: Path, since_ns: int = 0) -> list[Path]:
    """Returns the dumps in a run folder that are not older than ``since_ns``."""
    dumps = prefix(folder).parent.glob("flight-*")
    return sorted(path for path in dumps if path.stat().st_mtime_ns >= since_ns)

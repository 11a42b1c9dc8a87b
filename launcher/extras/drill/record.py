"""The records of a drill in a run folder: when the fault happened, was detected, and was recovered from."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.checkpoint.tensorfile.disk import parsed, read_bytes, write_text
from launcher.checkpoint.tensorfile.watched_folder import make_folder
from launcher.plan.drill import DrillFault

FOLDER = "drill"
HAPPENED, DETECTED, RECOVERED = "fault.json", "detected.json", "recovered.json"


def note(run: Path, name: str, fault: DrillFault, **more: Any) -> None:
    """Writes a record unless it exists; it is on the disk on return. ``more`` may override the time."""
    path = run / FOLDER / name
    if read(run, name, fault) is not None:
        return
    make_folder(path.parent)
    content = {"drill": str(fault), "time_ns": time.time_ns()} | more
    write_text(path, json.dumps(content, indent=1) + "\n")


def read(run: Path, name: str, fault: DrillFault) -> Mapping[str, Any] | None:
    """Reads a record; ``None`` if it does not exist or belongs to another drill."""
    path = run / FOLDER / name
    try:
        content = parsed(path, read_bytes(path))
    except FileNotFoundError:
        return None
    return content if isinstance(content, dict) and content.get("drill") == str(fault) else None

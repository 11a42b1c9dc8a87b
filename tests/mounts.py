"""File systems that a test mounts."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

PATIENCE_S = 30.0


def unmount(folder: Path) -> None:
    """Unmount ``folder``.

    Waits for killed processes that still have files in it, because the system ends them later.
    """
    until = time.monotonic() + PATIENCE_S
    while (done := subprocess.run(["umount", str(folder)], capture_output=True, text=True, check=False)).returncode:
        if "busy" not in done.stderr or time.monotonic() > until:
            raise OSError(done.stderr.strip())
        time.sleep(0.1)

"""The folder that caches compiled code."""

from __future__ import annotations

import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
OWNER_ONLY = 0o700


def keep_compiled() -> None:
    """Caches inductor's output below the user's cache folder, so that the next start can reuse it.

    torch's default is below ``/tmp``, where others could place code that we load. ``TORCHINDUCTOR_CACHE_DIR``
    takes precedence.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # only if something is compiled

    # torch also writes its default there
    if os.environ.get(FOLDER, default_cache_dir()) != default_cache_dir():
        return
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "launcher" / "compile"
    try:
        folder.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
    except OSError as error:
        _log.warning("compiled code is not cached for the next start: %s; set %s to a folder", error, FOLDER)
        return
    os.environ[FOLDER] = str(folder)

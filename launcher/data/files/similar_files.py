"""Finds an existing file with a similar name."""

from __future__ import annotations

from pathlib import Path

from launcher.job.schema.similar_names import nearest


def file(path: str) -> str | None:
    """The file in the same folder whose name is closest to that of ``path``, if one is similar."""
    here = Path(path)
    try:
        names = sorted(p.name for p in here.parent.iterdir() if p.is_file())
    except OSError:
        return None
    found = nearest(here.name, names, 0.8)
    return str(here.with_name(found)) if found and found != here.name else None

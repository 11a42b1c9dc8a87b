"""JSON files of a checkpoint: none may say a thing twice, and each error names its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.untrusted import files

LONGEST = 1 << 28  # bytes; the manifest of 10000 ranks with 400 tensors each is shorter


def read_bytes(path: Path, longest: int = LONGEST) -> bytes:
    """All of a file.

    Raises ``OSError``: ``RefusedFile``, which is a ``ValueError``, for what is none or too long.
    """
    return files.read_bytes(path, longest)


def parsed(path: Path, data: bytes, what: str = "") -> Any:
    """What ``data``, read from ``path``, says.

    Raises ``ValueError`` for no JSON, and for a key that is listed twice; ``what`` says what it is then.
    """
    try:
        return files.parsed(data, unique=True)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {what}no JSON") from error
    except ValueError as error:
        raise ValueError(f"{path}: {what}{error}") from error

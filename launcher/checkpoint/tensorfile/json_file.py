"""Reads the JSON files of a checkpoint: repeated keys are refused, and each error names its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.untrusted import files

LONGEST = 1 << 28  # bytes; the manifest of 10000 ranks with 400 tensors each is shorter


def read_bytes(path: Path, longest: int = LONGEST) -> bytes:
    """Returns the content of a file.

    Raises ``OSError``; for a file that is not regular or too long this is ``RefusedFile``, also a
    ``ValueError``.
    """
    return files.read_bytes(path, longest)


def parsed(path: Path, data: bytes, what: str = "") -> Any:
    """Parses the JSON ``data`` that was read from ``path``.

    Raises ``ValueError`` if it is not JSON or repeats a key; the message has ``what`` after the path.
    """
    try:
        return files.parsed(data, unique=True)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {what}no JSON") from error
    except ValueError as error:
        raise ValueError(f"{path}: {what}{error}") from error
